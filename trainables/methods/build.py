"""Methods built for the models of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainables.errors import DistillError, ExperimentError
from trainables.methods.contract import BuildContext, Method, ModelSpec
from trainables.methods.select import SelectedMethod
from trainables.methods.tap_reader import Reader
from trainables.models.forward import seeded


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
