"""Resident memory of a training with its states on disk: a process of its own, sampled throughout.

    python resident.py PARAMETERS SLICES FOLDER plain|disk

Prints for each phase the peak of resident memory (anonymous, file and shared pages: what
/proc/self/statm calls resident) over what there was before the optimizer: parameters, gradients and
the libraries. Bytes, as JSON.
"""

import ctypes
import gc
import json
import resource
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from swap_optimizer import SwapOptimizer

LAYER = 256 * 1024  # parameters, in a vector: 16 slices of 200 million are whole layers


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Sampler:
    """The peak of resident memory, looked at every millisecond or so."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.base = 0
        self.samples = 0
        self._phase = ""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            if self._phase:
                self._note()
            time.sleep(0.001)

    def _note(self) -> None:
        self.samples += 1
        grown = resident() - self.base
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), grown)

    @contextmanager
    def phase(self, name: str):
        self._phase = name
        yield
        self._note()
        self._phase = ""


def main(parameters: int, slices: int, folder: Path, kind: str) -> dict[str, int]:
    warnings.simplefilter("ignore")
    params = [nn.Parameter(torch.ones(LAYER)) for _ in range(parameters // LAYER)]
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 0.1 * (i + 1))
    # What saving and a step import, and keep, is no state.
    small = torch.optim.AdamW([nn.Parameter(torch.ones(8))], fused=True)
    small.param_groups[0]["params"][0].grad = torch.ones(8)
    small.step()
    dcp.save({"x": small.state_dict()}, checkpoint_id=folder / "small")
    dcp.load({"x": small.state_dict()}, checkpoint_id=folder / "small")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already is not to be had again

    sampler = Sampler()
    sampler.base = resident()
    with sampler.phase("construction"):
        optimizer = torch.optim.AdamW(params, fused=True)
        if kind == "disk":
            optimizer = SwapOptimizer(optimizer, slices=slices, storage="disk", path=folder)
    with sampler.phase("first step"):
        optimizer.step()
    with sampler.phase("step"):
        optimizer.step()
    with sampler.phase("between steps"):
        time.sleep(0.05)
    if kind == "disk":
        with sampler.phase("torch.save"):
            torch.save(optimizer.state_dict(), folder / "states.pt")
        with sampler.phase("load_state_dict"):
            optimizer.load_state_dict(optimizer.state_dict())
        with sampler.phase("dcp.save"):
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder / "dcp")
        with sampler.phase("dcp.load"):
            states = {"optimizer": optimizer.state_dict()}
            dcp.load(states, checkpoint_id=folder / "dcp")
            optimizer.load_state_dict(states["optimizer"])
            del states
        with sampler.phase("step after loading"):
            optimizer.step()
        with sampler.phase("at the end"):
            time.sleep(0.05)
    assert sampler.samples > 100, sampler.samples
    return sampler.peaks


if __name__ == "__main__":
    _, parameters, slices, folder, kind = sys.argv
    print(json.dumps(main(int(parameters), int(slices), Path(folder), kind)))
