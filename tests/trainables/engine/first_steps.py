"""The first steps of small jobs, and what they leave: for tests on a CPU, and for the checks on a GPU."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.engine.check_method import Case, job_config
from trainables.engine.job import Job
from trainables.engine.train import build, set_learning_rates
from trainables.methods.registry import load_method

_COMPILE = nn.Module.compile


@contextlib.contextmanager
def compiled_without_kernels() -> Iterator[None]:
    """Models that are compiled meanwhile are traced forward and backward as ever, and run by torch's own kernels: to write others
    takes a CPU a minute a model."""
    torch.compiler.reset()
    with mock.patch.object(nn.Module, "compile", lambda model, **_: _COMPILE(model, backend="aot_eager")):
        yield
    torch.compiler.reset()


def fuse_optimizers(job: Job) -> None:
    """The optimizers as they are on a GPU."""
    for each in job.train_state.optimizers:
        for group in each.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def settings(method: str, folder: Path, precision: str = "fp32", **sections: Any) -> TrainConfig:
    """A job with this method: six steps per epoch, the last of them shorter; a rate and a weight that change with every step."""
    options = {"warmup_epochs": 2, "decay": "cosine"} if load_method(method).terms else {}
    case = Case(method, options, teacher="resnet8", image_size=8)
    tree = job_config(case, folder, precision=precision).model_dump(mode="json")
    tree["data"] |= {"synthetic_images": 44}
    tree["optim"] |= {"epochs": 4, "schedule": "cosine", "warmup_epochs": 1, "clip_grad_norm": 5.0}
    for name, section in sections.items():
        tree[name] = tree[name] | section if section is not None else None
    return TrainConfig.model_validate(tree)


def state_after(config: TrainConfig, group: Group, steps: int = 12) -> dict[str, Tensor]:
    """Parameters, momenta and sums after whole epochs of at least so many steps of the training."""
    with contextlib.closing(build(config, group, Recorded(), no_telemetry)) as job:
        _take_steps(job, steps)
        state = {name: tensor.detach().clone() for name, tensor in job.train_state.distillation_module.state_dict().items()}
        for index, each in enumerate(job.train_state.optimizers):
            for number, values in each.optimizer.state_dict()["state"].items():
                state |= {f"{index}/{number}/{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        state["sums"] = job.train_state.sums.values_N
        return {name: tensor.double().cpu() for name, tensor in state.items()}


def _take_steps(job: Job, steps: int) -> None:
    timer = job.metrics.timer
    while job.progress.step < steps:
        epoch = job.progress.step // job.epochs.steps_per_epoch
        job.train_state.distillation_module.begin_epoch(epoch)
        for batch in on_device(job.train_loader.epoch(epoch), job.group.device, epoch):
            set_learning_rates(job)
            timer.start()
            timer.mark("data")
            job.train_step(batch, job.progress.step, timer)
            timer.stop()
            job.progress.step += 1
