"""Jobs whose steps are taken eagerly, or as a GPU replays them: for tests on a CPU, and for the checks on a GPU."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.engine.check_method_jobs import Case, job_config
from trainables.engine.graphed_step import Capture, CudaCapture, GraphedStep, TrainStep
from trainables.engine.job import Job, build
from trainables.engine.loop import begin_step
from trainables.methods import load_method

CPU = torch.device("cpu")


def fuse_optimizers(job: Job) -> None:
    """The optimizers as they are on a GPU."""
    for each in job.train_state.optimizers:
        for group in each.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def settings(method: str, folder: Path, **sections: Any) -> TrainConfig:
    """Of a method: six steps an epoch, the last of them shorter; a rate and a weight that change with every step."""
    options = {"warmup_epochs": 2, "decay": "cosine"} if load_method(method).terms else {}
    tree = job_config(Case(method, options, image_size=8), folder, precision="fp32").model_dump(mode="json")
    tree["data"] |= {"synthetic_images": 44}
    tree["optim"] |= {"epochs": 4, "schedule": "cosine", "warmup_epochs": 1, "clip_grad_norm": 5.0}
    for name, section in sections.items():
        tree[name] = tree[name] | section if section is not None else None
    return TrainConfig.model_validate(tree)


class Trained:
    """A job's first steps of the training, and what they left."""

    def __init__(
        self, config: TrainConfig, *, graphed: bool, device: torch.device = CPU, capture: Capture | None = None, steps: int = 20
    ) -> None:
        """At least so many steps. `capture`: by default the device's own, on a CPU a second call."""
        self.num_replays = self.num_captures = 0
        self._inner = capture or ((lambda run: run) if device.type == "cpu" else CudaCapture(device))
        with contextlib.closing(build(config, Group(device=device), Recorded(), no_telemetry)) as self.job:
            fuse_optimizers(self.job)
            self.step = GraphedStep(self.job.train_state, self._capture)
            self._take_steps(self.step if graphed else self.job.functions.train_step, steps)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        inner = self._inner(run)
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            inner()

        return replay

    def _take_steps(self, train_step: TrainStep, steps: int) -> None:
        job, timer = self.job, self.job.metrics.timer
        first = job.epochs.num_init * job.epochs.steps_per_epoch
        job.progress.step = first
        while job.progress.step < first + steps:
            epoch = job.epochs.at(job.progress.step // job.epochs.steps_per_epoch)
            job.train_state.begin_epoch(epoch)
            for batch in on_device(job.train_loader.epoch(epoch.index), job.group.device, epoch.augmentation):
                begin_step(job)
                round_rates(job)
                timer.start()
                timer.mark("data")
                train_step(batch, job.progress.step, timer)
                timer.stop()
                job.progress.step += 1

    def state(self) -> dict[str, Tensor]:
        job = self.job
        state = {name: tensor.detach().clone() for name, tensor in job.train_state.distillation_module.state_dict().items()}
        for index, each in enumerate(job.train_state.optimizers):
            for number, values in each.optimizer.state_dict()["state"].items():
                state |= {f"{index}/{number}/{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        return {name: tensor.cpu() for name, tensor in (state | {"sums": job.train_state.sums.values_N}).items()}


def round_rates(job: Job) -> None:
    """As tensors have them."""
    for each in job.train_state.optimizers:
        for group in each.optimizer.param_groups:
            group["lr"] = float(torch.tensor(group["lr"]))
