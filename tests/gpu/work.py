"""The distillations that checks run: jobs of the product on synthetic images or a packed set, and batches that lie on the device.

Shapes: B batch, C=3 channels, H W pixels.
"""

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.contract import Settings
from tests.trainables.jobs import Recorded, no_telemetry, write_teacher
from trainables.config import TrainConfig
from trainables.device.device_batches import DeviceBatch
from trainables.distributed.group import Group
from trainables.engine.job import Job, TrainStep
from trainables.engine.train import build

MANY_STEPS = 1_000_000
"""Of an epoch, where a check does not want to see another one begin."""
WARM_UP_STEPS = 3
"""In which kernels are loaded and cuDNN searches."""


@dataclass(frozen=True)
class Pair:
    """A teacher, its student and their images."""

    teacher: str
    student: str
    image_size: int
    num_classes: int


R34_R18 = Pair("resnet34", "resnet18", 224, 1000)
R56_R20 = Pair("resnet56", "resnet20", 32, 100)
_TWIN = Pair("convnet_large", "convnet_small", 8, 10)


def sized(pair: Pair, settings: Settings) -> Pair:
    """The pair itself, or what stands for it on a CPU."""
    return _TWIN if settings.small else pair


def first_device(settings: Settings) -> torch.device:
    """The device of a piece that needs one, which is this process's own from here on."""
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True  # as `set_up_torch` does
    return device


def job_config(
    settings: Settings, pair: Pair, batch: int, precision: str, sections: Mapping[str, Mapping[str, Any]] | None = None
) -> TrainConfig:
    """KD of a pair as the recipes have it; `sections` change keys of it. The teacher's weights are its initial ones."""
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / f"{pair.teacher}-{pair.num_classes}.safetensors"
    if not weights.exists():
        write_teacher(weights, pair.teacher, pair.num_classes, pair.image_size)
    tree: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="job-", dir=folder),
        "model": pair.student,
        "precision": precision,
        "teacher": {"model": pair.teacher, "weights": str(weights)},
        "distill": {"method": ["kd"], "task_weight": 0.5, "options": {"kd": {"weight": 0.5, "temperature": 4.0}}},
        "data": {
            "path": "synthetic",
            "image_size": pair.image_size,
            "global_batch_size": batch,
            "loader_workers": 1,
            "synthetic_images": 2 * batch,
            "synthetic_classes": pair.num_classes,
        },
        "optim": {"epochs": 1, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
        "train": {"channels_last": pair.image_size >= 224, "log_every": 1_000_000, "warmup_steps": WARM_UP_STEPS},
    }
    for name, section in (sections or {}).items():
        tree[name] = {**tree[name], **section}
    return TrainConfig.model_validate(tree)


def group_of(device: torch.device) -> Group:
    """A job of one rank on this device."""
    return Group(0, 1, 0, device)


@contextlib.contextmanager
def open_job(config: TrainConfig, device: torch.device) -> Iterator[Job]:
    """A job of one rank, closed and its memory given back at the end."""
    with contextlib.closing(build(config, group_of(device), Recorded(), no_telemetry, stop_early=lambda _: False)) as job:
        yield job
    del job
    release(device)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_batch(pair: Pair, batch: int, device: torch.device) -> DeviceBatch:
    """Random images that lie on the device as the loader's do, and are trained on again and again."""
    images_BHWC = torch.randint(256, (batch, pair.image_size, pair.image_size, 3), dtype=torch.uint8, device=device)
    indices_B = torch.arange(batch)
    labels_B = indices_B.to(device) % pair.num_classes
    return DeviceBatch(images_BHWC.permute(0, 3, 1, 2), labels_B, indices_B.to(device), indices_B, 0)


class Stepper:
    """A callable that takes one more step of a job on the same batch, as the loop takes it."""

    def __init__(self, job: Job, batch: DeviceBatch, train_step: TrainStep | None = None) -> None:
        """`train_step`: in place of the job's own."""
        self._job, self._batch, self._step = job, batch, 0
        self._train_step = train_step or job.train_step

    def __call__(self) -> None:
        timer = self._job.metrics.timer
        timer.start()
        timer.mark("data")
        self._train_step(self._batch, self._step, timer)
        timer.stop()
        self._step += 1


def folder_of(settings: Settings, name: str) -> Path:
    """A folder of this run's own, kept for later pieces."""
    folder = settings.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
