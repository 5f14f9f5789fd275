"""Small real training jobs, and the ways tests look at them."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.run_log import LocalRecorder
from trainables.config import DataConfig, TrainConfig
from trainables.data.source import open_source
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.engine import checkpoint, pass_latency
from trainables.engine.checkpoint import CheckpointState
from trainables.engine.checkpoint_writer import CheckpointWriter, Publish
from trainables.engine.job import Evaluator
from trainables.engine.train import build, run_job
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels
from trainables.models.registry import build_model
from trainables.worker.reporter import Reporter


def config(output_dir: Path | str, **sections: Any) -> TrainConfig:
    """A distillation of two small models without batch norm in float64; `sections` change parts of it."""
    tree: dict[str, Any] = {
        "output_dir": str(output_dir),
        "model": "mlp_small",
        "precision": "fp64",
        "seed": 3,
        "data": {"path": "digits", "image_size": 8, "global_batch_size": 100, "loader_workers": 1, "last_batch": "short"},
        "teacher": {"model": "mlp_large", "weights": None},
        "distill": {"task_weight": 0.3, "options": {"kd": {"temperature": 3.0, "weight": 0.7}}},
        "optim": {"epochs": 1, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
        "train": {"log_every": 4, "warmup_steps": 2, "checkpoint_every": 1000},
    }
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and isinstance(tree.get(name), dict) else value
    if tree["teacher"] is None and not {"distill", "teachers"} & sections.keys():
        tree["distill"] = None
    return TrainConfig.model_validate(tree)


def write_teacher(path: Path, model: str = "mlp_large", num_classes: int = 10, image_size: int = 8, seed: int = 11) -> str:
    """A teacher's checkpoint with its initial weights: any function will do as one to imitate."""
    about = {
        "model": model,
        "num_classes": num_classes,
        "image_size": image_size,
        "classes": [str(i) for i in range(num_classes)],
    }
    state = build_model(model, num_classes=num_classes, image_size=image_size, seed=seed).state_dict()
    checkpoint.write_tensors(path, {f"model.{name}": tensor for name, tensor in state.items()}, about)
    return str(path)


def write_able_teacher(path: Path, order: Sequence[int] = range(10), seed: int = 11) -> str:
    """The checkpoint of a teacher that tells digits apart, its head by least squares. `order`: the labels of its classes."""
    write_teacher(path, seed=seed)
    tensors, about = checkpoint.read(path)
    data = DataConfig(image_size=8)
    source = open_source(data, "train")
    pixels = np.stack([np.asarray(source.read(index)) for index in range(len(source))])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    model = build_model("mlp_large", num_classes=10, image_size=8, seed=seed)
    take_pixels(model, student_input(data))
    model.head = torch.nn.Identity()
    features = torch.nn.functional.pad(model(images).detach().double(), (0, 1), value=1.0)
    labels = torch.nn.functional.one_hot(torch.from_numpy(np.array(source.labels_N)).long(), 10).double()
    ridge = 10.0 * torch.eye(features.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(features.T @ features + ridge, features.T @ labels)[:, list(order)].float()
    tensors |= {"model.head.weight": weights[:-1].T.contiguous(), "model.head.bias": weights[-1].contiguous()}
    checkpoint.write_tensors(path, tensors, about)
    return str(path)


class Recorded:
    """A `report` that remembers, and that may stop the job: after `die_after` calls it raises."""

    def __init__(self, die_after: int | None = None):
        self.calls: list[tuple[str, int, dict[str, float]]] = []
        self._die_after = die_after

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        self.calls.append((kind, step, metrics))
        if self._die_after is not None and len(self.calls) >= self._die_after:
            raise InterruptedError("as if killed")


def no_telemetry(whole: bool = False) -> dict[str, float]:
    """The telemetry of a node that has none."""
    return {}


def train(
    group: Group, settings: TrainConfig, die_after: int | None = None, evaluator: Callable[[], Evaluator] | None = None
) -> dict[str, Any]:
    """Run the job on this rank; returns parameters, progress and what was reported. `evaluator` makes that of rank 0.

    Of the passes that are timed after the training it takes the shortest alone: all take as long as a small training.
    """
    report = Recorded(die_after)
    died = False
    own = evaluator() if evaluator is not None and group.is_main else None
    with (
        contextlib.closing(build(settings, group, report, no_telemetry, evaluator=own)) as job,
        patch.object(pass_latency, "_MAX_PASS_S", 0.0),
    ):
        try:
            run_job(job)
        except InterruptedError:
            died = True
    state = {name: tensor.detach().clone() for name, tensor in job.student.state_dict().items()}
    return {"state": state, "progress": job.progress, "calls": report.calls, "died": died, **job.metrics.state()}


def train_on_record(settings: TrainConfig, publish: Publish = lambda paths, step, epoch: None) -> dict[str, float]:
    """Run the job alone, its numbers in a log in its folder as a worker sends them. Returns its summary."""
    recorder = LocalRecorder(Path(settings.output_dir))
    with contextlib.closing(recorder.actor), DiskWriter() as disk:
        reporter = Reporter(settings, recorder, Group(), disk)
        job = build(settings, Group(), reporter.report, no_telemetry, disk=disk, publish=publish)
        with contextlib.closing(job):
            summary = run_job(job)
        reporter.complete(settings, summary)
        return summary


def save(path: Path, state: CheckpointState, group: Group) -> None:
    """Write a checkpoint, and wait for it."""
    with DiskWriter() as disk:
        CheckpointWriter(disk, group.device).save([path], state, group)


def with_noise_scale(settings: TrainConfig) -> TrainConfig:
    """The job, whose gradient noise is measured."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"noise_scale": True})})


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference over all tensors, relative to each tensor's largest value."""
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp(min=1e-300)) for name in a)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
