"""The train step as a CUDA graph: recorded once for each shape of batch, then launched as a whole (`train.cuda_graphs`).

A small model's step is bound by its launches: some hundreds of operations of microseconds each. A graph launches them at once.
What it replays is the same memory with the same numbers, so all that changes between steps is in tensors: the batch, the learning
rates and the losses' weights. The batch is prepared outside of the graph, and what steps add up leaves it as one tensor.

Before a step is captured it runs as it will be captured, on three batches of this shape, and the last two of these steps are
compared operation by operation (`StepRecording`): a step that would not be the same again stays as it is, and the log says why.
The first step of each epoch is compared too, since a number may change with it; where one has, the step is captured anew.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.device.device_batches import DeviceBatch
from trainables.device.mixing import Mix
from trainables.engine.step import TrainState, prepare_batch, train_prepared, train_step
from trainables.engine.step_recording import StepRecording
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.phases import GRAPH
from trainables.teachers.network import TeacherNetwork

log = logging.getLogger("raydistill")

TrainStep = Callable[[DeviceBatch, int, PhaseTimer], None]
"""Trains on a batch in the step of this index, see `trainables.engine.step.train_step`."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures what a function launches, without running it; returns what launches it again."""

WARM_UP_STEPS = 1
"""Before the first step that is recorded: in which kernels are loaded and the optimizer makes its state."""
MAX_SHAPES = 4
"""Batches of further shapes are trained on without a graph: each has memory of its own."""


def obstacle(config: TrainConfig, train_state: TrainState) -> str | None:
    """Why no step of a job can be captured, as its configuration has it; None: nothing speaks against it."""
    group, unfused = train_state.group, _unfused_optimizer(train_state)
    reasons = {
        "there are none on a CPU": group.device.type != "cuda",
        f"scale.num_workers: {group.world_size} workers take part in one all-reduce, which is not captured yet: write 1": (
            group.world_size > 1
        ),
        "optim.accumulate: a step has several micro-batches": config.optim.accumulate > 1,
        "precision fp16: its loss scaler decides on the host whether to skip a step": config.precision == "fp16",
        "precision fp64: a captured learning rate has float32": config.precision == "fp64",
        "train.compile: compiled models are not captured": config.train.compile,
        f"the optimizer {unfused} is not fused: its step reads numbers of the host": unfused is not None,
        "the teacher's logits come from the host": not isinstance(train_state.teacher, TeacherNetwork | None),
        "teacher.placement: the teacher is sharded": train_state.teacher is not None and train_state.teacher.is_collective,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _unfused_optimizer(train_state: TrainState) -> str | None:
    """The optimizer that steps in Python, one operation after the other; None: there is none."""
    optimizers = (each.optimizer for each in train_state.optimizers)
    return next((type(one).__name__ for one in optimizers if not all(group.get("fused") for group in one.param_groups)), None)


class CudaCapture:
    """Captures in this thread's stream; the graphs share their memory, since no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        """Until its end this thread's work is in a stream of its own: the default one cannot be captured, and autograd's nodes
        of parameters stay in the stream in which they are made. Call it before there are any.
        """
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Threads that load or decode may do meanwhile what a captured stream may not.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


class _Number:
    """A Python number in a tensor of the device, which is written where the number has changed."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), device=device)
        self._value = 0.0

    def set(self, value: float) -> None:
        if value != self._value:
            self.tensor.fill_(value)
            self._value = value


class _Shape(NamedTuple):
    """Of the tensors of a batch: steps of one shape are the same step."""

    images: tuple[int, ...]
    dtype: torch.dtype
    mixes: bool


@dataclass
class _ShapeState:
    """What is known of the steps of one shape."""

    batch: DeviceBatch
    """The memory that they read."""
    sums_N: Tensor
    """What the last one added, see `StepSums.of_batch`."""
    epoch: int = -1
    """Of the last one that was not replayed."""
    num_steps: int = 0
    """Of that epoch, until one is captured: what comes once an epoch, as its last batch, is none."""
    recording: StepRecording | None = None
    replay: Callable[[], None] | None = None


@dataclass
class GraphedStep:
    """A train step that replays a CUDA graph where there is one for the shape of its batch."""

    train_state: TrainState
    capture: Capture
    stage: str = "student"
    off: str | None = None
    """Why steps are not captured any more."""
    _shapes: dict[_Shape, _ShapeState] = field(default_factory=dict)
    _weights: dict[str, _Number] = field(default_factory=dict)
    _lrs: dict[tuple[int, int], _Number] = field(default_factory=dict)

    def __call__(self, batch: DeviceBatch, step: int, timer: PhaseTimer) -> None:
        """See `train_step`, which this is in all but time: in the phase `graph` lies what a replay does at once."""
        train_state = self.train_state
        if self.off is not None or not self._is_capturable(batch):
            train_step(train_state, batch, step, timer)
            return
        prepared = prepare_batch(train_state, batch, timer)
        shape = self._loaded(prepared)
        if shape is None:
            epoch = train_state.epochs.training_epochs(step)
            train_prepared(train_state, prepared, epoch, timer, partial(train_state.sums.add, step))
            return
        self._set_numbers(step)
        epoch = int(train_state.epochs.training_epochs(step))
        if shape.replay is not None and shape.epoch == epoch:
            shape.replay()
            timer.mark(GRAPH)
        else:
            self._warm_up(shape, step, timer)
        train_state.sums.add_batch(step, len(batch.labels_B), shape.sums_N)

    def _is_capturable(self, batch: DeviceBatch) -> bool:
        """Whether it is a step of the training, not of an init stage, on some images."""
        return len(batch.labels_B) > 0 and self.train_state.update is self.train_state.training_update

    def _loaded(self, batch: DeviceBatch) -> _ShapeState | None:
        """The state of the batch's shape, its memory filled with the batch; None where there are too many shapes."""
        key = _Shape(tuple(batch.images_BCHW.shape), batch.images_BCHW.dtype, batch.mix is not None)
        if key not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                return None
            sums_N = torch.zeros(len(self.train_state.sums.names) - 1, dtype=torch.float64, device=batch.labels_B.device)
            self._shapes[key] = _ShapeState(_empty_like(batch), sums_N)
        shape = self._shapes[key]
        for static, new in zip(_tensors(shape.batch), _tensors(batch), strict=True):
            static.copy_(new)
        return shape

    def _set_numbers(self, step: int) -> None:
        """The learning rates and weights of a step, as its graph reads them."""
        weights = self.train_state.distillation_module.weights(self.train_state.epochs.training_epochs(step))
        if not self._weights:
            device = self.train_state.group.device
            self._weights = {name: _Number(device) for name in weights}
            self._lrs = {key: _Number(device) for key, _ in self._groups()}
        for name, weight in weights.items():
            self._weights[name].set(weight)
        for key, group in self._groups():
            self._lrs[key].set(group["lr"])

    def _groups(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        for index, each in enumerate(self.train_state.optimizers):
            for number, group in enumerate(each.optimizer.param_groups):
                yield (index, number), group

    @contextlib.contextmanager
    def _rates_in_tensors(self) -> Iterator[None]:
        """The optimizers read their rates from tensors, and say that they can be captured. Afterwards they are as a checkpoint
        saves them."""
        before = [(group, dict(group)) for _, group in self._groups()]
        for key, group in self._groups():
            group["lr"] = self._lrs[key].tensor
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in before:
                group.update(values)

    def _run(self, shape: _ShapeState, step: int, timer: PhaseTimer) -> None:
        """The step on the shape's memory."""
        weights = {name: number.tensor for name, number in self._weights.items()}

        def take_sums(logits_BK: Tensor, labels_B: Tensor, losses: Mapping[str, Tensor]) -> None:
            self.train_state.sums.of_batch(logits_BK, labels_B, losses, out=shape.sums_N)

        epoch = self.train_state.epochs.training_epochs(step)
        with self._rates_in_tensors():
            train_prepared(self.train_state, shape.batch, epoch, timer, take_sums, weights)

    def _warm_up(self, shape: _ShapeState, step: int, timer: PhaseTimer) -> None:
        """The step without a graph; where it is known by then that it is the same again, it is captured for the next one."""
        epoch = int(self.train_state.epochs.training_epochs(step))
        new_epoch = shape.epoch != epoch
        shape.num_steps = 1 if new_epoch else shape.num_steps + 1
        shape.epoch = epoch
        if shape.replay is None and shape.num_steps <= WARM_UP_STEPS:
            shape.recording = None
            self._run(shape, step, timer)
            return
        with StepRecording(self.train_state.training_update.module) as recording:
            self._run(shape, step, timer)
        before, shape.recording = shape.recording, recording
        changed = before.difference(recording) if before is not None else None
        if recording.problem is not None:
            self._turn_off(recording.problem)
        elif changed is not None and not new_epoch:
            self._turn_off(changed)
        elif changed is not None:
            shape.replay = None  # a number of the last epoch is in it
        elif before is not None and shape.replay is None:
            self._capture(shape, step)

    def _capture(self, shape: _ShapeState, step: int) -> None:
        timer = PhaseTimer(torch.device("cpu"))  # nobody reads it: events inside a graph have no time
        timer.start()
        try:
            shape.replay = self.capture(partial(self._run, shape, step, timer))
        except RuntimeError as error:
            self.train_state.update.discard()
            self._turn_off(str(error).strip().partition("\n")[0])

    def _turn_off(self, reason: str) -> None:
        """Free the graphs; from the next step on there are none."""
        self.off, self._shapes = reason, {}
        log_eager(self.stage, reason)


def log_eager(stage: str, reason: str) -> None:
    """Say why `train.cuda_graphs` has no effect."""
    log.info("%s: train.cuda_graphs: steps are launched one operation at a time: %s", stage, reason)


def with_graphs(config: TrainConfig, train_state: TrainState) -> TrainStep:
    """The train step of a job with `train.cuda_graphs`, before its first forward pass."""
    reason = obstacle(config, train_state)
    if reason is None:
        return GraphedStep(train_state, CudaCapture(train_state.group.device), config.stage)
    if train_state.group.is_main:
        log_eager(config.stage, reason)
    return partial(train_step, train_state)


def _tensors(batch: DeviceBatch) -> tuple[Tensor, ...]:
    return batch.images_BCHW, batch.labels_B, batch.indices_B, *(batch.mix or ())


def _empty_like(batch: DeviceBatch) -> DeviceBatch:
    """Memory for batches of this shape."""
    images_BCHW, labels_B, indices_B, *mix = (torch.empty_like(tensor) for tensor in _tensors(batch))
    return batch._replace(
        images_BCHW=images_BCHW, labels_B=labels_B, indices_B=indices_B, copied=None, mix=Mix(*mix) if mix else None
    )
