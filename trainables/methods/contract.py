"""What a distillation method is to the training step, which knows none by name.

A method is an `nn.Module`. Its parameters are the auxiliary modules: trained with the student, synchronised by the same DDP, in
the checkpoint, not in the student that is exported. Its buffers are its memory: in the checkpoint, and the same on all ranks. Its
forward turns what student and teacher answered into named terms of the loss.

A term is either (B,), what each of this rank's samples adds to a mean over the global batch, or a scalar, the value for the whole
global batch, made from `MethodBatch.all_gather` and the same on every rank. So N workers compute what one would.

Shapes: B samples of this rank (maybe none), N samples of the global batch in the order of ranks, K classes, M training samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from trainables.config import LossOptimConfig, MethodOptions
from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group


@dataclass(frozen=True)
class ModelOutputs:
    """What a model answered to a batch, in float32 or wider."""

    logits_BK: Tensor
    features: tuple[Tensor, ...] = ()
    """At the method's taps, in their order, each (B, …). The student's carry gradients, the teacher's none."""


@dataclass(frozen=True)
class MethodBatch:
    """The batch that both models saw."""

    images_BCHW: Tensor
    """As the models see them: augmented, normalised."""
    labels_B: Tensor
    indices_B: Tensor
    """Dataset-wide, int64: the same image has the same index in every epoch and on any number of workers."""
    epoch: float
    """How many epochs have passed, with the part of this one. Below 0: the warm-up stage, see `Method.warm_up`."""
    all_gather: Gather
    """`all_gather(own)`: the rows (N, …) of all ranks for this rank's (B, …); gradients flow into the own ones.

    `all_gather.all_gather_many(a, b)` sends several tensors as one: ranks that wait for each other once lose less time.
    """


@dataclass(frozen=True)
class Needs:
    """What a method asks of the training, beside its taps."""

    teacher: bool = True
    """Whether there has to be a teacher."""
    one_label: bool = False
    """It reads `labels_B` as the one class of each image: refused with MixUp and CutMix."""
    whole_batch: bool = False
    """It compares samples with each other: refused with `optim.accumulate`, whose parts never meet."""
    all_workers: bool = False
    """It asks for all workers' rows, without comparing them: refused with `optim.accumulate` on several workers, one of which may
    have fewer parts of a batch than another."""
    reuses_classifier: bool = False
    """The student predicts with the teacher's classifier: it becomes STUDENT+TEACHER, see `models.reused_classifier`."""
    teacher_gradient: bool = False
    """The teacher runs with a graph from its features to its logits. Its parameters are frozen. Refused in half precision, where
    what a method is given is a copy in float32, of which the logits are no function."""
    largest_logits: bool = False
    """The teacher's largest logits, and what the others add up to, are enough for it: without this it is refused with
    `teacher.cache_top_k` below the number of classes."""
    teacher_model: bool = False
    """It keeps the teacher, or a part of it: refused where there are but logits of it, like `teacher_gradient` and taps."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as a method is built for it."""

    model: nn.Module
    """The bare model. What is kept of it belongs in a tuple, so that it does not become a part of the method."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the features at the method's taps, without the batch's dimension."""
    name: str = ""
    """Under which `trainables.models.registry.build_model` knows the model."""


@dataclass(frozen=True)
class BuildContext:
    """What a method is built for."""

    student: ModelSpec
    teacher: ModelSpec | None
    """None: there is no teacher, or its logits are kept and it need not run, see `Needs.teacher_model`."""
    num_classes: int
    labels_M: Tensor
    """The label of each training sample, by its index: int64 on the CPU."""
    image_size: int
    global_batch_size: int
    """Samples of a step over all ranks; the last step of an epoch may have fewer."""
    seed: int
    epochs: int
    group: Group


class Method(nn.Module):
    """A way to distil. A subclass gives `Options`, `terms` and `forward`, and the other declarations where it needs them.

    Forward runs in float32 (float64 in a float64 job) outside autocast, on every rank in every step, also where a rank has no
    samples. It does not wait for the device: no `.item()`, no shape that depends on values. Memory is changed only in
    training mode. Batch norms of auxiliary modules are those of `trainables.distributed.batch_norm`.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    """What a user may write under `distill.options`, with the defaults."""
    terms: ClassVar[tuple[str, ...]]
    """Names of the terms, known before anything is computed."""
    taps: ClassVar[tuple[str, ...]] = ()
    """Where it reads student and teacher, unless `student_taps` or `teacher_taps` say otherwise; see `trainables.models.taps`."""
    init_terms: ClassVar[tuple[str, ...]] = ()
    """Names of the terms of the warm-up stage; empty: there is none."""
    optimizers: ClassVar[Mapping[str, LossOptimConfig]] = {}
    """Terms that are a loss with an optimizer of its own each, as what differs from `optim`; `optim.losses` may change it, under
    METHOD/TERM. Not beside a warm-up stage."""
    needs: ClassVar[Needs] = Needs()
    task_weight: ClassVar[float] = 1.0
    """The weight of the labels' cross-entropy beside it, where the user gives none."""

    def __init__(self, options: MethodOptions, setting: BuildContext) -> None:
        """Auxiliary modules are built here, on the CPU in float32; torch's generator is seeded for it.

        Raises:
            ExperimentError: the models do not fit the method; one line.
        """
        super().__init__()
        self.init_epochs = int(getattr(options, "init_epochs", 0))
        """The length of the warm-up stage before the first epoch: an option of the methods that have one."""
        self.init_lr: float | None = getattr(options, "init_lr", None)
        """Its learning rate, where it is not the peak of `optim`: an option of methods too."""

    def warm_up(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """The loss of the warm-up stage, under the names of `init_terms`; all else is as in `forward`.

        The option `weight` is that of `terms`, and the stage's loss counts 1; a method without `terms` has it for this loss.
        """
        raise NotImplementedError

    def warm_up_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        """What the warm-up stage trains: by default the method's own parameters. `student` is the bare one."""
        return list(self.parameters())

    def warm_up_frozen(self, student: nn.Module) -> list[nn.Module]:
        """Parts of the bare `student` that the warm-up stage leaves as they are, and runs in eval mode: by default none."""
        return []

    def settled_parameters(self) -> list[nn.Parameter]:
        """What is trained in the warm-up stage alone; by default, without `terms`, everything of the method."""
        return [] if self.terms else list(self.parameters())

    def moved_by(self, term: str, student: nn.Module) -> list[nn.Parameter]:
        """What the optimizer of a term changes where its gradient arrives: by default all of the student and of the method.

        A method whose terms are adversaries names the one side for each. An optimizer has one gradient, so a term that changes
        less than the losses beside it needs one of its own, see `optimizers`.
        """
        return [*student.parameters(), *self.parameters()]

    @property
    def compares_samples(self) -> bool:
        """Whether the parts of an accumulated batch would not give what the whole does."""
        return self.needs.whole_batch or any(isinstance(module, GlobalBatchNorm) for module in self.modules())

    def begin_epoch(self, epoch: int, student: nn.Module) -> None:
        """Called on every rank before an epoch's first step, with the bare student; not again where a job resumes inside it."""

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """The terms, unweighted but for the method's own inner weights, each (B,) or a scalar as told above.

        A method that needs no teacher is given its student's answer, without gradients, as the teacher's.
        """
        raise NotImplementedError


def mean_per_sample(values: Tensor) -> Tensor:
    """The mean of each sample's values: (B, …) to (B,), also for B = 0."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values
