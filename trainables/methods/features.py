"""Parts of methods on feature maps: directions, pooling to a common size, pairs of maps, and the regressor between two of them.

Shapes: B batch, C channels, H W positions. The shape of a map is (C, H, W).
"""

import math
from collections.abc import Sequence
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
"""A smaller norm counts as 0, as in torch's `normalize`."""


class TeacherNormOptions(MethodOptions):
    """Options of a method whose published code leaves the teacher in training mode."""

    teacher_norm: Literal["running", "batch"] = Field(
        "running",
        description="what the teacher's batch norms use, for all methods of a job: running statistics, or each batch's",
    )


def unit(x: Tensor, dim: int | Sequence[int] = -1) -> Tensor:
    """`x` divided by its Euclidean norm over `dim`; a zero vector stays one, and its gradient is 0 and not 1e12."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    direction = x / norm.clamp(min=_TINY)
    return torch.where(norm > _TINY, direction, direction.detach())


def pooled_alike(a_BCHW: Tensor, b_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Both maps at the smaller of their heights and widths, by adaptive average pooling. Channels may differ."""
    height, width = min(a_BCHW.shape[2], b_BCHW.shape[2]), min(a_BCHW.shape[3], b_BCHW.shape[3])
    return average_pooled(a_BCHW, height, width), average_pooled(b_BCHW, height, width)


def average_pooled(map_BCHW: Tensor, height: int, width: int) -> Tensor:
    """`adaptive_avg_pool2d` to a size that is no larger. Where it divides the map's, plain pooling: its gradient on a GPU is
    the same in every run, which that of the adaptive one is not."""
    (rows, rest_rows), (columns, rest_columns) = divmod(map_BCHW.shape[2], height), divmod(map_BCHW.shape[3], width)
    if rest_rows or rest_columns:
        return functional.adaptive_avg_pool2d(map_BCHW, (height, width))
    return map_BCHW if rows == columns == 1 else functional.avg_pool2d(map_BCHW, (rows, columns))


def paired_maps(method: str, context: BuildContext, *, at_least: int = 1) -> list[tuple[Shape, Shape]]:
    """The shapes of the student's and the teacher's maps, paired by position; `at_least` pairs or more.

    Raises ExperimentError: there are fewer, one model has more than the other, or a tap is something else than a map.
    """
    assert context.teacher is not None
    student, teacher = context.student.shapes, context.teacher.shapes
    options = f"distill.options.{method}"
    for model, shapes in (("student", student), ("teacher", teacher)):
        for number, shape in enumerate(shapes, 1):
            if len(shape) != 3:
                raise ExperimentError(
                    f"{options}.{model}_taps: {method} reads maps (C, H, W), tap {number} of the {model} has {shape}: "
                    "name a stage or a convolution (`distill taps MODEL` lists them)"
                )
    if len(student) != len(teacher):
        raise ExperimentError(
            f"{options}: the student has {len(student)} maps, the teacher {len(teacher)}, and {method} pairs them by position: "
            "name as many student_taps as teacher_taps"
        )
    if len(student) < at_least:
        raise ExperimentError(
            f"{options}: {method} reads {at_least} maps or more, not {len(student)}: name more student_taps and teacher_taps"
        )
    return list(zip(student, teacher, strict=True))


def equal_channels(method: str, pairs: Sequence[tuple[Shape, Shape]]) -> None:
    """Refuse pairs of maps with different numbers of channels. Raises ExperimentError."""
    for student, teacher in pairs:
        if student[0] != teacher[0]:
            raise ExperimentError(
                f"distill.method: {method} compares maps with equally many channels, not {student[0]} of the student with "
                f"{teacher[0]} of the teacher: name other taps, or choose a method with a regressor, such as fitnet"
            )


def body_parameters(student: nn.Module) -> list[nn.Parameter]:
    """All trainable parameters of a model except those of its final linear layer, which no loss on maps changes."""
    last = {id(parameter) for parameter in classifier(student).parameters()}
    return [parameter for parameter in student.parameters() if parameter.requires_grad and id(parameter) not in last]


def connector(inputs: int, outputs: int, group: Group) -> nn.Sequential:
    """1×1 convolution and batch norm, its first weights drawn as by the authors of OFD and SRRL."""
    convolution = nn.Conv2d(inputs, outputs, 1, bias=False)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / outputs))
    return nn.Sequential(convolution, GlobalBatchNorm2d(outputs, group))


class ConvReg(nn.Module):
    """Convolution, batch norm and ReLU that turn a student's map into the shape of the teacher's.

    The convolution is RepDistiller's: for twice the height and width 3 × 3 with stride 2, for half of them a transposed 4 × 4
    with stride 2, otherwise one without padding that leaves the teacher's size. Romero et al. 2015 (FitNets, section 2.2) use
    the last kind only.
    """

    def __init__(self, student: Shape, teacher: Shape, group: Group, *, relu: bool = True) -> None:
        """`relu=False` leaves the ReLU out, for maps from before an activation.

        Raises ExperimentError: the student's map is the smaller one, and not by half.
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
        """(B, C, H, W) in the teacher's shape."""
        regressed_BCHW: Tensor = self.activation(self.norm(self.conv(student_BCHW)))
        return regressed_BCHW
