"""What ``titan-npu plan`` does once its options are read."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from titan_npu_train.failures import UserError
from titan_npu_train.plan import render
from titan_npu_train.plan.cost import Machine, cost
from titan_npu_train.plan.published import PublishedRow, published_rows
from titan_npu_train.plan.search import Candidate, Found, candidate_of, gib, in_words, search
from titan_npu_train.plan.split import Split

__all__ = ["memory_size", "plan", "plan_published"]

_TABLE_WIDTH = 180
_MOST_LINES = 12
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def memory_size(text: str) -> int:
    """Bytes of "64GB" and the like: units of 1024, as vendors count a device's memory.

    Raises:
        UserError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = 0 if match is None else round(float(match[1]) * 2 ** _UNITS[match[2].upper()])
    if size < 2**20:  # a number without a unit, most likely
        raise UserError(f"--device-memory must be a size such as 64GB, 1MB or more, got '{text}'.")
    return size


def plan(
    config: Any,
    name: str,
    *,
    world: int,
    device_memory: int,
    device: str,
    machine: Machine,
    wanted: int | None,
    as_json: bool,
    out: Path | None,
    console: Console,
    errors: Console,
) -> None:
    """Estimate ``config`` on ``world`` devices, look for better splits, and show it.

    Args:
        config, name: what is planned.
        wanted: splits to find; 0 looks at none, None at all of them.
        as_json: print JSON and nothing else to ``console``.
        out: a folder for plan.json and plan.png.
        console, errors: for results, and for what is said meanwhile.
    """
    own: Candidate | None = None
    refusal = ""
    try:
        own = candidate_of(config, world, device_memory, machine, device)
    except UserError as error:
        if wanted == 0:
            raise UserError(str(error).replace("--nproc", "--world")) from None
        refusal = str(error).replace("--nproc", "--world")
    found = Found([], [], {}, {}, 0)
    if wanted != 0:
        with errors.status("looking at splits") as status:

            def progress(split: Split, fitting: int, seen: int) -> None:
                status.update(f"{seen} splits looked at, {fitting} fit; now {split.name()}")

            found = search(
                config,
                world,
                device_memory,
                machine=machine,
                device=device,
                wanted=wanted,
                progress=progress,
            )
    document = {
        "config": name,
        "world": world,
        "device": device,
        "device_memory_bytes": device_memory,
        "machine": vars(machine),
        "plan": None if own is None else own.to_dict(),
        "refusal": refusal,
        "fitting": [c.to_dict() for c in found.fitting],
        "too_large": [c.to_dict() for c in found.too_large],
        "hopeless": [
            {"name": split.name(), "split": asdict(split), "least_bytes": least}
            for split, least in found.hopeless.items()
        ],
        "refused": {
            reason: sorted({s.name() for s in splits}) for reason, splits in found.refused.items()
        },
        "unseen": found.unseen,
    }
    bars: list[Candidate] = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        partial = out / ".plan.json"
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(out / "plan.json")
        bars = [c for c in (own, *found.fitting, *found.too_large[:8]) if c is not None]
        title = f"{name} on {world} devices"
        if bars:
            render.draw(bars, device_memory, out / "plan.png", title=title)
    if as_json:
        console.print(json.dumps(document, indent=1), markup=False)
        return
    _show(own, refusal, found, name, world, device_memory, console)
    if out is not None:
        drawn = f", {out / 'plan.png'}" if bars else "; there is nothing to draw"
        console.print(f"\n{out / 'plan.json'}{drawn}", markup=False)


def _show(
    own: Candidate | None,
    refusal: str,
    found: Found,
    name: str,
    world: int,
    device_memory: int,
    console: Console,
) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False)

    if own is None:
        say(f"{name} itself does not run on {world} devices: {refusal}\n")
    else:
        say(f"{name} on {world} devices: {own.split.name()}\n")
        _show_table(console, render.memory_table(own.estimate))
        room = device_memory - own.estimate.largest.total
        verdict = f"fits, with {gib(room)} GiB to spare" if own.fits else own.why_not
        say(f"\nOf {device_memory / 2**30:.3g} GiB: {verdict}.")
        for note in own.estimate.notes:
            say(f"- {note}")
        say("")
    if found.fitting:
        title = "Splits that fit, fastest first (GiB of the fullest device; seconds by the model)"
        _show_table(console, render.splits_table(found.fitting, title))
        say(f"\nTo run the first: {' '.join(found.fitting[0].split.options())}")
    elif found.too_large or found.hopeless:
        say("No split fits.")
    if found.too_large:
        say("\nThese do not fit, with as little memory as they take:")
        for candidate in found.too_large:
            say(f"- {candidate.split.name()}: {candidate.why_not}")
    if found.hopeless:
        say("\nFar too large, of which this is the least, recomputed and swapped:")
        for split, least in list(found.hopeless.items())[:_MOST_LINES]:
            total = gib(sum(least.values()))
            say(f"- {split.name()}: more than {total} GiB: {in_words(least)}")
        if len(found.hopeless) > _MOST_LINES:
            say(f"- and {len(found.hopeless) - _MOST_LINES} more (all in --json)")
    for reason, splits in found.refused.items():
        names = sorted({split.name() for split in splits})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(f"\nNot possible ({', '.join(names[:3])}{more}): {reason}")
    if found.unseen:
        say(f"\n{found.unseen} slower combinations were not looked at (--all does).")


def _show_table(console: Console, table: Table) -> None:
    # Wider than a narrow terminal rather than with figures cut off.
    width = max(console.width, _TABLE_WIDTH)
    Console(file=console.file, width=width, force_terminal=console.is_terminal).print(table)


def plan_published(
    config: Any,
    *,
    world: int,
    device_memory: int,
    machine: Machine,
    as_json: bool,
    console: Console,
) -> list[tuple[PublishedRow, float]]:
    """The published table for ``config``'s model, cheapest in communication first.

    Communication is that of :mod:`.cost`, in seconds a sequence.
    """
    model = config.model_spec.model
    tokens = config.training.seq_len
    rows = []
    for row in published_rows(model, world, tokens=tokens):
        split = Split(
            pipeline=row.pipeline,
            tensor=row.tensor,
            context=row.context,
            data=row.data,
            expert=row.expert,
            rows=1,
            microbatches=1,
            checkpointing="full",
            swap=True,
        )
        rows.append((row, cost(config, split, machine).communication / row.data))
    rows.sort(key=lambda pair: (pair[0].total_bytes > device_memory, pair[1]))
    if as_json:
        document = [
            row.to_dict() | {"communication": s, "fits": row.total_bytes <= device_memory}
            for row, s in rows
        ]
        console.print(json.dumps(document, indent=1), markup=False)
        return rows
    _show_table(console, render.published_table(rows, device_memory, tokens))
    console.print(
        "\nWithout gathered weights, workspace, norms, logits: leave out --counting for those.",
        markup=False,
    )
    return rows
