"""The interface of a distillation method: what it declares, what it is built from, and what it computes in a step.

A method is an `nn.Module`, a subclass of `Method`. Its `forward` turns the outputs of student and teacher into named loss terms.
Its parameters are trained with the student under the same DDP, saved in the checkpoint, and not part of the exported student. Its
buffers are what it remembers between steps: saved in the checkpoint, and equal on all ranks.

A term is either (B,), one loss per sample of this rank, or a scalar, the loss of the whole global batch, computed from
`MethodBatch.all_gather` and equal on every rank. So N workers compute what one would. docs/own-method.md has an example.

Shapes: B samples of this rank (maybe none), N samples of the global batch in the order of ranks, C channels, H W pixels,
K classes, M training samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor, nn

from trainables.config import MethodOptions
from trainables.data.order import REPEAT
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.errors import ExperimentError
from trainables.models.model_input import ModelInput
from trainables.rules import Requirements as Requirements  # what a method declares, next to the rules that read it


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of one model for a batch, in float32 or wider."""

    logits: Tensor | None
    """(B, K); None for a method that declares `Requirements.logits` False."""
    features: tuple[Tensor, ...] = ()
    """The activations at the method's taps, in the order of the taps, each (B, …). The student's have gradients, the teacher's
    none."""

    @property
    def logits_BK(self) -> Tensor:
        """The logits. Raises ExperimentError: the method declares that it reads none."""
        if self.logits is None:
            raise ExperimentError("distill.method: it reads logits and declares Requirements(logits=False): leave that out")
        return self.logits

    def logits_at(self, temperature: float) -> Tensor:
        """The logits (B, K) to divide by `temperature`: `logits_BK`, but for an ensemble, whose softmax there is the mean of its
        models'."""
        return self.logits_BK

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """These outputs with each tensor replaced by what `function` makes of it."""
        logits = None if self.logits is None else function(self.logits)
        return replace(self, logits=logits, features=tuple(map(function, self.features)))


@dataclass(frozen=True)
class MethodBatch:
    """The batch that both models ran on."""

    images_BCHW: Tensor
    """Augmented pixels in [0, 1]: a network of the method's own gets
    them through `trainables.models.pixels.take_pixels`."""
    labels_B: Tensor
    """int64; -1 for an image without a label, which a method with `Requirements.hard_labels` never meets."""
    views_B: Tensor
    """int64: the index of each image, and which repeat of it this is, see `trainables.data.order.REPEAT`."""
    epoch: float
    """Epochs since the stage began, with the fraction of the current one."""
    gather: Gather
    """What `all_gather` calls."""

    @property
    def indices_B(self) -> Tensor:
        """Dataset-wide, int64: the same image has the same index in every epoch and on any number of workers."""
        return self.views_B % REPEAT  # on demand: a launch that few methods need

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, (N, …), for this rank's (B, …). Gradients flow into this rank's rows."""
        return self.gather(rows)

    def all_gather_many(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`all_gather` of several tensors in one collective call: ranks wait for each other once."""
        return self.gather.all_gather_many(*tensors)


@dataclass(frozen=True)
class ModelSpec:
    """One model, as a method is built for it."""

    model: nn.Module
    """The bare model. To keep a part of it, put that part into a tuple, so that it does not become a submodule of the method."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the features at the method's taps, without the batch dimension."""
    name: str = ""
    """The model's name for `trainables.models.registry.build_model`."""


@dataclass(frozen=True)
class BuildContext:
    """What a method is built from."""

    student: ModelSpec
    teacher: ModelSpec | None
    """None: there is no teacher, or the method reads no taps of one that is cached or served."""
    num_classes: int
    labels_M: Tensor
    """The label of each training sample, by its index: int64 on the CPU."""
    input: ModelInput
    """What the student takes; models get pixels, see `trainables.models.model_input`."""
    global_batch_size: int
    """Samples of a step over all ranks; the last step of an epoch may have fewer."""
    seed: int
    epochs: int
    """The length of the stage."""
    group: Group
    init_stage: bool = False
    """Whether it is built for its init stage, which trains `init_terms`."""

    @property
    def image_size(self) -> int:
        """Height and width of the pixels that a step has."""
        return self.input.image_size


class Method(nn.Module):
    """A distillation method. A subclass defines `terms` and `forward`, and overrides the other members where it needs to.

    `forward` runs on every rank in every step, also on a rank without samples, in float32 (float64 in a float64 job) outside
    autocast. It must not wait for the device: no `.item()`, no shape that depends on values. Buffers change in training mode
    only. Batch norms of the method's own are those of `trainables.distributed.batch_norm`.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    """The options of `distill.options`, with their defaults."""
    terms: ClassVar[tuple[str, ...]]
    """The names of the terms that `forward` returns."""
    taps: ClassVar[tuple[str, ...]] = ()
    """Where student and teacher are read, unless the options `student_taps` or `teacher_taps` say otherwise; see
    `trainables.models.taps`."""
    init_terms: ClassVar[tuple[str, ...]] = ()
    """The names of the terms that `init_loss` returns; empty: the method has no init stage. Else its `Options` are
    `InitStageOptions`."""
    requires: ClassVar[Requirements] = Requirements()
    task_weight: ClassVar[float] = 1.0
    """The weight of the labels' cross-entropy, where the user sets none."""
    idle_with_two_classes: ClassVar[str] = ""
    """Which of its terms teaches nothing of two classes, for the note that says so."""

    projects_embedding = False
    """Whether `project_embedding` is there: an evaluation then has its `cosine`."""

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        """Build the method's modules, on the CPU in float32. torch's generator is seeded for the method.

        Raises ExperimentError: the models do not fit the method.
        """
        super().__init__()
        self.options = options
        """The user's options. A subclass whose `Options` are its own declares their type: `options: MyOptions`."""

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """The terms by name, each (B,) or a scalar, without the method's `weight`.

        A method that requires no teacher gets the student's outputs, detached, as `teacher`.
        """
        raise NotImplementedError

    def task_logits(self, student: ModelOutputs) -> Tensor | None:
        """The logits (B, K) that learn the labels in training, of a student with several heads; None: its output."""
        return None

    def project_embedding(self, student: ModelOutputs, teacher: ModelOutputs) -> tuple[Tensor, Tensor]:
        """The embeddings (B, D) that it compares: the student's, as its head projects them, and the teacher's."""
        raise NotImplementedError

    def calibrate(self, teacher: ModelOutputs) -> None:
        """Take statistics of the teacher's outputs for images of this rank (maybe none), before the first step and without
        gradients: for a method whose `Options.calibration_images` are above 0. A timing run has no such images."""
        raise NotImplementedError

    def end_calibration(self) -> None:
        """Turn the statistics of all ranks into buffers; rank 0's are then copied to the others."""
        raise NotImplementedError

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """The terms of the init stage, under the names of `init_terms`; otherwise as `forward`.

        They have weight 1, or the option `weight` where the method has no `terms`. That stage is a job of its own, for which the
        method is built too; the stage after it begins with the student, and with the parameters and buffers of methods with
        `terms`.
        """
        raise NotImplementedError

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        """The parameters that the init stage trains: by default the method's own. `student` is the bare student, of which what
        is not trained runs in eval mode."""
        return list(self.parameters())


def mean_per_sample(values: Tensor) -> Tensor:
    """The mean of each sample's values: (B, …) to (B,), also for B = 0."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values
