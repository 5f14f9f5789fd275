"""The student together with what its methods add, as one module: one forward, one DDP, one set of gradients.

Shapes: B samples of this rank, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from trainables.config import MethodOptions
from trainables.errors import ExperimentError
from trainables.methods.contract import Method, MethodBatch, ModelOutputs
from trainables.methods.tap_reader import Reader, widened
from trainables.models.forward import logits_and_aux


class Only(NamedTuple):
    """What a warm-up stage trains, and by which losses."""

    parameters: Sequence[nn.Parameter]
    losses: frozenset[str]


@dataclass(frozen=True)
class DistillationOutputs:
    """What the student says to a batch, and what its methods say to that."""

    logits_BK: Tensor
    """In float32 or wider."""
    aux: tuple[tuple[float, Tensor], ...]
    """Weight and logits (B, K) of each auxiliary head."""
    terms: dict[str, dict[str, Tensor]]
    """Method → its terms, see `Method`."""


class DistillationModule(nn.Module):
    """Student and methods. Called through DDP where there are several ranks: its forward is the only way to a gradient."""

    def __init__(
        self,
        student: nn.Module,
        methods: Mapping[str, Method] | None = None,
        options: Mapping[str, MethodOptions] | None = None,
        *,
        reader: Reader | None = None,
        task_weight: float = 1.0,
        epochs: int = 1,
    ) -> None:
        """Raises ExperimentError, see `init_lr`."""
        super().__init__()
        self.student = student
        self.methods = nn.ModuleDict(dict(methods or {}))
        self.task_weight = task_weight
        self._options = dict(options or {})
        self._reader, self._epochs = reader, epochs
        self.init_lr = init_lr(self.methods_by_name)

    def forward(
        self, images_BCHW: Tensor, batch: MethodBatch | None = None, teacher: Mapping[str, ModelOutputs] | None = None
    ) -> DistillationOutputs:
        """The answer to `images_BCHW`, cut to the samples of `batch`: a rank without any runs images that count for nothing.

        `teacher`: method → what the teacher answered; None where there is no teacher, or no method.
        """
        if self._reader is None or batch is None:
            logits_BK, aux = logits_and_aux(self.student(images_BCHW))
            rows = len(logits_BK) if batch is None else len(batch.labels_B)
            return DistillationOutputs(widened(logits_BK[:rows]), _cut(aux, rows), {})
        rows = len(batch.labels_B)
        with self._reader.reading():
            logits_BK, aux = logits_and_aux(self.student(images_BCHW))
            seen = self._reader.take(logits_BK, rows)
        with torch.autocast(images_BCHW.device.type, enabled=False):
            terms = {
                key: call(seen[key], teacher[key] if teacher and key in teacher else _detached(seen[key]), batch)
                for key, call in self._calls(batch.epoch).items()
            }
        return DistillationOutputs(widened(logits_BK[:rows]), _cut(aux, rows), terms)

    @property
    def methods_by_name(self) -> dict[str, Method]:
        """The methods, in the order of the experiment."""
        return {key: cast(Method, method) for key, method in self.methods.items()}

    def _calls(self, epoch: float) -> dict[str, Callable[[ModelOutputs, ModelOutputs, MethodBatch], dict[str, Tensor]]]:
        """What each method is asked for: its loss, or before epoch 0 that of its warm-up stage."""
        if epoch < 0:
            return {key: method.warm_up for key, method in self.methods_by_name.items() if -epoch <= method.init_epochs}
        return {key: method for key, method in self.methods_by_name.items() if method.terms}

    def weights(self, epoch: float) -> dict[str, float]:
        """The weight of the task and of each method when so many epochs have passed.

        In a warm-up stage the task's is 0, a method's 1, or its `weight` where it has no other stage: see `Method.warm_up`.
        """
        if epoch < 0:
            methods = self.methods_by_name.items()
            return {"task": 0.0, **{key: 1.0 if m.terms else self._options[key].weight for key, m in methods}}
        return {"task": self.task_weight, **{key: o.weight_at(epoch, self._epochs) for key, o in self._options.items()}}

    def check_terms(self, said: Mapping[str, Mapping[str, Tensor]], epoch: float) -> None:
        """Refuse terms of methods that are not those which they declare: some would be learned and stand in no record.

        Raises:
            ExperimentError: on every rank alike, one line.
        """
        for key, terms in said.items():
            declared = self.declared(key, epoch)
            if terms.keys() != set(declared):
                where, names = ("forward", "terms") if epoch >= 0 else ("warm_up", "init_terms")
                raise ExperimentError(
                    f"distill.method: {key} {returned(terms, declared)}: give what {where} returns the names in {names}"
                )

    def declared(self, key: str, epoch: float) -> tuple[str, ...]:
        """Names of the terms that a method declares for the time when so many epochs have passed."""
        method = self.methods_by_name[key]
        return method.terms if epoch >= 0 else method.init_terms

    def asks_teacher(self, epoch: float) -> bool:
        """Whether a method that is asked for its loss now reads the teacher."""
        return any(self.methods_by_name[key].needs.teacher for key in self._calls(epoch))

    def warms_up(self, epoch: float) -> Only | None:
        """What a warm-up stage trains; None from epoch 0 on."""
        if epoch >= 0:
            return None
        frozen = {p for module in self._frozen(epoch) for p in module.parameters()}
        every = (p for key in self._calls(epoch) for p in self.methods_by_name[key].warm_up_parameters(self.student))
        found = dict.fromkeys(p for p in every if p not in frozen)
        return Only(list(found), self.told_at(epoch) - {"distill_loss"})

    @property
    def init_epochs(self) -> int:
        """The length of the longest warm-up stage."""
        return max((method.init_epochs for method in self.methods_by_name.values()), default=0)

    def begin_stage(self, epoch: float) -> None:
        """In training mode, choose what the stage of this epoch changes: a warm-up stage (below 0), or training.

        Training freezes what the warm-up stage alone trains: DDP must not wait for it.
        """
        for method in self.methods_by_name.values():
            for parameter in method.settled_parameters():
                parameter.requires_grad_(epoch < 0)
        for module in self._frozen(epoch):
            module.eval()

    def _frozen(self, epoch: float) -> list[nn.Module]:
        """The student's parts that a warm-up stage leaves as they are."""
        keys = self._calls(epoch) if epoch < 0 else {}
        return [module for key in keys for module in self.methods_by_name[key].warm_up_frozen(self.student)]

    def begin_epoch(self, epoch: int) -> None:
        """Tell the methods, see `Method.begin_epoch`."""
        for method in self.methods_by_name.values():
            method.begin_epoch(epoch, self.student)

    @property
    def term_names(self) -> tuple[str, ...]:
        """`method/term` of every term, in order."""
        methods = self.methods_by_name.items()
        return tuple(dict.fromkeys(f"{key}/{term}" for key, m in methods for term in (*m.init_terms, *m.terms)))

    def told_at(self, epoch: float) -> frozenset[str]:
        """Those of `term_names` that are computed when so many epochs have passed, and `distill_loss` where there are any."""
        names = frozenset(f"{key}/{term}" for key in self._calls(epoch) for term in self.declared(key, epoch))
        return names | {"distill_loss"} if names else names

    @property
    def needs_whole_batch(self) -> bool:
        """Whether one of the methods compares samples, or normalises over them."""
        return any(method.compares_samples for method in self.methods_by_name.values())


def init_lr(methods: Mapping[str, Method]) -> float | None:
    """The learning rate of the warm-up stage that methods share; None: the peak of `optim`.

    Raises:
        ExperimentError: they have unlike ones.
    """
    rates = {key: method.init_lr for key, method in methods.items() if method.init_epochs}
    own = next((key for key, rate in rates.items() if rate is not None), None)
    if own is None:
        return None
    if other := next((key for key, rate in rates.items() if rate != rates[own]), None):
        raise ExperimentError(
            f"distill.options.{own}.init_lr: {other} has a warm-up stage too, at another rate, and there is one for both: leave"
            f" init_lr out, or {other}"
        )
    return rates[own]


def returned(terms: Collection[str], declared: Collection[str]) -> str:
    """What a method returns and what it declares, in words."""
    return f"returns {', '.join(terms) or 'none'} and declares {', '.join(declared) or 'none'}"


def _cut(aux: tuple[tuple[float, Tensor], ...], rows: int) -> tuple[tuple[float, Tensor], ...]:
    return tuple((weight, widened(aux_BK[:rows])) for weight, aux_BK in aux)


def _detached(seen: ModelOutputs) -> ModelOutputs:
    return ModelOutputs(seen.logits_BK.detach(), tuple(feature.detach() for feature in seen.features))
