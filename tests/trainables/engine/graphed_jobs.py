"""Jobs whose steps are taken eagerly, or as a GPU replays them: for tests on a CPU, and for the checks on a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.device.device_batches import on_device
from trainables.distributed.group import Group
from trainables.engine import step_functions
from trainables.engine.check_method_jobs import Case, job_config
from trainables.engine.cuda_capture import Capture, CudaCapture
from trainables.engine.graphed_step import GraphedStep, TrainStep
from trainables.engine.job import Job, build
from trainables.engine.loop import begin_step
from trainables.methods.registry import load_method
from trainables.metrics.noise_scale import SUMS

CPU = torch.device("cpu")


def fuse_optimizers(job: Job) -> None:
    """The optimizers as they are on a GPU."""
    for each in job.train_state.optimizers:
        for group in each.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


Operation = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]
"""A function, its arguments and the tensors that it gave."""


class CpuCapture(TorchDispatchMode):
    """Captures a step on a CPU as `CudaCapture` does on a GPU: a replay runs its operations once more, on the same memory with
    the same Python numbers, and none of its Python.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Operation] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        self._operations, self._made, self._before = [], set(), {}
        with torch.random.fork_rng(devices=[]), self:
            run()
        for tensor, value in self._before.values():  # a captured step does not run
            tensor.copy_(value)
        operations = self._operations
        return lambda: _run_again(operations)

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_for_side_stream(self) -> None:
        """There is one stream."""

    def release_side_stream(self) -> None:
        """There is one stream."""

    @property
    def num_bytes(self) -> int:
        return 0

    def has_room(self, relative_batch: float) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(value)
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._save(kwargs[argument.name])
        if func.overloadpacket.__name__ in ("native_batch_norm", "cudnn_batch_norm"):
            self._save(args[3:5])  # its running statistics, which its schema does not call written
        result = func(*args, **kwargs)
        memory = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        self._made |= {tensor.untyped_storage()._cdata for tensor in _tensors(result)} - memory
        # The memory alone: a replay has no autograd.
        args, kwargs, outputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs, _tensors(result)))
        self._operations.append((func, args, kwargs, outputs))
        return result

    def _save(self, written: Any) -> None:
        """What an operation overwrites that was there before the step."""
        for tensor in _tensors(written):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                self._before[storage._cdata] = whole, whole.clone()


@torch.no_grad()
def _run_again(operations: list[Operation]) -> None:
    for func, args, kwargs, outputs in operations:
        for output, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
            if output.data_ptr() != new.data_ptr():
                output.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def settings(method: str, folder: Path, **sections: Any) -> TrainConfig:
    """Of a method: six steps an epoch, the last of them shorter; a rate and a weight that change with every step."""
    options = {"warmup_epochs": 2, "decay": "cosine"} if load_method(method).terms else {}
    tree = job_config(Case(method, options, teacher="resnet8", image_size=8), folder, precision="fp32").model_dump(mode="json")
    tree["data"] |= {"synthetic_images": 44}
    tree["optim"] |= {"epochs": 4, "schedule": "cosine", "warmup_epochs": 1, "clip_grad_norm": 5.0}
    for name, section in sections.items():
        tree[name] = tree[name] | section if section is not None else None
    return TrainConfig.model_validate(tree)


@contextlib.contextmanager
def graphs_of(capture: Capture) -> Iterator[None]:
    """A job that is built meanwhile has graphs by `capture`, although it is on a CPU."""
    with mock.patch.multiple(step_functions, obstacle=lambda *_: None, CudaCapture=lambda _: capture):
        yield


class WrappedCapture:
    """Passes on to another capture."""

    def __init__(self, inner: Capture) -> None:
        self._inner = inner

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        return self._inner(run, side=side)

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        return self._inner.side_stream()

    def wait_for_side_stream(self) -> None:
        self._inner.wait_for_side_stream()

    def release_side_stream(self) -> None:
        self._inner.release_side_stream()

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def has_room(self, relative_batch: float) -> bool:
        return self._inner.has_room(relative_batch)


class CountingCapture(WrappedCapture):
    """Counts the steps that are captured, and lists what the steps do: the replays of their parts, and what they do with the side
    stream."""

    def __init__(self, inner: Capture) -> None:
        super().__init__(inner)
        self.num_captures = 0
        self.calls: list[str] = []
        self._is_update = True

    def __call__(self, run: Callable[[], None], *, side: bool = False) -> Callable[[], None]:
        inner, name = super().__call__(run, side=side), "teacher"
        if not side:  # a step's gradients and its update come in turn
            self._is_update = not self._is_update
            self.num_captures += not self._is_update
            name = "update" if self._is_update else "gradients"

        def replay() -> None:
            self.calls.append(name)
            inner()

        return replay

    def side_stream(self) -> contextlib.AbstractContextManager[None]:
        self.calls.append("side")
        return super().side_stream()

    def wait_for_side_stream(self) -> None:
        self.calls.append("wait")
        super().wait_for_side_stream()

    def release_side_stream(self) -> None:
        self.calls.append("release")
        super().release_side_stream()


class Trained:
    """A job's first steps of the training, and what they left."""

    def __init__(
        self, config: TrainConfig, *, graphed: bool, group: Group | None = None, capture: Capture | None = None, steps: int = 20
    ) -> None:
        """At least so many steps. `capture`: by default the device's own, on a CPU its operations once more."""
        group = group or Group()
        self.counts = CountingCapture(capture or (CpuCapture() if group.device.type == "cpu" else CudaCapture(group.device)))
        with graphs_of(self.counts) if graphed else contextlib.nullcontext():
            config = config.model_copy(update={"train": config.train.model_copy(update={"cuda_graphs": graphed})})
            self.job = build(config, group, Recorded(), no_telemetry)
        with contextlib.closing(self.job):
            fuse_optimizers(self.job)
            self._take_steps(self.job.functions.train_step, steps)
            noise = self.job.train_state.training_update.noise
            self.noise = noise.take() if noise is not None else torch.zeros(len(SUMS))

    @property
    def num_captures(self) -> int:
        return self.counts.num_captures

    @property
    def num_replays(self) -> int:
        return self.counts.calls.count("gradients")

    @property
    def step(self) -> GraphedStep:
        train_step = self.job.functions.train_step
        assert isinstance(train_step, GraphedStep)
        return train_step

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
        state |= {"sums": job.train_state.sums.values_N, "noise": self.noise}
        return {name: tensor.cpu() for name, tensor in state.items()}


def round_rates(job: Job) -> None:
    """As tensors have them."""
    for each in job.train_state.optimizers:
        for group in each.optimizer.param_groups:
            group["lr"] = float(torch.tensor(group["lr"]))


def state_on_rank(group: Group, config: TrainConfig, graphed: bool, steps: int, capture: Capture | None = None) -> dict[str, Any]:
    """What a rank's first steps left, its estimates of the gradient noise, and how many steps were replayed."""
    trained = Trained(config, graphed=graphed, group=group, capture=capture, steps=steps)
    state = trained.state()
    noise = state.pop("noise").tolist()
    off = trained.step.off if graphed else None
    return {"state": state, "noise": noise, "replays": trained.num_replays, "off": off}
