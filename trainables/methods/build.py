"""The methods of a job, built for its student and teacher.

Shapes: M training samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainables.distributed.group import Group
from trainables.errors import DistillError, ExperimentError
from trainables.methods.contract import BuildContext, Method, ModelSpec
from trainables.methods.select import SelectedMethod
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import seeded


def build_methods(
    selected: Sequence[SelectedMethod],
    *,
    student: nn.Module,
    teacher: nn.Module | None,
    student_reader: TapReader,
    teacher_reader: TapReader | None,
    num_classes: int,
    labels_M: Tensor,
    image_size: int,
    global_batch_size: int,
    seed: int,
    epochs: int,
    group: Group,
) -> dict[str, Method]:
    """The methods by key, on the CPU in float32. Their initial parameters depend on method and seed only.

    Raises:
        DistillError: a method does not fit the models.
    """
    methods = {}
    for method in selected:
        key = method.key
        teacher_spec = None
        if teacher is not None and teacher_reader is not None and method.method_class.requires.teacher:
            teacher_spec = ModelSpec(teacher, teacher_reader.shapes[key], teacher_reader.name)
        context = BuildContext(
            student=ModelSpec(student, student_reader.shapes[key], student_reader.name),
            teacher=teacher_spec,
            num_classes=num_classes,
            labels_M=labels_M,
            image_size=image_size,
            global_batch_size=global_batch_size,
            seed=seed,
            epochs=epochs,
            group=group,
        )
        methods[key] = _build(method, context)
    return methods


def _build(method: SelectedMethod, context: BuildContext) -> Method:
    with seeded(f"method/{method.key}:{context.seed}"):
        try:
            return method.method_class(method.options, context)
        except DistillError:
            raise
        except (Exception, SystemExit) as error:  # a user's method may fail in any way
            reason = next(iter(str(error).strip().splitlines()), "")
            raise ExperimentError(
                f"distill.method: {method.key} cannot be built for these models ({type(error).__name__}: {reason})"
            ) from error
