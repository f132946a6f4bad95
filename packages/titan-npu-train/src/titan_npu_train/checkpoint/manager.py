"""torchtitan's checkpoint manager, made safe against being killed and against damaged files."""

import shutil
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from titan_npu_train.checkpoint import folder as folders
from titan_npu_train.checkpoint.errors import CheckpointError, root_cause
from titan_npu_train.checkpoint.folder import Checkpoint
from titan_npu_train.checkpoint.hugging_face import load_hugging_face
from titan_npu_train.checkpoint.planner import MatchingLoadPlanner
from titan_npu_train.checkpoint.rng import RNG, RngState
from titan_npu_train.checkpoint.stage import stage_problem, training_stage
from titan_npu_train.checkpoint.writer import CommittingWriter

T = TypeVar("T")


class VerifiedCheckpointManager(CheckpointManager):
    """Saves atomically, loads only what is whole, and resumes bit for bit.

    In place of torchtitan's ``CheckpointManager``: same folder layout, same modes, same options.
    What it adds:

    - A checkpoint is written under a temporary name and renamed once all ranks' files, their
      checksums and ``manifest.json`` are on disk, in the background too in the async modes.
    - Before loading, every file's length and checksum is compared, each rank reading its share.
      Damaged and half-written checkpoints are named in the log and skipped; one asked for by
      ``load_step`` is refused. Rank 0 chooses, the others follow.
    - If checkpoints exist and none is usable, training does not start over by itself.
    - Old checkpoints are deleted only after a newer one is complete.
    - Random generator states are saved; shapes are compared before anything is overwritten.
    - A run is resumed in the stage of training that it was in (``dsa.stage``), or not at all.

    A checkpoint written by stock torchtitan has no manifest: it is accepted once all the files
    its ``.metadata`` refers to are found with their full length, and the log says so.

    Raises:
        CheckpointError: on every rank alike; its message names path, cause and cure. An async
            save that failed raises at the next save or at close.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        verify_checksums: bool = True
        """Whether to read all files back and compare checksums before loading, each rank its
        share. Off: names and lengths only."""

        allow_fresh_start: bool = False
        """Whether to start anew when the checkpoint folder holds checkpoints but none is usable."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if filesystem.is_remote(self.folder):
                raise ValueError(
                    f"checkpoint.folder {self.folder}: needs a file system that can rename a "
                    "directory in one step, which object stores cannot. Use a local or shared "
                    "directory, or torchtitan's own CheckpointManager."
                )

    # close() reads these, also when __init__ stopped early
    stager: DefaultStager | None = None
    save_future: Future | None = None

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        if not self.enable:
            return
        self.verify_checksums = config.verify_checksums
        self.allow_fresh_start = config.allow_fresh_start
        self.stage = training_stage(self.states[MODEL].model[0])
        self.states[RNG] = RngState(self.states[MODEL].model)
        if self.pg is None and dist.is_initialized():
            # also for synchronous saves: the training group has a short timeout, and its backend
            # would move every object over the accelerator
            self.pg = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.rank = dist.get_rank(self.pg) if self.pg is not None else 0
        self.world_size = dist.get_world_size(self.pg) if self.pg is not None else 1
        self._run = self._decide(lambda: uuid.uuid4().hex[:8])
        self._checked: Path | None = None
        if (
            self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            and not torch.accelerator.is_available()
        ):
            logger.info("No accelerator: checkpoints are staged in shared, not pinned, memory.")
            self.stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )

    # ------------------------------------------------------------------------- agreement

    def _decide(self, decision: Callable[[], T]) -> T:
        """Run ``decision`` on rank 0 and return its result, or raise its error, on all ranks."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = decision()
            except (CheckpointError, OSError) as error:
                outcome[1] = str(error)
        if self.pg is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.pg)
        if outcome[1] is not None:
            raise CheckpointError(outcome[1])
        return outcome[0]

    def _first(self, finding: str | None) -> str | None:
        """The lowest rank's finding that is not None, on all ranks."""
        findings: list[Any] = [finding]
        if self.pg is not None:
            findings = [None] * self.world_size
            dist.all_gather_object(findings, cast(Any, finding), group=self.pg)
        return next((found for found in findings if found is not None), None)

    def _log(self, log: Callable[[str], None], message: str) -> None:
        if self.rank == 0:
            log(message)

    # ----------------------------------------------------------------------------- saving

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """Write ``state_dict`` under a temporary name and rename that to ``checkpoint_id``.

        Arguments and result are those of ``CheckpointManager.dcp_save``; the future of an async
        save is done when the checkpoint is complete and older ones are on their way out.

        Raises:
            CheckpointError: any rank failed to write; what there was before is untouched.
        """
        final = Path(checkpoint_id)
        step = int(final.name.removeprefix("step-"))
        incomplete = folders.incomplete_path(final.parent, step, self._run)
        result: Future | AsyncSaveResponse | None = None
        try:
            if to_hf:
                self._save_hf(state_dict, incomplete, final)
            else:
                writer = CommittingWriter(
                    incomplete, final, step=step, run=self._run, training_stage=self.stage
                )
                result = self._save_dcp(state_dict, writer, async_mode)
        except (Exception, CheckpointException) as error:
            raise self._save_error(error, incomplete, final) from None
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")

        if isinstance(result, AsyncSaveResponse):
            upload = result.upload_completion
            result.upload_completion = self._settled(upload, incomplete, final, step)
        elif isinstance(result, Future):
            result = self._settled(result, incomplete, final, step)
        else:
            self._purge(step)
        return result

    def _save_dcp(
        self, state_dict: dict[str, Any], writer: CommittingWriter, async_mode: AsyncMode
    ) -> Future | AsyncSaveResponse | None:
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer, process_group=self.pg)
            return None
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            return dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        # named, or DCP would take the writer, which is a stager of the old kind too
        stager = DefaultStager(StagingOptions(False, False, False, False))
        future = dcp.async_save(
            state_dict, storage_writer=writer, process_group=self.pg, async_stager=stager
        )
        assert isinstance(future, Future)  # as this stager stages synchronously
        future.add_done_callback(lambda _: stager.close())
        return future

    def _save_hf(self, state_dict: dict[str, Any], incomplete: Path, final: Path) -> None:
        super().dcp_save(state_dict, str(incomplete), AsyncMode.DISABLED, to_hf=True)
        if self.pg is not None:
            dist.barrier(group=self.pg)

        def publish() -> None:
            folders.sync_tree(incomplete)
            self._delete(folders.publish(incomplete, final, self._run))

        self._decide(publish)

    def _settled(self, upload: Future, incomplete: Path, final: Path, step: int) -> Future:
        """``upload``, followed by what comes after a save: purging, or naming the error."""
        settled: Future = Future()

        def settle(done: Future) -> None:
            try:
                result = done.result()
                self._purge(step)
            except BaseException as error:  # CheckpointException is not an Exception
                settled.set_exception(self._save_error(error, incomplete, final))
            else:
                settled.set_result(result)

        upload.add_done_callback(settle)
        return settled

    def _save_error(self, error: BaseException, incomplete: Path, final: Path) -> CheckpointError:
        if self.rank == 0:
            # on a full disk, what was written of it takes the space the cure needs
            shutil.rmtree(incomplete, ignore_errors=True)
        return CheckpointError(
            f"{final} could not be written: {root_cause(error)}. Earlier checkpoints in "
            f"{final.parent} are intact; free space or fix the permissions there, then resume."
        )

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        finally:
            self.save_future = None  # an error is raised once

    def _close(self) -> None:
        failing = sys.exc_info()[1] is not None
        try:
            self.maybe_wait_for_saving()
        except CheckpointError as error:
            if not failing:
                raise
            logger.error(str(error))  # the error that led here is the one to report
        finally:
            super()._close()
            self.pg = None  # or its threads would outlive destroy_process_group()

    # --------------------------------------------------------------------------- deleting

    def _should_purge(self) -> bool:
        return self.keep_latest_k > 0 and self.rank == 0

    def _purge_stale_checkpoints(self) -> None:
        """Nothing: stock asks as soon as an async save has begun; here the save's end purges."""

    def _purge(self, saved: int) -> None:
        """Delete what is older than the ``keep_latest_k`` newest complete checkpoints.

        Steps later than ``saved``, from before ``load_step`` went back, are another branch: they
        neither count nor go.
        """
        if not self._should_purge():
            return
        listing = folders.list_folder(Path(self.folder))
        kept = 0
        for path in reversed([path for step, path in listing.steps.items() if step <= saved]):
            if kept == self.keep_latest_k:
                self._delete(folders.discard(path, self._run))
                continue
            # a damaged one, or weights alone, is nothing to resume from: it does not count
            with suppress(CheckpointError):
                kept += Checkpoint.open(path).resumable
        for path in listing.discarded:
            self._delete(path)

    def _delete(self, discarded: Path | None) -> None:
        if discarded is None:
            return
        if self.purge_thread is not None and self.purge_thread.is_alive():
            self.purge_queue.put(str(discarded))
        else:
            shutil.rmtree(discarded, ignore_errors=True)

    # ---------------------------------------------------------------------------- loading

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        if not self.load_only:
            for path in self._decide(lambda: folders.recover(Path(self.folder))):
                self._log(logger.info, f"{path}: was complete but not yet named; named it.")
        step = self._newest() if step == -1 else self._named(step)
        if not self.load_only:
            self._decide(self._remove_leftovers)
        return super()._load(step)

    def _find_load_step(self, folder: str = "") -> int:
        """Asked by stock only when :meth:`_load` found nothing to resume from."""
        return -1

    def _named(self, step: int) -> int:
        """Check the checkpoint that ``load_step`` asks for."""
        path = folders.step_path(Path(self.folder), step)
        steps = list(self._decide(lambda: folders.list_folder(path.parent).steps))
        if step not in steps:
            raise CheckpointError(
                f"{path}: no such checkpoint (checkpoint.load_step is {step}); "
                + (f"there are those of steps {steps}" if steps else "the folder has none")
            )
        if later := [other for other in steps if other > step]:
            self._log(
                logger.warning,
                f"{path.parent} also holds the later steps {later}: started again without "
                "checkpoint.load_step, the run would resume from the newest of them.",
            )
        if problem := self._problem(path):
            raise CheckpointError(
                f"{problem}. Refusing to load it (checkpoint.load_step is {step})."
            )
        return step

    def _newest(self) -> int:
        """The newest step that can be resumed from, -1 if there is none and never was one."""
        folder = Path(self.folder)
        listing = self._decide(lambda: folders.list_folder(folder))
        for step, path in listing.incomplete:
            self._log(
                logger.warning,
                f"{path}: half-written checkpoint of step {step}, its run was killed or failed; "
                "skipped.",
            )
        problems = []
        for step, path in sorted(listing.steps.items(), reverse=True):
            if step == 0 and problems:
                problems.append(f"{path}: holds initial weights only")
                break
            problem = self._problem(path)
            if problem is None:
                return step
            problems.append(problem)
            self._log(logger.warning, f"{problem}; skipped.")
        if problems and not self.allow_fresh_start:
            raise CheckpointError(
                f"{folder} holds checkpoints but none to resume from:\n  "
                + "\n  ".join(problems)
                + "\nTraining does not start over by itself. Pass --checkpoint.allow_fresh_start "
                "to start anew (they are replaced step by step), or use another "
                "--checkpoint.folder."
            )
        if problems:
            self._log(logger.warning, f"No usable checkpoint in {folder}: starting anew.")
        return -1

    def _problem(self, path: Path) -> str | None:
        """What forbids loading ``path``, the same on all ranks; None if nothing does."""

        def inspect() -> Checkpoint | str:
            try:
                if folders.is_hf_export(path):
                    return (
                        f"{path}: holds Hugging Face weights, no training state (to begin from "
                        "them, name it in --checkpoint.initial_load_path with "
                        "--checkpoint.initial_load_in_hf)"
                    )
                checkpoint = Checkpoint.open(path)
            except CheckpointError as error:
                return str(error)
            if not checkpoint.resumable and self._is_run_folder(path) and path.name != "step-0":
                return (
                    f"{path}: holds the model only, no training state (to begin from its "
                    "weights, name it in --checkpoint.initial_load_path)"
                )
            return checkpoint

        checkpoint = self._decide(inspect)
        if isinstance(checkpoint, str):
            return checkpoint
        if not checkpoint.files:
            self._log(
                logger.info,
                f"{path}: has no {folders.MANIFEST} (not written by this manager); its files were "
                "checked for presence and length, not for content.",
            )
        finding = (
            None
            if path.is_dir()
            else (
                f"{path}: rank {self.rank} does not see it; checkpoint.folder must be on a file "
                "system that all nodes share"
            )
        )
        if finding is None and self.verify_checksums:
            finding = checkpoint.damage(self.rank, self.world_size)
        finding = self._first(finding)
        if finding is None:
            self._checked = path
        return finding

    def _refuse_other_stage(self, path: Path) -> None:
        if problem := stage_problem(Checkpoint.open(path), self.stage):
            raise CheckpointError(problem)

    def _is_run_folder(self, path: Path) -> bool:
        return path.parent == Path(self.folder)

    def _remove_leftovers(self) -> None:
        listing = folders.list_folder(Path(self.folder))
        for _, path in listing.incomplete:
            logger.info(f"Removing {path}.")
            self._delete(folders.discard(path, self._run))
        for path in listing.discarded:
            self._delete(path)

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load ``checkpoint_id`` into ``state_dict`` and the model, after checking it.

        Raises:
            CheckpointError: it is damaged, or its parameters are not this run's. Nothing has
                been overwritten then.
        """
        if from_hf:
            if self.sd_adapter is None:
                raise CheckpointError(
                    f"{checkpoint_id}: this model has no adapter for Hugging Face weights. Begin "
                    "from a checkpoint in torchtitan's own layout."
                )
            state = load_hugging_face(
                checkpoint_id,
                state_dict,
                self.sd_adapter,
                quantized=from_quantized,
                process_group=self.pg,
            )
            self.states[MODEL].load_state_dict(state)
            return
        if filesystem.is_remote(checkpoint_id):
            self._log(logger.warning, f"{checkpoint_id}: remote, loaded without checking it.")
        elif Path(checkpoint_id) != self._checked and (
            problem := self._problem(Path(checkpoint_id))
        ):
            raise CheckpointError(f"{problem}. Refusing to load it.")
        resumes = any(name in state_dict for name in self.states)
        if resumes and not filesystem.is_remote(checkpoint_id):
            self._decide(lambda: self._refuse_other_stage(Path(checkpoint_id)))
        planner = MatchingLoadPlanner(
            checkpoint_id, [name for name in self.states if name != MODEL], strict=resumes
        )
        try:
            dcp.load(
                state_dict, checkpoint_id=checkpoint_id, planner=planner, process_group=self.pg
            )
        except CheckpointException as error:
            cause = root_cause(error)
            raise CheckpointError(
                cause if cause.startswith(checkpoint_id) else f"{checkpoint_id}: {cause}"
            ) from None
        self.states[MODEL].load_state_dict(state_dict)
