"""The interface of a distillation method: what it declares, how it is built, and what it computes in a step.

A method is an `nn.Module`, a subclass of `Method`. Its `forward` turns student and teacher outputs into named loss terms. Its
parameters are trained with the student under the same DDP and saved in the checkpoint, but not exported. Its buffers hold state
between steps; they are saved in the checkpoint and equal on all ranks.

A term is either (B,), one loss per sample of this rank, or a scalar: the loss of the whole global batch, computed from
`MethodBatch.all_gather` and equal on every rank. So N workers compute what one would. docs/own-method.md has an example.

Shapes: B samples of this rank (maybe 0), N samples of the global batch in rank order, C channels, H W pixels, K classes,
M training samples.
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
    """One model's outputs for a batch, in float32 or wider."""

    logits: Tensor | None
    """(B, K); None for a method that declares `Requirements(logits=False)`."""
    features: tuple[Tensor, ...] = ()
    """The activations at the method's taps, in tap order, each (B, …). Only the student's have gradients."""

    @property
    def logits_BK(self) -> Tensor:
        """The logits. Raises ExperimentError: the method declares `Requirements(logits=False)`."""
        if self.logits is None:
            raise ExperimentError(
                "distill.method: it reads logits but declares Requirements(logits=False): remove that declaration"
            )
        return self.logits

    def logits_at(self, temperature: float) -> Tensor:
        """Return the logits (B, K) to divide by `temperature`. They are `logits_BK`, except for an ensemble: the softmax of its
        quotient is the mean of its models' softmaxes."""
        return self.logits_BK

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to each tensor."""
        logits = None if self.logits is None else function(self.logits)
        return replace(self, logits=logits, features=tuple(map(function, self.features)))


@dataclass(frozen=True)
class MethodBatch:
    """The batch that both models ran on."""

    images_BCHW: Tensor
    """Augmented pixels in [0, 1]. Feed them to a network of the method's own with `trainables.models.pixels.take_pixels`."""
    labels_B: Tensor
    """int64; -1 for an unlabeled image, which a method with `Requirements.hard_labels` never gets."""
    views_B: Tensor
    """int64: each image's index combined with its repeat number, see `trainables.data.order.REPEAT`."""
    epoch: float
    """Epochs since the stage began, including the fraction of the current one."""
    gather: Gather
    """Implements `all_gather`."""

    @property
    def indices_B(self) -> Tensor:
        """Dataset-wide int64 indices: an image has the same index in every epoch and on any number of workers."""
        return self.views_B % REPEAT  # computed on demand: few methods need this kernel launch

    def all_gather(self, rows: Tensor) -> Tensor:
        """Gather this rank's rows (B, …) to those of all ranks, (N, …). Gradients flow into this rank's rows."""
        return self.gather(rows)

    def all_gather_many(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather several tensors as `all_gather` does, in one collective call."""
        return self.gather.all_gather_many(*tensors)


@dataclass(frozen=True)
class ModelSpec:
    """The model that a method is built for."""

    model: nn.Module
    """The bare model. To keep a part of it, store that in a tuple, so that it does not become a submodule of the method."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the features at the method's taps, without the batch dimension."""
    name: str = ""
    """The model's name for `trainables.models.registry.build_model`."""


@dataclass(frozen=True)
class BuildContext:
    """The arguments that a method is built from."""

    student: ModelSpec
    teacher: ModelSpec | None
    """None if there is no teacher, or if it is cached or served and the method reads no taps of it."""
    num_classes: int
    labels_M: Tensor
    """The label of each training sample by index: int64, on the CPU."""
    input: ModelInput
    """The student's input format; models get pixels, see `trainables.models.model_input`."""
    global_batch_size: int
    """Samples per step over all ranks; the last step of an epoch may have fewer."""
    seed: int
    epochs: int
    """The stage's number of epochs."""
    group: Group
    init_stage: bool = False
    """Whether the method is built for its init stage, which trains `init_terms`."""

    @property
    def image_size(self) -> int:
        """Height and width of a step's images in pixels."""
        return self.input.image_size


class Method(nn.Module):
    """A distillation method. A subclass defines `terms` and `forward`, and overrides other members as needed.

    `forward` runs on every rank in every step, even on a rank without samples, in float32 (float64 in a float64 job) outside
    autocast. It must not synchronize with the device: no `.item()`, no data-dependent shapes. Buffers may change in training
    mode only. Batch norms of its own must come from `trainables.distributed.batch_norm`.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    """The type of the method's `distill.options`, with defaults."""
    terms: ClassVar[tuple[str, ...]]
    """The names of the terms that `forward` returns."""
    taps: ClassVar[tuple[str, ...]] = ()
    """Default taps of student and teacher; the options `student_taps` and `teacher_taps` override them. See
    `trainables.models.taps`."""
    init_terms: ClassVar[tuple[str, ...]] = ()
    """The names of the terms that `init_loss` returns; empty if the method has no init stage. With one, its `Options` are a
    subclass of `InitStageOptions`."""
    requires: ClassVar[Requirements] = Requirements()
    task_weight: ClassVar[float] = 1.0
    """The default weight of the labels' cross-entropy."""
    idle_with_two_classes: ClassVar[str] = ""
    """The term that is zero for two classes, named in the notice about it."""

    projects_embedding = False
    """Whether the method has `project_embedding`; an evaluation then reports its `cosine`."""

    def __init__(self, options: MethodOptions, context: BuildContext) -> None:
        """Build the method's modules on the CPU in float32. torch's generator is seeded for the method.

        Raises ExperimentError: the models do not fit the method.
        """
        super().__init__()
        self.options = options
        """The user's options. A subclass with its own `Options` annotates the type: `options: MyOptions`."""

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return the terms by name, each (B,) or a scalar, without the method's `weight`.

        A method that requires no teacher gets the student's detached outputs as `teacher`.
        """
        raise NotImplementedError

    def task_logits(self, student: ModelOutputs) -> Tensor | None:
        """Return the logits (B, K) that learn the labels, for a student with several heads; None for the student's output."""
        return None

    def project_embedding(self, student: ModelOutputs, teacher: ModelOutputs) -> tuple[Tensor, Tensor]:
        """Return the embeddings (B, D) to compare: the student's after the method's head, and the teacher's."""
        raise NotImplementedError

    def calibrate(self, teacher: ModelOutputs) -> None:
        """Update statistics with the teacher's outputs for images of this rank (maybe none). Called before the first step and
        without gradients if `Options.calibration_images` is above 0, but not in a timing run."""
        raise NotImplementedError

    def end_calibration(self) -> None:
        """Combine the statistics of all ranks into buffers; rank 0's are then broadcast."""
        raise NotImplementedError

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return the init stage's terms, named by `init_terms`; otherwise like `forward`.

        Their weight is 1, or the option `weight` if the method has no `terms`. The init stage is a separate job with its own
        instance of the method. The next stage starts from its student, and from the parameters and buffers of methods with
        `terms`.
        """
        raise NotImplementedError

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that the init stage trains, by default the method's own. Modules of `student`, the bare student,
        without any of them run in eval mode."""
        return list(self.parameters())


def mean_per_sample(values: Tensor) -> Tensor:
    """Average each sample's values: (B, …) to (B,), also for B = 0."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values
