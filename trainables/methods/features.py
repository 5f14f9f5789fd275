"""Building blocks of methods on feature maps: normalization, pooling to a common size, pairing of maps, and regressors.

Shapes: B batch, C channels, H W positions. The shape of a map is (C, H, W).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import MethodOptions
from trainables.distributed.batch_norm import GlobalBatchNorm2d
from trainables.distributed.group import Group
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext
from trainables.models.tap_names import classifier

Shape = tuple[int, ...]

_TINY = 1e-12
"""Smaller norms count as 0, as in torch's `normalize`."""


class TeacherNormOptions(MethodOptions):
    """Options of a method whose published code leaves the teacher in training mode."""

    teacher_norm: Literal["running", "batch"] = Field(
        "running",
        description="what the teacher's batch norms use, for all methods of a job: running statistics, or each batch's",
    )


def unit(x: Tensor, dim: int | Sequence[int] = -1) -> Tensor:
    """Divide `x` by its Euclidean norm over `dim`. A zero vector stays zero, with a gradient of 0 rather than 1e12."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    direction = x / norm.clamp(min=_TINY)
    return torch.where(norm > _TINY, direction, direction.detach())


def pooled_alike(a_BCHW: Tensor, b_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Average-pool both maps to the smaller of their heights and widths. Channels may differ."""
    height, width = min(a_BCHW.shape[2], b_BCHW.shape[2]), min(a_BCHW.shape[3], b_BCHW.shape[3])
    return average_pooled(a_BCHW, height, width), average_pooled(b_BCHW, height, width)


def average_pooled(map_BCHW: Tensor, height: int, width: int) -> Tensor:
    """Apply `adaptive_avg_pool2d` to a size that is no larger. If it divides the map's, plain pooling is used, whose gradient on
    a GPU is deterministic, unlike the adaptive one's."""
    (rows, rest_rows), (columns, rest_columns) = divmod(map_BCHW.shape[2], height), divmod(map_BCHW.shape[3], width)
    if rest_rows or rest_columns:
        return functional.adaptive_avg_pool2d(map_BCHW, (height, width))
    return map_BCHW if rows == columns == 1 else functional.avg_pool2d(map_BCHW, (rows, columns))


def check_taps(method: str, context: BuildContext, fits: Callable[[Sequence[Shape]], bool], reads: str, instead: str) -> None:
    """Raise ExperimentError unless the shapes at each model's taps fit what the method `reads`, with the remedy `instead`."""
    for side, model in (("student", context.student), ("teacher", context.teacher)):
        if model is not None and not fits(model.shapes):
            shapes = ", ".join(map(str, model.shapes)) or "none"
            raise ExperimentError(
                f"distill.options.{method}.{side}_taps: {method} reads {reads}, but the {side}'s taps are {shapes}: {instead}"
            )


def check_one_tap(method: str, context: BuildContext) -> None:
    """Raise ExperimentError if a model has more than one tap, for a method that compares one feature."""
    check_taps(method, context, lambda shapes: len(shapes) == 1, "one feature", "name one tap")


def check_maps(method: str, context: BuildContext, at_least: int = 1) -> None:
    """Raise ExperimentError if a tap is not a map, or a model has too few."""

    def fits(shapes: Sequence[Shape]) -> bool:
        return len(shapes) >= at_least and all(len(shape) == 3 for shape in shapes)

    instead = "name stages or convolutions (`distill taps MODEL` lists them)"
    check_taps(method, context, fits, f"{at_least} or more maps (C, H, W)", instead)


def paired_maps(method: str, context: BuildContext, *, at_least: int = 1) -> list[tuple[Shape, Shape]]:
    """Return the shapes of the student's and the teacher's maps, paired by position.

    Raises ExperimentError: there are fewer than `at_least` pairs, the numbers of maps differ, or a tap is not a map.
    """
    assert context.teacher is not None
    check_maps(method, context, at_least)
    student, teacher, options = context.student.shapes, context.teacher.shapes, f"distill.options.{method}"
    if len(student) != len(teacher):
        raise ExperimentError(
            f"{options}: the student has {len(student)} maps, the teacher {len(teacher)}, and {method} pairs them by position: "
            "name as many student_taps as teacher_taps"
        )
    return list(zip(student, teacher, strict=True))


def equal_channels(method: str, pairs: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise ExperimentError if the maps of a pair have different numbers of channels."""
    for student, teacher in pairs:
        if student[0] != teacher[0]:
            raise ExperimentError(
                f"distill.method: {method} needs maps with equal channels, but the student's has {student[0]} and the teacher's "
                f"{teacher[0]}: name other taps, or choose a method with a regressor, such as fitnet"
            )


def body_parameters(student: nn.Module) -> list[nn.Parameter]:
    """Return a model's trainable parameters except those of its final linear layer, which losses on maps do not change."""
    last = {id(parameter) for parameter in classifier(student).parameters()}
    return [parameter for parameter in student.parameters() if parameter.requires_grad and id(parameter) not in last]


def connector(inputs: int, outputs: int, group: Group) -> nn.Sequential:
    """Build a 1×1 convolution with batch norm, initialized as by the authors of OFD and SRRL."""
    convolution = nn.Conv2d(inputs, outputs, 1, bias=False)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / outputs))
    return nn.Sequential(convolution, GlobalBatchNorm2d(outputs, group))


class ConvReg(nn.Module):
    """Convolution, batch norm and ReLU that map a student's map to the teacher's shape.

    The convolution is RepDistiller's: 3 × 3 with stride 2 if the student's map is twice as high and wide, transposed 4 × 4 with
    stride 2 if it is half, otherwise one without padding that yields the teacher's size. Romero et al. 2015 (FitNets, section
    2.2) use only the last kind.
    """

    def __init__(self, student: Shape, teacher: Shape, group: Group, *, relu: bool = True) -> None:
        """`relu=False` leaves out the ReLU, for maps from before an activation.

        Raises ExperimentError: the student's map is smaller, but not half as high and wide.
        """
        super().__init__()
        (inputs, *size), (outputs, *target) = student, teacher
        self.conv: nn.Module
        if size == [2 * pixels for pixels in target]:
            self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        elif [2 * pixels for pixels in size] == target:
            self.conv = nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1)
        elif size[0] >= target[0] and size[1] >= target[1]:
            self.conv = nn.Conv2d(inputs, outputs, (1 + size[0] - target[0], 1 + size[1] - target[1]))
        else:
            raise ExperimentError(
                f"distill.method: no regressor turns the student's map {student} into the teacher's {teacher}: "
                "tap the student where its map is half as high and wide, or not smaller"
            )
        self.norm = GlobalBatchNorm2d(outputs, group)
        self.activation = nn.ReLU() if relu else nn.Identity()

    def forward(self, student_BCHW: Tensor) -> Tensor:
        """Return (B, C, H, W) in the teacher's shape."""
        regressed_BCHW: Tensor = self.activation(self.norm(self.conv(student_BCHW)))
        return regressed_BCHW
