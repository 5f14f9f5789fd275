"""Combines the student and its methods' auxiliary modules into one module, with one forward pass under one DDP.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainables.config import init_epochs
from trainables.errors import ExperimentError
from trainables.methods.contract import Method, MethodBatch, ModelOutputs
from trainables.methods.tap_reader import TapReader, at_least_float32
from trainables.methods.teacher_dropping import TeacherDropping
from trainables.models.forward import has_classifier, logits_and_aux


@dataclass(frozen=True)
class DistillationOutputs:
    """The student's logits for a batch, and the loss terms of its methods."""

    logits_BK: Tensor
    """In float32 or wider; pooled features for a student without a classifier."""
    aux: tuple[tuple[float, Tensor], ...]
    """Weight and logits (B, K) of each auxiliary head."""
    terms: dict[str, dict[str, Tensor]]
    """Method → its terms, see `Method`."""
    student: Mapping[str, ModelOutputs] = field(default_factory=dict)
    """Method → the student outputs that it reads; empty in training."""


class DistillationModule(nn.Module):
    """The student and its methods. With several ranks it is called through DDP, so gradients come only from its forward pass.

    An init stage uses the methods' `init_loss` and trains only `init_parameters`. An `epoch` counts from the stage's start and
    may have a fraction.
    """

    def __init__(
        self,
        student: nn.Module,
        methods: Mapping[str, Method] | None = None,
        *,
        reader: TapReader | None = None,
        teachers: Mapping[str, int] | None = None,
        dropping: TeacherDropping | None = None,
        task_weight: float = 1.0,
        epochs: int = 1,
        init_stage: bool = False,
    ) -> None:
        super().__init__()
        self.student = student
        self.methods = nn.ModuleDict(dict(methods or {}))
        self.task_weight, self.dropping = task_weight, dropping
        self.teachers = teachers or {}
        """Method → number of its teacher, if each of several teachers has its own method."""
        self._reader, self._epochs = reader, epochs
        self._init_stage = init_stage
        self._active = self.methods_by_name

    def forward(
        self, images_BCHW: Tensor, batch: MethodBatch | None = None, teacher: Mapping[str, ModelOutputs] | None = None
    ) -> DistillationOutputs:
        """Compute the outputs for the samples of `batch`, the first rows of `images_BCHW` (a rank without samples runs blanks).

        `teacher` maps each method that reads a teacher to the teacher's outputs.
        """
        num_rows = len(images_BCHW) if batch is None else len(batch.labels_B)
        terms: dict[str, dict[str, Tensor]] = {}
        student: Mapping[str, ModelOutputs] = {}
        if self._reader is None or batch is None:
            logits_BK, aux = logits_and_aux(self.student(images_BCHW))
        else:
            output, student = self.read(images_BCHW, num_rows)
            logits_BK, aux = logits_and_aux(output)
            with torch.autocast(images_BCHW.device.type, enabled=False):
                for key, method in self._active.items():
                    loss = method.init_loss if self._init_stage else method
                    reference = teacher[key] if teacher and key in teacher else student[key].map(Tensor.detach)
                    terms[key] = loss(student[key], reference, batch)
                    if self.training and (task_BK := method.task_logits(student[key])) is not None:
                        logits_BK = task_BK
        aux = tuple((weight, at_least_float32(aux_BK[:num_rows])) for weight, aux_BK in aux)
        return DistillationOutputs(at_least_float32(logits_BK[:num_rows]), aux, terms, {} if self.training else student)

    def read(self, images_BCHW: Tensor, num_rows: int) -> tuple[Any, Mapping[str, ModelOutputs]]:
        """Return the student's output, and the `ModelOutputs` of the first `num_rows` samples for each method."""
        if self._reader is None:
            return self.student(images_BCHW), {}
        with self._reader.capture():
            output = self.student(images_BCHW)
            return output, self._reader.pop(output, num_rows)

    @property
    def classifies(self) -> bool:
        """Whether the student has a classifier and learns labels."""
        return has_classifier(self.student)

    @property
    def tapped_modules(self) -> frozenset[str]:
        """Paths of the student's modules that methods read."""
        return self._reader.modules if self._reader is not None else frozenset()

    @property
    def methods_by_name(self) -> dict[str, Method]:
        return {key: cast(Method, method) for key, method in self.methods.items()}

    def begin_epoch(self, epoch: int) -> None:
        """Set training mode, but eval mode for modules of the student without trained parameters.

        In an init stage also activate the methods that have started: all end together, so those with fewer epochs start later.
        """
        self.train()
        trained = frozenset(p for p in self.student.parameters() if p.requires_grad)
        if self._init_stage:
            lengths = {key: init_epochs(method.options) for key, method in self.methods_by_name.items()}
            epochs_left = max(lengths.values()) - epoch
            self._active = {key: method for key, method in self.methods_by_name.items() if lengths[key] >= epochs_left}
            trained = frozenset(self.init_parameters)
        for module in self.student.modules():
            if (own := list(module.parameters())) and trained.isdisjoint(own):
                module.eval()

    @property
    def init_parameters(self) -> list[nn.Parameter]:
        """The parameters that the active methods train in an init stage."""
        parameters = [p for method in self._active.values() for p in method.init_stage_parameters(self.student)]
        return list(dict.fromkeys(parameters))

    def weights(self, epoch: float) -> dict[str, float]:
        """Return the weight of the task loss (`task`) and of each method. See `Method.init_loss` for those of an init stage."""
        methods = self.methods_by_name.items()
        if self._init_stage:
            return {"task": 0.0, **{key: 1.0 if m.terms else m.options.weight for key, m in methods}}
        return {"task": self.task_weight, **{key: m.options.weight_at(epoch, self._epochs) for key, m in methods}}

    def check_terms(self, terms: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Check that each method returns the terms that it declares. Undeclared ones would be trained but never recorded, and an
        undeclared scalar would count once per micro-batch.

        Raises ExperimentError: the same on every rank.
        """
        for key, returned in terms.items():
            declared = self._declared(key)
            if returned.keys() != set(declared):
                function, names = ("init_loss", "init_terms") if self._init_stage else ("forward", "terms")
                raise ExperimentError(
                    f"distill.method: {key} {describe_terms(returned, declared)}:"
                    f" make {function} return exactly the names in {names}"
                )
            scalars = [name for name, term in returned.items() if not term.ndim]
            if scalars and not self.methods_by_name[key].requires.whole_batch:
                raise ExperimentError(
                    f"distill.method: {key} returns {scalars[0]} as a scalar, which is a loss of the global batch: declare"
                    " requires = Requirements(whole_batch=True), or return one loss per image"
                )
            if scalars and self.dropping is not None and key in self.dropping.teachers:
                raise ExperimentError(
                    f"distill.teacher_dropping: {key}/{scalars[0]} is one loss for the whole batch, but it drops losses"
                    " of single images: leave it out, or choose another method, such as embed"
                )

    def _declared(self, key: str) -> tuple[str, ...]:
        """The names of the terms that a method declares for this stage."""
        method = self.methods_by_name[key]
        return method.init_terms if self._init_stage else method.terms

    @property
    def term_names(self) -> tuple[str, ...]:
        """`method/term` for every term, in order."""
        return tuple(f"{key}/{term}" for key in self.methods for term in self._declared(key))

    @property
    def inactive_terms(self) -> frozenset[str]:
        """The `term_names` of methods that have not started yet in an init stage."""
        return frozenset(f"{key}/{term}" for key in self.methods if key not in self._active for term in self._declared(key))


def describe_terms(returned: Collection[str], declared: Collection[str]) -> str:
    """Describe the returned and declared terms as part of an error message."""
    return f"returns {', '.join(returned) or 'none'} and declares {', '.join(declared) or 'none'}"
