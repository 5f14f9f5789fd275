"""Building blocks of methods that imitate a teacher's image embedding and map: options, shapes, and resizing of maps.

Shapes: B batch, D features, H W positions of a map before it is resized, P Q after.
"""

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext
from trainables.methods.features import Shape, check_taps
from trainables.notices import notice

DIMENSIONS = {"embedding": "(D,)", "map": "(D, H, W)"}
"""Imitated feature, by the name of its term and tap → its dimensions for an image."""


class ImitationOptions(MethodOptions):
    """A weight for each term; a feature of weight 0 is not read and has no module."""

    embedding: NonNegative = Field(1.0, description="weight of the images' embeddings; 0: they are not read")
    map: NonNegative = Field(1.0, description="weight of the maps; 0: they are not read")

    @model_validator(mode="before")
    @classmethod
    def _tap_what_counts(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        read = [name for name in DIMENSIONS if values.get(name, 1.0) != 0]
        if not read:
            raise ValueError("embedding and map are both 0, which teaches nothing: set one above 0")
        taps = {side: values.get(side) or read for side in ("student_taps", "teacher_taps")}
        return values if len(read) == len(DIMENSIONS) else {**values, **taps}

    @property
    def imitated(self) -> list[str]:
        """The terms with a nonzero weight."""
        return [name for name in DIMENSIONS if getattr(self, name)]


def imitated_shapes(method: str, options: ImitationOptions, context: BuildContext) -> dict[str, tuple[Shape, Shape]]:
    """Return for each term the shapes of the student's and the teacher's feature, (D,) or (D, H, W), in tap order.

    Raises ExperimentError: the taps do not match the terms.
    """
    assert context.teacher is not None
    wanted = [1 if name == "embedding" else 3 for name in options.imitated]
    reads = " and ".join(f"{name} {DIMENSIONS[name]}" for name in options.imitated)
    instead = "name such taps, or set the weight of the other to 0"
    check_taps(method, context, lambda shapes: [len(shape) for shape in shapes] == wanted, reads, instead)
    found = dict(zip(options.imitated, zip(context.student.shapes, context.teacher.shapes, strict=True), strict=True))
    widths = ", ".join(f"{name} {student[0]} → {teacher[0]}" for name, (student, teacher) in found.items())
    notice(f"distill.method: {method} projects the student's features to the teacher's: {widths}")
    return found


def channels_last(feature: Tensor) -> Tensor:
    """Return (B, D) unchanged, and (B, D, H, W) as (B, H, W, D)."""
    return feature.movedim(1, -1)


class Resize(nn.Module):
    """Bilinear interpolation of maps as matrix products, so that its gradient on a GPU is deterministic."""

    rows_PH: Tensor
    columns_QW: Tensor

    def __init__(self, source: Shape, target: Shape) -> None:
        super().__init__()
        for name, size, new in (("rows_PH", source[1], target[1]), ("columns_QW", source[2], target[2])):
            one_hot = torch.eye(size, dtype=torch.float64)[None]
            weights = functional.interpolate(one_hot, new, mode="linear", align_corners=False)[0].T
            self.register_buffer(name, weights, persistent=False)

    def forward(self, map_BHWD: Tensor) -> Tensor:
        """(B, P, Q, D)."""
        map_BPWD = torch.einsum("ph,bhwd->bpwd", self.rows_PH, map_BHWD)
        return torch.einsum("qw,bpwd->bpqd", self.columns_QW, map_BPWD)


def resizes(
    method: str, shapes: tuple[Shape, Shape], resize: Literal["larger", "student", "teacher"]
) -> tuple[nn.Module, nn.Module]:
    """Return modules that bring maps of the two `shapes`, student and teacher, to one size, by resizing at most one of them."""
    (_, *student), (_, *teacher) = shapes
    if student == teacher:
        return nn.Identity(), nn.Identity()
    larger = "student" if student[0] * student[1] > teacher[0] * teacher[1] else "teacher"
    resized = larger if resize == "larger" else resize
    notice(
        f"distill.method: {method} compares the student's {student[0]}×{student[1]} map with the teacher's"
        f" {teacher[0]}×{teacher[1]}: it resizes the {resized}'s"
    )
    if resized == "student":
        return Resize(*shapes), nn.Identity()
    return nn.Identity(), Resize(shapes[1], shapes[0])
