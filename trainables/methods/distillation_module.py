"""The student and the auxiliary modules of its methods as one module: one forward pass, one DDP, one set of gradients.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from trainables.errors import ExperimentError
from trainables.methods.contract import Method, MethodBatch, ModelOutputs
from trainables.methods.tap_reader import TapReader, at_least_float32
from trainables.models.forward import logits_and_aux

LossFunction = Callable[[ModelOutputs, ModelOutputs, MethodBatch], dict[str, Tensor]]
"""`Method.forward` or `Method.init_loss`."""


class InitTargets(NamedTuple):
    """The parameters that an init stage trains, and the losses by which it does."""

    parameters: Sequence[nn.Parameter]
    losses: frozenset[str]


@dataclass(frozen=True)
class DistillationOutputs:
    """The student's logits for a batch, and the loss terms of its methods."""

    logits_BK: Tensor
    """In float32 or wider."""
    aux: tuple[tuple[float, Tensor], ...]
    """Weight and logits (B, K) of each auxiliary head."""
    terms: dict[str, dict[str, Tensor]]
    """Method → its terms, see `Method`."""


class DistillationModule(nn.Module):
    """Student and methods. With several ranks it is called through DDP: gradients come only from its forward pass.

    An `epoch` counts from the start of training and may have a fraction; below 0 it is in the init stage.
    """

    def __init__(
        self,
        student: nn.Module,
        methods: Mapping[str, Method] | None = None,
        *,
        reader: TapReader | None = None,
        task_weight: float = 1.0,
        epochs: int = 1,
    ) -> None:
        """Raises ExperimentError, see `init_lr`."""
        super().__init__()
        self.student = student
        self.methods = nn.ModuleDict(dict(methods or {}))
        self.task_weight = task_weight
        self._reader, self._epochs = reader, epochs
        self.init_lr = init_lr(self.methods_by_name)

    def forward(
        self, images_BCHW: Tensor, batch: MethodBatch | None = None, teacher: Mapping[str, ModelOutputs] | None = None
    ) -> DistillationOutputs:
        """The outputs for the samples of `batch`, which are the first of `images_BCHW`; a rank without samples runs blank images.

        `teacher`: method → the teacher's outputs; None where there is no teacher, or no method.
        """
        num_rows = len(images_BCHW) if batch is None else len(batch.labels_B)
        terms: dict[str, dict[str, Tensor]] = {}
        if self._reader is None or batch is None:
            logits_BK, aux = logits_and_aux(self.student(images_BCHW))
        else:
            with self._reader.capture():
                logits_BK, aux = logits_and_aux(self.student(images_BCHW))
                student = self._reader.pop(logits_BK, num_rows)
            with torch.autocast(images_BCHW.device.type, enabled=False):
                for key, loss in self._loss_functions(batch.epoch).items():
                    reference = teacher[key] if teacher and key in teacher else _detached(student[key])
                    terms[key] = loss(student[key], reference, batch)
        aux = tuple((weight, at_least_float32(aux_BK[:num_rows])) for weight, aux_BK in aux)
        return DistillationOutputs(at_least_float32(logits_BK[:num_rows]), aux, terms)

    @property
    def tapped_modules(self) -> frozenset[str]:
        """The paths of the student's modules that methods read."""
        return self._reader.modules if self._reader is not None else frozenset()

    @property
    def methods_by_name(self) -> dict[str, Method]:
        return {key: cast(Method, method) for key, method in self.methods.items()}

    def _loss_functions(self, epoch: float) -> dict[str, LossFunction]:
        """Method → the loss that it has in this epoch."""
        if epoch < 0:
            return {key: method.init_loss for key, method in self.methods_by_name.items() if -epoch <= method.init_epochs}
        return {key: method for key, method in self.methods_by_name.items() if method.terms}

    def weights(self, epoch: float) -> dict[str, float]:
        """The weight of the task (`task`) and of each method. For those of an init stage see `Method.init_loss`."""
        if epoch >= 0:
            methods = {key: m.options.weight_at(epoch, self._epochs) for key, m in self.methods_by_name.items()}
            return {"task": self.task_weight, **methods}
        methods = {key: 1.0 if m.terms else m.options.weight for key, m in self.methods_by_name.items()}
        return {"task": 0.0, **methods}

    def check_terms(self, terms: Mapping[str, Mapping[str, Tensor]], epoch: float) -> None:
        """Refuse a method that returns other terms than it declares: some would be trained and never recorded.

        Raises ExperimentError: one line, the same on every rank.
        """
        for key, returned in terms.items():
            declared = self.declared(key, epoch)
            if returned.keys() != set(declared):
                function, names = ("forward", "terms") if epoch >= 0 else ("init_loss", "init_terms")
                raise ExperimentError(
                    f"distill.method: {key} {describe_terms(returned, declared)}:"
                    f" give what {function} returns the names in {names}"
                )

    def declared(self, key: str, epoch: float) -> tuple[str, ...]:
        """The names of the terms that a method declares for this epoch."""
        method = self.methods_by_name[key]
        return method.terms if epoch >= 0 else method.init_terms

    def requires_teacher(self, epoch: float) -> bool:
        """Whether a method with a loss in this epoch requires a teacher."""
        return any(self.methods_by_name[key].requires.teacher for key in self._loss_functions(epoch))

    def init_targets(self, epoch: float) -> InitTargets | None:
        """What the init stage trains in this epoch; None from epoch 0 on."""
        if epoch >= 0:
            return None
        frozen = {parameter for module in self._init_stage_frozen(epoch) for parameter in module.parameters()}
        parameters = [
            parameter
            for key in self._loss_functions(epoch)
            for parameter in self.methods_by_name[key].init_stage_parameters(self.student)
            if parameter not in frozen
        ]
        return InitTargets(list(dict.fromkeys(parameters)), self.active_terms(epoch) - {"distill_loss"})

    @property
    def init_epochs(self) -> int:
        """The length of the longest init stage."""
        return max((method.init_epochs for method in self.methods_by_name.values()), default=0)

    def set_trainable(self, epoch: float) -> None:
        """Set `requires_grad`, and eval mode of what of the student the init stage does not train. Call `train()` first.

        Training freezes the parameters of the init stage only: DDP must not wait for their gradients.
        """
        for method in self.methods_by_name.values():
            for parameter in method.init_only_parameters():
                parameter.requires_grad_(epoch < 0)
        if (targets := self.init_targets(epoch)) is None:
            return
        trained = frozenset(targets.parameters)
        untrained = [m for m in self.student.modules() if (own := list(m.parameters())) and trained.isdisjoint(own)]
        for module in (*untrained, *self._init_stage_frozen(epoch)):
            module.eval()

    def _init_stage_frozen(self, epoch: float) -> list[nn.Module]:
        keys = self._loss_functions(epoch) if epoch < 0 else {}
        return [module for key in keys for module in self.methods_by_name[key].init_stage_frozen(self.student)]

    @property
    def term_names(self) -> tuple[str, ...]:
        """`method/term` of every term, in order."""
        methods = self.methods_by_name.items()
        return tuple(dict.fromkeys(f"{key}/{term}" for key, m in methods for term in (*m.init_terms, *m.terms)))

    def active_terms(self, epoch: float) -> frozenset[str]:
        """Those of `term_names` that are computed in this epoch, and `distill_loss` where there are any."""
        names = frozenset(f"{key}/{term}" for key in self._loss_functions(epoch) for term in self.declared(key, epoch))
        return names | {"distill_loss"} if names else names

    @property
    def requires_whole_batch(self) -> bool:
        """Whether a method compares samples, or normalises over them."""
        return any(method.requires_whole_batch for method in self.methods_by_name.values())


def init_lr(methods: Mapping[str, Method]) -> float | None:
    """The learning rate of the init stage, which all methods share; None: the peak of `optim`.

    Raises ExperimentError: two methods have different ones.
    """
    rates = {key: method.init_lr for key, method in methods.items() if method.init_epochs}
    first = next((key for key, rate in rates.items() if rate is not None), None)
    if first is None:
        return None
    for other, rate in rates.items():
        if rate != rates[first]:
            raise ExperimentError(
                f"distill.options.{first}.init_lr: {other} has an init stage too, at another rate, and there is one for both:"
                f" leave init_lr out, or {other}"
            )
    return rates[first]


def describe_terms(returned: Collection[str], declared: Collection[str]) -> str:
    """The terms that a method returns and those that it declares, as a part of a message."""
    return f"returns {', '.join(returned) or 'none'} and declares {', '.join(declared) or 'none'}"


def _detached(outputs: ModelOutputs) -> ModelOutputs:
    return outputs.with_tensors([tensor.detach() for tensor in outputs.tensors])
