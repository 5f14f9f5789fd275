"""7: two ranks on the one GPU, over Gloo with CUDA tensors: what one rank learns, two learn."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.work import folder_of
from tests.trainables.jobs import Recorded, config, no_telemetry, relative_difference, train, with_noise_scale, write_teacher
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, train_step

SMALL_RESNET = {
    "model": "resnet8",
    "teacher": None,
    "scale": {"sync_batch_norm": True},
    "data": {"path": "synthetic", "synthetic_images": 65, "image_size": 16, "global_batch_size": 32},
}
"""Its last batch has one image: a rank has none."""


def on(group: Group, device: str) -> Group:
    """The rank on the first GPU, which all share."""
    if device == "cpu":
        return group
    torch.cuda.set_device(0)
    return replace(group, device=torch.device("cuda", 0))


def state_of(group: Group, device: str, settings: TrainConfig) -> dict[str, torch.Tensor]:
    """The student's parameters after the whole job, and what it says of the gradient noise."""
    result = train(on(group, device), settings)
    summary = result["calls"][-1][2]
    noise = {name: torch.tensor([summary[name]], dtype=torch.float64) for name in ("noise_scale",) if name in summary}
    return {name: tensor.cpu() for name, tensor in result["state"].items()} | noise


def synchronisations(group: Group, device: str, settings: TrainConfig) -> int:
    """How often the host waited for the device in the steps of two epochs, without the first two: in the second one DDP makes
    its buckets anew, and tells the other ranks their sizes."""
    with contextlib.closing(build(settings, on(group, device), Recorded(), no_telemetry)) as job:
        count, step = 0, 0
        for epoch in range(2):
            for batch in on_device(job.train_loader.epoch(epoch), job.group.device):
                with counted(job.group.device if step >= 2 else None) as waits:
                    train_step(job.train_state, batch, step, job.metrics.timer)
                count += sum("synchronizing CUDA operation" in str(each.message) for each in waits)
                step += 1
    return count


@contextlib.contextmanager
def counted(device: torch.device | None) -> Iterator[list[Any]]:
    """The warnings meanwhile, one of which is for every wait of the host for its GPU; none on a CPU, or without a device."""
    if device is None or device.type == "cpu":
        yield []
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


def compared(settings: Settings, name: str) -> Measured:
    """Parameters of two ranks beside one rank's, in float64, and the synchronisations of a step of two."""
    folder = folder_of(settings, f"ranks-{name}")
    sections = SMALL_RESNET if name == "batch norm" else uneven(folder)
    with contextlib.closing(RankPool(2)) as ranks:
        one, two = (ranks.run(n, state_of, settings.device, config(folder / str(n), **sections))[0] for n in (1, 2))
        waits = ranks.run(2, synchronisations, settings.device, config(folder / "waits", **sections))
    two.pop("noise_scale", None)  # one rank's batch has a single part
    return {"difference": relative_difference(one, two), "synchronisations": max(waits)}


def uneven(folder: Path) -> dict[str, Any]:
    """A job with a method that gathers the rows of all ranks, one of which has none in the last batch."""
    distill = {"method": ["kd", "rkd"], "options": {"kd": {"weight": 0.7}, "rkd": {"weight": 0.2}}}
    data = {"path": "synthetic", "synthetic_images": 65, "global_batch_size": 32}
    return {"teacher": {"weights": write_teacher(folder / "teacher.safetensors")}, "data": data, "distill": distill}


def noise(settings: Settings) -> Measured:
    """The gradient noise scale of two ranks beside one rank's of two micro-batches, in float64."""
    folder = folder_of(settings, "ranks-noise")
    even = {"teacher": None, "data": {"path": "synthetic", "synthetic_images": 128, "global_batch_size": 32}}
    jobs = {1: config(folder / "1", **even, optim={"accumulate": 2}), 2: config(folder / "2", **even)}
    with contextlib.closing(RankPool(2)) as ranks:
        one, two = (
            float(ranks.run(n, state_of, settings.device, with_noise_scale(job))[0]["noise_scale"]) for n, job in jobs.items()
        )
    return {"difference": abs(one / two - 1), "noise scale": one}


OF_PARAMETERS = (
    Expected("difference", "parameters of one rank: 1e-9", high=1e-9, on_cpu=True),
    Expected("synchronisations", "synchronisations of a step: 0", 0, 0, on_cpu=True),
)
CHECK = Check(
    7,
    "Two ranks on one GPU, over Gloo",
    (
        Piece("7-uneven", partial(compared, name="uneven"), OF_PARAMETERS, 2),
        Piece("7-batch-norm", partial(compared, name="batch norm"), OF_PARAMETERS, 2),
        Piece("7-noise", noise, (Expected("difference", "noise scale of one rank: 1e-9", high=1e-9, on_cpu=True),), 2),
    ),
)
