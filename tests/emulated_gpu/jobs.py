"""What tests run on the emulated GPU, each in a process of its own, which prints its findings as JSON:
`python -m tests.emulated_gpu.jobs NAME [ARGUMENT …]`."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.cuda import _sanitizer as sanitizer

from tests.emulated_gpu.counters import counted
from tests.gpu.check_graphs import CHECK, difference
from tests.gpu.contract import Settings
from tests.gpu.work import MANY_STEPS, Pair, Stepper, device_batch, job_config, open_job
from tests.trainables.engine.graphed_jobs import CountingCapture, CpuCapture, Trained, settings
from tests.trainables.jobs import Recorded, no_telemetry
from tests.trainables.jobs import config as small_config
from trainables.device.device_batches import DeviceBatch, _Copy, _without
from trainables.distributed.group import Group
from trainables.engine import launch_bound, loop
from trainables.engine.cuda_capture import CudaCapture
from trainables.engine.graphed_step import GraphedStep
from trainables.engine.job import build
from trainables.engine.launch_bound import StepTimes, measure

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


def choice(folder: Path) -> Findings:
    """What `train.cuda_graphs: auto` measures and chooses."""
    config, measured = settings("kd", folder, train={"cuda_graphs": "auto"}), list[StepTimes]()

    def remembered(*args: Any) -> StepTimes:
        measured.append(measure(*args))
        return measured[-1]

    sleep = mock.patch.object(torch.cuda, "_sleep", wraps=torch.cuda._sleep)
    with (
        sleep as sleeps,
        mock.patch.object(launch_bound, "measure", remembered),
        contextlib.closing(build(config, Group(device=GPU), Recorded(), no_telemetry)) as job,
    ):
        graphed = isinstance(job.functions.train_step, GraphedStep)
    cycles = [int(call.args[0]) for call in sleeps.call_args_list]
    return {**measured[0]._asdict(), "is_launch_bound": measured[0].is_launch_bound, "graphed": graphed, "cycles": cycles}


def recapture(folder: Path, method: str) -> Findings:
    """Two epochs of a method, eagerly and as graphs."""
    config = settings(method, folder)
    eager, graphed = (Trained(config, graphed=graphed, group=Group(device=GPU), steps=12) for graphed in (False, True))
    found = {"difference": difference(eager, graphed), "off": graphed.step.off}
    return found | {"captures": graphed.num_captures, "replays": graphed.num_replays}


class CrowdedCapture(CountingCapture):
    """Captures; as soon as a step is captured, all memory of the device but that of its graphs is taken by somebody else."""

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        replay = super().__call__(run, side=side)
        if self.num_captures == 1 and self._is_update and not side:
            torch.cuda.empty_cache()
            free_bytes, total_bytes = torch.cuda.mem_get_info(GPU)
            os.environ["EMULATED_GPU_MEMORY_GIB"] = str((total_bytes - free_bytes) / GIB)
        return replay


def crowded(folder: Path) -> Findings:
    """Two epochs, whose last batch is of a shape that has no graph."""
    config = settings("kd", folder)
    eager = Trained(config, graphed=False, group=Group(device=GPU), steps=12)
    graphed = Trained(config, graphed=True, group=Group(device=GPU), steps=12, capture=CrowdedCapture(CudaCapture(GPU)))
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


class RecordedCapture(CudaCapture):
    """Replays by running the operations once more in their streams, where the sanitizer sees them."""

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        with self.side_stream() if side else contextlib.nullcontext():
            return CpuCapture()(run)


def without_first_row(copy: _Copy) -> DeviceBatch:
    """A batch whose first image the decoder of the device could not read."""
    return _without({0: "not an image"}, copy.batch, mock.Mock())


BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "batches": (DeviceBatch, "wait", lambda batch: None),
    "rows": (_Copy, "result", lambda copy: without_first_row(copy)._replace(copied=copy.copied)),
    "wait": (CudaCapture, "wait_for_side_stream", lambda capture: None),
    "release": (CudaCapture, "release_side_stream", lambda capture: None),
}
"""Waits between streams, each with what leaves it out."""


def races(folder: Path, broken: str = "") -> Findings:
    """What two streams do to the same memory without an order between them, by torch's sanitizer: in two epochs as the loop runs
    them, with checkpoints and evaluation, and in steps as graphs, whose batches are whole or lack an image."""
    torch.cuda.set_device(GPU)
    sanitizer.enable_cuda_sanitizer()
    network = {"model": "resnet8", "precision": "fp32", "teacher": {"model": "resnet8", "weights": None}}
    often = {"log_every": 3, "checkpoint_every": 5, "warmup_steps": 1}
    data = {"global_batch_size": 300, "last_batch": "drop", "device_augment": {"mixup": 0.2}}
    config = small_config(folder, **network, train=often, data=data, optim={"epochs": 2})
    found: Findings = {"races": 0}
    with contextlib.ExitStack() as patches:
        try:
            if broken not in ("", "rows"):
                patches.enter_context(mock.patch.object(*BROKEN[broken]))
            with contextlib.closing(build(config, Group(device=GPU), Recorded(), no_telemetry)) as job:
                loop.run(job)
                found["steps"] = job.progress.step
            for result in (_Copy.result, BROKEN["rows"][2] if broken == "rows" else without_first_row):
                patches.enter_context(mock.patch.object(_Copy, "result", result))
                config, capture = settings("fitnet", folder / "graphs"), RecordedCapture(GPU)
                graphed = Trained(config, graphed=True, group=Group(device=GPU), capture=capture, steps=8)
                found["replays"] = found.get("replays", 0) + graphed.num_replays
        except sanitizer.CUDASanitizerErrors as error:
            found["races"] = len(error.errors)
    return found


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
    "choice": choice,
    "recapture": recapture,
    "crowded": crowded,
    "workers": workers,
    "synchronise_in_capture": synchronise_in_capture,
    "races": races,
    "out_of_memory": out_of_memory,
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(JOBS[sys.argv[1]](Path(scratch), *sys.argv[2:])))
