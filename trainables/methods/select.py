"""The methods of an experiment: which they are, with their options, and what of a teacher they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainables.config import DistillConfig, MethodOptions, TeacherConfig
from trainables.errors import ExperimentError
from trainables.methods import key_of, load
from trainables.methods.contract import Method
from trainables.models.names import JOIN


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
