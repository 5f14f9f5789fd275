"""What tests run on the emulated GPU, each in a process of its own, which prints its findings as JSON:
`python -m tests.emulated_gpu.jobs NAME [ARGUMENT …]`."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.cuda import _sanitizer as sanitizer

from tests.emulated_gpu.counters import counted
from tests.gpu.contract import Settings
from tests.gpu.work import Pair, Stepper, device_batch, job_config, open_job
from tests.trainables.engine.first_steps import settings, state_after
from tests.trainables.jobs import Recorded, no_telemetry, relative_difference
from tests.trainables.jobs import config as small_config
from trainables.device.device_batches import DeviceBatch, _Copy, _without
from trainables.distributed.group import Group
from trainables.engine.log_lines import log_step
from trainables.engine.train import build, run_job

Findings = dict[str, Any]
GPU = torch.device("cuda", 0)
GIB = 2**30
R20_R8 = Pair("resnet20", "resnet8", 32, 10)
WARM_UP_STEPS = 6
"""After which cuDNN has searched."""


def same_as_on_cpu(folder: Path) -> Findings:
    """Two epochs on either device."""
    config = settings("kd", folder)
    on_cpu, on_gpu = (state_after(config, Group(device=device)) for device in (torch.device("cpu"), GPU))
    return {"difference": relative_difference(on_cpu, on_gpu)}


def counts_of_a_step(folder: Path) -> Findings:
    """What a step does."""
    torch.cuda.set_device(GPU)
    batch = device_batch(R20_R8, 64, GPU)
    with open_job(job_config(Settings("cuda", folder), R20_R8, 64, "fp32"), GPU) as job:
        step = Stepper(job, batch)
        for _ in range(WARM_UP_STEPS):
            step()
        with counted() as counts:
            step()
    return vars(counts)


def waits_of_log_lines(folder: Path) -> Findings:
    """How often the first line, and the second, wait for the device."""
    torch.cuda.set_device(GPU)
    batch, waits = device_batch(R20_R8, 64, GPU), []
    with open_job(job_config(Settings("cuda", folder), R20_R8, 64, "fp32"), GPU) as job:
        step = Stepper(job, batch)
        for _ in range(2):
            step()
            job.progress.step += 1
            with counted() as counts:
                log_step(job, job.progress.step)
            waits.append(counts.synchronisations)
    return {"waits": waits}


def without_first_row(copy: _Copy) -> DeviceBatch:
    """A batch whose first image the decoder of the device could not read."""
    return _without({0: "not an image"}, copy.batch, mock.Mock())


BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "batches": (DeviceBatch, "wait", lambda batch: None),
    "rows": (_Copy, "result", lambda copy: without_first_row(copy)._replace(copied=copy.copied)),
}
"""Waits between streams, each with what leaves it out."""


def races(folder: Path, broken: str = "") -> Findings:
    """What two streams do to the same memory without an order between them, by torch's sanitizer: in two epochs as the loop runs
    them, with checkpoints and evaluation, whose batches are whole, and then lack an image."""
    torch.cuda.set_device(GPU)
    sanitizer.enable_cuda_sanitizer()
    network = {"model": "resnet8", "precision": "fp32", "teacher": {"model": "resnet8", "weights": None}}
    often = {"log_every": 3, "checkpoint_every": 5, "warmup_steps": 1}
    data: dict[str, Any] = {"global_batch_size": 300, "last_batch": "drop"}
    found: Findings = {"races": 0, "steps": 0}
    with contextlib.ExitStack() as patches:
        try:
            if broken not in ("", "rows"):
                patches.enter_context(mock.patch.object(*BROKEN[broken]))
            for name, result in (("whole", _Copy.result), ("rows", BROKEN["rows"][2] if broken == "rows" else without_first_row)):
                patches.enter_context(mock.patch.object(_Copy, "result", result))
                sections = {
                    "train": often,
                    "data": data if name == "whole" else data | {"device_augment": {}},
                    "optim": {"epochs": 2},
                }
                config = small_config(folder / name, **network, **sections)
                with contextlib.closing(build(config, Group(device=GPU), Recorded(), no_telemetry)) as job:
                    run_job(job)
                    found["steps"] += job.progress.step
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
    "waits_of_log_lines": waits_of_log_lines,
    "races": races,
    "out_of_memory": out_of_memory,
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(JOBS[sys.argv[1]](Path(scratch), *sys.argv[2:])))
