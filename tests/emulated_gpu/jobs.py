"""What tests run on the emulated GPU, each in a process of its own, which prints its findings as JSON:
`python -m tests.emulated_gpu.jobs NAME [ARGUMENT …]`."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.emulated_gpu.counters import counted
from tests.gpu.check_graphs import CHECK, difference
from tests.gpu.contract import Settings
from tests.gpu.work import MANY_STEPS, Pair, Stepper, device_batch, job_config, open_job
from tests.trainables.engine.graphed_jobs import Trained, settings
from trainables.distributed.group import Group
from trainables.engine.cuda_capture import CudaCapture

Findings = dict[str, Any]
GPU = torch.device("cuda", 0)
GIB = 2**30
R20_R8 = Pair("resnet20", "resnet8", 32, 10)
WARM_UP_STEPS = 6
"""After which cuDNN has searched, and a step's graphs are replayed."""


def same_as_on_cpu(folder: Path) -> Findings:
    """A few steps on either device."""
    config = settings("kd", folder)
    on_cpu, on_gpu = (
        Trained(config, graphed=False, group=Group(device=device), steps=3) for device in (torch.device("cpu"), GPU)
    )
    return {"difference": difference(on_cpu, on_gpu)}


def counts_of_a_step(folder: Path) -> Findings:
    """What a step does, eagerly and as graphs."""
    torch.cuda.set_device(GPU)
    batch, found = device_batch(R20_R8, 64, GPU), {}
    for name, graphs in (("eager", False), ("graphed", True)):
        config = job_config(Settings("cuda", folder), R20_R8, 64, "fp32", {"train": {"cuda_graphs": graphs}})
        with open_job(config, GPU) as job:
            job.train_state.epochs = replace(job.train_state.epochs, steps_per_epoch=MANY_STEPS)
            step = Stepper(job, batch)
            for _ in range(WARM_UP_STEPS):
                step()
            with counted() as counts:
                step()
        found[name] = vars(counts)
    return found


def recapture(folder: Path, method: str) -> Findings:
    """Two epochs of a method, eagerly and as graphs."""
    config = settings(method, folder)
    eager, graphed = (Trained(config, graphed=graphed, group=Group(device=GPU), steps=12) for graphed in (False, True))
    found = {"difference": difference(eager, graphed), "off": graphed.step.off}
    return found | {"captures": graphed.num_captures, "replays": graphed.num_replays}


class CrowdedCapture:
    """Captures; as soon as a step is captured, all memory of the device but that of its graphs is taken by somebody else."""

    def __init__(self) -> None:
        self._inner, self.num_captures = CudaCapture(GPU), 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = self._inner(run)
        self.num_captures += 1
        if self.num_captures == 2:
            torch.cuda.empty_cache()
            free_bytes, total_bytes = torch.cuda.mem_get_info(GPU)
            os.environ["EMULATED_GPU_MEMORY_GIB"] = str((total_bytes - free_bytes) / GIB)
        return replay

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def has_room(self, relative_batch: float) -> bool:
        return self._inner.has_room(relative_batch)


def crowded(folder: Path) -> Findings:
    """Two epochs, whose last batch is of a shape that has no graph."""
    config = settings("kd", folder)
    eager = Trained(config, graphed=False, group=Group(device=GPU), steps=12)
    graphed = Trained(config, graphed=True, group=Group(device=GPU), steps=12, capture=CrowdedCapture())
    found = {"difference": difference(eager, graphed), "off": graphed.step.off}
    return found | {"captures": graphed.num_captures, "replays": graphed.num_replays}


def workers(folder: Path) -> Findings:
    """The piece of two ranks of the checks that wait for a GPU."""
    piece = next(piece for piece in CHECK.pieces if piece.name == "12-workers")
    measured = piece.measure(Settings("cuda", folder))
    return {expected.figure: expected.verdict(measured, "cuda") for expected in piece.expected}


def synchronise_in_capture(folder: Path) -> Findings:
    """A graph that reads a number of the device."""
    total = torch.ones(3, device=GPU)
    error = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            total.sum().item()
    except RuntimeError as raised:
        error = str(raised.__context__ or raised)
    return {"error": error, "replayable": float(total.sum())}


def out_of_memory(folder: Path) -> Findings:
    """An allocation beyond the limit, and one that fits after it."""
    total, message = torch.cuda.mem_get_info(GPU)[1], ""
    try:
        torch.empty(total + GIB, dtype=torch.uint8, device=GPU)
    except torch.OutOfMemoryError as error:
        message = str(error)
    return {"message": message, "fits": torch.empty(total // 2, dtype=torch.uint8, device=GPU).numel()}


JOBS: dict[str, Callable[..., Findings]] = {
    "same_as_on_cpu": same_as_on_cpu,
    "counts_of_a_step": counts_of_a_step,
    "recapture": recapture,
    "crowded": crowded,
    "workers": workers,
    "synchronise_in_capture": synchronise_in_capture,
    "out_of_memory": out_of_memory,
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(JOBS[sys.argv[1]](Path(scratch), *sys.argv[2:])))
