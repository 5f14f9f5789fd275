"""The train step as CUDA graphs: recorded once for each shape of batch, then launched as a whole (`train.cuda_graphs`).

A small model's step is bound by its launches: some hundreds of operations of microseconds each. A graph launches them at once.
What it replays is the same memory with the same numbers, so all that changes between steps is in tensors: the batch, the learning
rates and the weights of losses and samples. The batch is prepared outside of the graphs, and what steps add up leaves them as one
tensor. One graph ends with the gradients, the next one changes the parameters. Whatever ranks exchange lies around and between
the two: so each rank may replay a step that another one takes eagerly, and NCCL never sees a capture.

A frozen teacher is a graph of its own, in a side stream. The host is a step ahead of the GPU: so the teacher of a step overlaps
with what the GPU still has to do of the step before. The operations of small models leave most of a GPU idle.

Before a step is captured it runs as it will be captured, on three batches of this shape, and the last two of these steps are
compared operation by operation (`StepRecording`): a step that would not be the same again stays as it is, and the log says why.
The first step of each epoch is compared too, since a number may change with it; where one has, the step is captured anew.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainables.device.device_batches import DeviceBatch
from trainables.distributed.group import GlobalCount
from trainables.engine.cuda_capture import Capture
from trainables.engine.graph_obstacle import log_eager
from trainables.engine.graphed_shape import BatchShape, DeviceNumber, Replays, ShapeState, TeacherGraph
from trainables.engine.static_outputs import StaticOutputs
from trainables.engine.step import (
    TeacherOutputs,
    TrainState,
    add_gradients,
    global_count,
    prepare_batch,
    run_teacher,
    train_prepared,
    train_step,
)
from trainables.engine.step_recording import StepRecording
from trainables.errors import first_line
from trainables.methods.contract import ModelOutputs
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.phases import GRAPH
from trainables.teachers.network import TeacherNetwork

TrainStep = Callable[[DeviceBatch, int, PhaseTimer], None]
"""Trains on a batch in the step of this index, see `trainables.engine.step.train_step`."""
Recorder = Callable[[], contextlib.AbstractContextManager[object]]

WARM_UP_STEPS = 1
"""Before the first step that is recorded: in which kernels are loaded and the optimizer makes its state."""
MAX_SHAPES = 4
"""Batches of further shapes are trained on without a graph: each has memory of its own."""


@dataclass
class GraphedStep:
    """A train step that replays CUDA graphs where there are some for the shape of its batch."""

    train_state: TrainState
    capture: Capture
    stage: str = "student"
    off: str | None = None
    """Why steps are not captured any more."""
    overlap_teacher: bool = True
    """Whether a teacher that depends on nothing but the images runs in the side stream."""
    _shapes: dict[BatchShape, ShapeState] = field(default_factory=dict)
    _loss_weights: dict[str, DeviceNumber] = field(default_factory=dict)
    _lrs: dict[tuple[int, int], DeviceNumber] = field(default_factory=dict)

    def __call__(self, batch: DeviceBatch, step: int, timer: PhaseTimer) -> None:
        """See `train_step`, which this is in all but time. The phase `graph` is the student's graph, up to the gradients. Where
        the teacher is in the side stream, h2d, augment and teacher are what the student waits for them."""
        train_state = self.train_state
        if self.off is not None or not self._is_capturable(batch):
            train_step(train_state, batch, step, timer)
            return
        prepared = self._prepared(batch, timer)
        shape = self._loaded(prepared)
        if shape is None:
            self.make_room(len(batch.labels_B))
            train_prepared(train_state, prepared, step, timer)
            self.capture.release_side_stream()
            return
        self._set_numbers(step)
        if shape.replays is not None and shape.epoch == int(train_state.epochs.training_epochs(step)):
            self._replay(shape, shape.replays, prepared, timer)
        else:
            self.make_room(len(batch.labels_B))
            self._warm_up(shape, prepared, step, timer)
        train_state.sums.add_batch(step, len(batch.labels_B), shape.sums_N)

    @property
    def _overlaps(self) -> bool:
        """Whether this epoch's teacher runs in the side stream."""
        teacher = self.train_state.active_teacher
        return self.overlap_teacher and isinstance(teacher, TeacherNetwork) and teacher.depends_on_images_alone

    def _prepared(self, batch: DeviceBatch, timer: PhaseTimer) -> DeviceBatch:
        """See `prepare_batch`; for a teacher in the side stream this is there too."""
        if not self._overlaps:
            return prepare_batch(self.train_state, batch, timer)
        with self.capture.side_stream():
            batch.wait()
        self.capture.wait_for_side_stream()
        timer.mark("h2d")
        with self.capture.side_stream():
            prepared = self.train_state.prepare(batch)
        self.capture.wait_for_side_stream()
        timer.mark("augment")
        return prepared

    def _update_teacher_outputs(self, shape: ShapeState, run: Callable[[], TeacherOutputs], timer: PhaseTimer) -> None:
        """Run the teacher in the side stream, and copy its outputs to where the student's part reads them."""
        with self.capture.side_stream():
            outputs = run()
        self.capture.wait_for_side_stream()
        if shape.teacher_outputs is None or not shape.teacher_outputs.copy_from(outputs):
            shape.teacher_outputs, shape.replays = StaticOutputs(outputs), None  # a graph reads those of before
        self.capture.release_side_stream()
        timer.mark("teacher")

    def _replay(self, shape: ShapeState, replays: Replays, batch: DeviceBatch, timer: PhaseTimer) -> None:
        count = global_count(self.train_state, batch)
        if replays.teacher is not None:
            self._update_teacher_outputs(shape, partial(replays.teacher, batch.images_BCHW), timer)
        self._set_sample_weight(shape, count, timer)
        timer.begin_micro_batch()
        replays.gradients()
        timer.mark(GRAPH)
        self.train_state.update.average_gradients(count)
        timer.mark("backward")
        replays.update()
        timer.mark("optimizer")

    def _set_sample_weight(self, shape: ShapeState, count: GlobalCount, timer: PhaseTimer) -> None:
        """Write what weighs this rank's samples to the memory that the step reads."""
        if self.train_state.group.world_size > 1:
            shape.sample_weight.fill_(count.weight())
            timer.mark("backward")  # as in an eager step: it waits for ranks that have not begun theirs

    def _is_capturable(self, batch: DeviceBatch) -> bool:
        """Whether it is a step of the training, not of an init stage, on some images."""
        return len(batch.labels_B) > 0 and self.train_state.update is self.train_state.training_update

    def _loaded(self, batch: DeviceBatch) -> ShapeState | None:
        """The state of the batch's shape, its memory filled with the batch; None where there are too many shapes."""
        key = BatchShape.of(batch)
        if key not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                return None
            self._shapes[key] = ShapeState.of(batch, len(self.train_state.sums.names) - 1)
        shape = self._shapes[key]
        shape.load(batch)
        return shape

    def _set_numbers(self, step: int) -> None:
        """The learning rates and weights of a step, as its graph reads them."""
        weights = self.train_state.distillation_module.weights(self.train_state.epochs.training_epochs(step))
        if not self._loss_weights:
            device = self.train_state.group.device
            self._loss_weights = {name: DeviceNumber(device) for name in weights}
            self._lrs = {key: DeviceNumber(device) for key, _ in self._groups()}
        for name, weight in weights.items():
            self._loss_weights[name].set(weight)
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

    def _run_gradients(self, shape: ShapeState, step: int, count: GlobalCount, timer: PhaseTimer) -> None:
        """The step's first half, on the shape's memory."""
        loss_weights = {name: number.tensor for name, number in self._loss_weights.items()}

        def sample_weight() -> Tensor | float:
            return shape.sample_weight if self.train_state.group.world_size > 1 else count.weight()

        def take_sums(logits_BK: Tensor, labels_B: Tensor, losses: Mapping[str, Tensor]) -> None:
            self.train_state.sums.of_batch(logits_BK, labels_B, losses, out=shape.sums_N)

        epoch = self.train_state.epochs.training_epochs(step)
        outputs = shape.teacher_outputs.outputs if shape.teacher_outputs is not None else None
        add_gradients(
            self.train_state,
            shape.batch,
            epoch,
            timer,
            sample_weight,
            take_sums,
            loss_weights=loss_weights,
            teacher_outputs=outputs,
        )

    def _run_update(self) -> None:
        """The second half."""
        with self._rates_in_tensors():
            self.train_state.update.step()

    def _run(self, shape: ShapeState, batch: DeviceBatch, step: int, timer: PhaseTimer, recorder: Recorder) -> GlobalCount:
        """The whole step, each part in a context of `recorder`. Returns the count of its samples."""
        count = global_count(self.train_state, batch)
        if self._overlaps:

            def run_recorded() -> TeacherOutputs:
                with recorder():
                    return run_teacher(self.train_state, batch)

            self._update_teacher_outputs(shape, run_recorded, timer)
        else:
            shape.teacher_outputs = None
        self._set_sample_weight(shape, count, timer)
        with recorder():
            self._run_gradients(shape, step, count, timer)
        self.train_state.update.average_gradients(count)
        timer.mark("backward")
        with recorder():
            self._run_update()
        timer.mark("optimizer")
        self.capture.release_side_stream()  # nothing overlaps with a step that may be captured anew
        return count

    def _warm_up(self, shape: ShapeState, batch: DeviceBatch, step: int, timer: PhaseTimer) -> None:
        """The step without graphs; where it is known by then that it is the same again, it is captured for the next one."""
        epoch = int(self.train_state.epochs.training_epochs(step))
        new_epoch = shape.epoch != epoch
        shape.num_steps = 1 if new_epoch else shape.num_steps + 1
        shape.epoch = epoch
        if shape.replays is None and shape.num_steps <= WARM_UP_STEPS:
            shape.recordings = []
            self._run(shape, batch, step, timer, contextlib.nullcontext)
            return
        before, shape.recordings = shape.recordings, []

        def recorder() -> StepRecording:
            shape.recordings.append(StepRecording(self.train_state.training_update.module))
            return shape.recordings[-1]

        count = self._run(shape, batch, step, timer, recorder)
        problem = next((each.problem for each in shape.recordings if each.problem is not None), None)
        if before and len(before) != len(shape.recordings):
            changed: str | None = "the stream of the teacher changes from step to step"
        else:
            changed = next(filter(None, map(StepRecording.difference, before, shape.recordings)), None)
        if problem is not None:
            self._turn_off(problem)
        elif changed is not None and not new_epoch:
            self._turn_off(changed)
        elif changed is not None:
            shape.replays = None  # a number of the last epoch is in them
        elif before and shape.replays is None:
            self._capture(shape, batch, step, count)

    def _capture(self, shape: ShapeState, batch: DeviceBatch, step: int, count: GlobalCount) -> None:
        timer = PhaseTimer(torch.device("cpu"))  # nobody reads it: events inside a graph have no time
        timer.start()
        try:
            teacher = self._capture_teacher(batch) if self._overlaps else None
            gradients = self.capture(partial(self._run_gradients, shape, step, count, timer))
            shape.replays = Replays(teacher, gradients, self.capture(self._run_update))
        except RuntimeError as error:  # perhaps of this rank alone, which makes all others wait in each step
            self.train_state.update.discard()
            reason, group = first_line(error), self.train_state.group
            self._turn_off(f"rank {group.rank}: {reason}" if group.world_size > 1 else reason, logging.WARNING)

    def _capture_teacher(self, batch: DeviceBatch) -> TeacherGraph:
        images_BCHW, captured = torch.empty_like(batch.images_BCHW), dict[str, ModelOutputs]()

        def run() -> None:
            captured.update(run_teacher(self.train_state, batch._replace(images_BCHW=images_BCHW)))

        replay = self.capture(run, side=True)
        return TeacherGraph(images_BCHW, captured, replay)

    def make_room(self, num_images: int) -> None:
        """Free the graphs, to be captured anew, where a step of so many images without one does not fit beside them."""
        sizes = [len(shape.batch.labels_B) for shape in self._shapes.values() if shape.replays is not None]
        if sizes and not self.capture.has_room(num_images / max(sizes)):
            self.free_graphs()

    def free_graphs(self) -> None:
        """A step that is like earlier ones is captured anew."""
        for shape in self._shapes.values():
            shape.replays, shape.recordings = None, []

    def _turn_off(self, reason: str, level: int = logging.INFO) -> None:
        """Free the graphs; from the next step on there are none."""
        self.off, self._shapes = reason, {}
        log_eager(self.stage, reason, level)
