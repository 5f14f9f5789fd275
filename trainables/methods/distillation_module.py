"""The student together with what its methods add, as one module: one forward, one DDP, one set of gradients.

Shapes: B samples of this rank, K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainables.config import DistillConfig, MethodOptions, TeacherConfig
from trainables.engine.optimizers import Only
from trainables.errors import DistillError, ExperimentError
from trainables.methods import key_of, load
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, ModelSpec
from trainables.models.forward import logits_and_aux, seeded
from trainables.models.names import JOIN
from trainables.models.taps import Taps


class SelectedMethod(NamedTuple):
    """A method of an experiment: what it is called, its class and its options."""

    key: str
    kind: type[Method]
    options: MethodOptions

    @property
    def student_taps(self) -> tuple[str, ...]:
        return self.kind.taps if self.options.student_taps is None else self.options.student_taps

    @property
    def teacher_taps(self) -> tuple[str, ...]:
        return self.kind.taps if self.options.teacher_taps is None else self.options.teacher_taps


def choose(distill: DistillConfig) -> tuple[SelectedMethod, ...]:
    """The methods of `distill`, but for those whose weight is 0.

    Raises:
        ExperimentError: one of them cannot be loaded, or has a schedule that changes nothing.
        pydantic.ValidationError: options that a method does not have.
    """
    named = [(key_of(name), load(name)) for name in distill.method]
    every = [SelectedMethod(key, kind, kind.Options.model_validate(distill.options.get(key, {}))) for key, kind in named]
    for key, kind, options in every:
        kept = {
            "warmup_epochs": options.warmup_epochs == 0,
            "warmup_by": options.warmup_by == "step",
            "decay": options.decay == "none",
        }
        if not kind.terms and (name := next((name for name, unchanged in kept.items() if not unchanged), None)):
            raise ExperimentError(
                f"distill.options.{key}.{name}: {key} works in its warm-up stage alone, throughout which its weight is the same:"
                f" leave {name} out"
            )
        if options.warmup_by != "step" and not options.warmup_epochs:
            raise ExperimentError(
                f"distill.options.{key}.warmup_by: without warmup_epochs the weight does not rise: set warmup_epochs too, "
                "or leave warmup_by out"
            )
    return tuple(method for method in every if method.options.weight)


def check_reads_logits(chosen: Sequence[SelectedMethod], teacher: TeacherConfig) -> None:
    """Refuse methods to which a teacher's logits alone would not do, where `logits_only` gives no more of it.

    Raises:
        ExperimentError: one line.
    """
    key = teacher.logits_only
    if key is None:
        return
    for method in chosen:
        needs = method.kind.needs
        more = {
            "features": method.teacher_taps,
            "gradients": needs.teacher_gradient,
            "network": needs.teacher_model or needs.reuses_classifier,
        }
        if needs.teacher and (what := next((name for name, needed in more.items() if needed), None)):
            raise ExperimentError(
                f"{key}: it gives a teacher's logits, and {method.key} needs its {what}: set {key} to null, or distill.method "
                "to methods on logits, such as kd"
            )


def check_keeps_enough(chosen: Sequence[SelectedMethod], teacher: TeacherConfig, num_classes: int) -> None:
    """Refuse methods that look at logits which `teacher.cache_top_k` does not keep.

    Raises:
        ExperimentError: one line.
    """
    if teacher.cache_top_k is None or teacher.cache_top_k >= num_classes:
        return
    for method in chosen:
        standardizes = getattr(method.options, "standardize", False)
        if method.kind.needs.teacher and (standardizes or not method.kind.needs.largest_logits):
            looks = f"distill.options.{method.key}.standardize" if standardizes else method.key
            raise ExperimentError(
                f"teacher.cache_top_k: of {num_classes} classes it keeps {teacher.cache_top_k} apart, and {looks} looks at each:"
                " leave it out, or set distill.method to kd, without standardize"
            )


def task_weight(distill: DistillConfig, chosen: Sequence[SelectedMethod]) -> float:
    """The weight of the labels' cross-entropy: the user's, or else the largest of the methods' own."""
    if distill.task_weight is not None:
        return distill.task_weight
    return max((method.kind.task_weight for method in chosen), default=1.0)


def student_name(student: str, teacher: TeacherConfig | None, chosen: Sequence[SelectedMethod]) -> str:
    """The model that is trained: `student`, or where a method reuses the teacher's classifier, the two joined."""
    if teacher is None or not any(method.kind.needs.reuses_classifier for method in chosen):
        return student
    joined = f"{JOIN}{teacher.model}"
    return student if student.endswith(joined) else student + joined


class Reader:
    """What several methods read of one model, each at taps of its own."""

    def __init__(self, model: nn.Module, wanted: Mapping[str, Sequence[str]], *, name: str, image_size: int):
        """`wanted`: method → its taps. Raises ModelError where the model has no such point."""
        self.name = name
        self._taps = {key: Taps(model, names, name=name, image_size=image_size) for key, names in wanted.items() if names}
        self.shapes = {key: self._taps[key].shapes if key in self._taps else () for key in wanted}

    def reading(self) -> contextlib.ExitStack:
        """A context in which the model's forward is read."""
        stack = contextlib.ExitStack()
        for taps in self._taps.values():
            stack.enter_context(taps.reading())
        return stack

    def take(self, logits_BK: Tensor, num_rows: int) -> dict[str, ModelOutputs]:
        """For each method what the last forward gave, in float32 or wider, its first `num_rows` rows; the model is let go of."""
        logits_BK = _first(logits_BK, num_rows)
        found = {key: tuple(_first(tensor, num_rows) for tensor in taps.take()) for key, taps in self._taps.items()}
        return {key: ModelOutputs(logits_BK, found.get(key, ())) for key in self.shapes}


def widened(tensor: Tensor) -> Tensor:
    """In float32, unless it is wider: sums of half-precision numbers are not exact enough for a loss."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _first(tensor: Tensor, num_rows: int) -> Tensor:
    """The first rows, widened; the tensor itself where that is all of it, so that it stays a part of its model's graph."""
    return widened(tensor if len(tensor) == num_rows else tensor[:num_rows])


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


def build_methods(
    chosen: Sequence[SelectedMethod],
    student: nn.Module,
    teacher: nn.Module | None,
    readers: tuple[Reader, Reader | None],
    **about: Any,
) -> dict[str, Method]:
    """The methods for these models, on the CPU in float32; their first parameters are a function of method and seed alone.

    `readers` are the student's and the teacher's; `about` is the rest of `BuildContext`.

    Raises:
        DistillError: a method does not fit the models.
    """
    student_reader, teacher_reader = readers
    methods = {}
    for key, kind, options in chosen:
        own, other = ModelSpec(student, student_reader.shapes[key], student_reader.name), None
        if teacher is not None and teacher_reader is not None and kind.needs.teacher:
            other = ModelSpec(teacher, teacher_reader.shapes[key], teacher_reader.name)
        setting = BuildContext(student=own, teacher=other, **about)
        with seeded(f"method/{key}:{setting.seed}"):
            try:
                methods[key] = kind(options, setting)
            except DistillError:
                raise
            except (Exception, SystemExit) as error:  # a user's method may fail in any way
                reason = next(iter(str(error).strip().splitlines()), "")
                raise ExperimentError(
                    f"distill.method: {key} cannot be built for these models ({type(error).__name__}: {reason})"
                ) from error
    return methods
