"""The plan's estimate before a run, and beside what was measured after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_npu_train import launch
from titan_npu_train.plan.memory import Estimate, estimate
from titan_npu_train.run_folder import read_metrics

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """What ``nproc`` processes are expected to need.

    Attributes:
        device: "cpu", "cuda" or "npu".
        capacity: bytes that each of them may use.
        estimate: None where there is none, for the reason ``why_not``.
    """

    nproc: int
    device: str
    capacity: int
    estimate: Estimate | None
    why_not: str = ""

    def run(
        self,
        config: Any,
        *,
        module: str,
        name: str,
        options: Sequence[str],
        say: Callable[[str], None],
    ) -> launch.RunResult:
        """:func:`.launch.launch`, with a word before if it may not fit, and what it took after."""
        if warning := self.warning():
            say(warning)
        result = launch.launch(
            config, module=module, name=name, options=options, nproc=self.nproc, say=say
        )
        if result.last_step is not None:
            say(self.comparison(result))
        return result

    def warning(self) -> str | None:
        if self.estimate is None or self.estimate.largest.total <= self.capacity:
            return None
        from titan_npu_train.plan.search import in_words

        largest = self.estimate.largest
        return (
            f"this may not fit: {largest.total / 2**30:.2f} GiB planned of "
            f"{self.capacity / 2**30:.2f} a process ({in_words(largest.parts)}); titan-npu plan "
            "looks for splits that do"
        )

    def comparison(self, result: launch.RunResult) -> str:
        """Peak memory of rank 0, measured and planned."""
        first, last = result.first_step or 0, result.last_step or 0
        peaks = [
            record["peak_memory_bytes"]
            for record in read_metrics(result.dump_folder)
            if first <= record["step"] <= last
        ]
        measured = max(peaks)
        text = f"peak memory of rank 0: {measured / 2**30:.2f} GiB measured"
        if self.estimate is None:
            return f"{text}, not planned ({self.why_not})"
        parts = self.estimate.ranks[0].parts  # rank 0 is of the first pipeline rank
        # What an allocator's peak does not have in it: the device's context, and what
        # communicators take. Experts' worst case is planned for, and seldom comes.
        outside = 0 if self.device == "cpu" else parts["runtime"] + parts["communication"]
        planned = sum(parts.values()) - outside - parts["moe_imbalance"]
        text += f", {planned / 2**30:.2f} GiB planned ({planned / measured - 1:+.0%})"
        if parts["moe_imbalance"]:
            text += f", and {parts['moe_imbalance'] / 2**30:.2f} for experts at their worst"
        return text


def predict(config: Any, nproc: int, platform: Any) -> Prediction:
    """Estimate a run that is about to start, or say why that cannot be done.

    A plan that fails must not keep a run from starting: it could be right all the same.
    """
    capacity = launch.memory_of_a_process(platform, nproc)
    try:
        planned = estimate(config, nproc, device=platform.name)
    except Exception as error:
        why_not = f"{type(error).__name__}: {error}"
        return Prediction(nproc, platform.name, capacity, None, why_not)
    return Prediction(nproc, platform.name, capacity, planned)
