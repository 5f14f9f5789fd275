"""The exported student: a checkpoint's model with its metadata, and the network for traced formats.

Shapes: B batch, C=3 channels, H W pixels, K classes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainables.config.data import DataConfig
from trainables.engine.checkpoint import read_metadata
from trainables.errors import CheckpointError, ModelError
from trainables.models.checkpoint_header import is_safetensors, read_checkpoint_header
from trainables.models.forward import logits_and_aux
from trainables.models.libraries import LIBRARIES
from trainables.models.model_input import ModelInput
from trainables.models.names import ModelName, check_model_name
from trainables.models.taps import Taps
from trainables.models.weights import load_teacher
from trainables.notices import notice
from trainables.user_code import file_of, option_key


@dataclass(frozen=True)
class Student:
    """A model on the CPU in float32 and eval mode, without its input's normalization."""

    module: nn.Module
    model: str
    """The model's name, as in an experiment."""
    input: ModelInput
    val_resize: int | None
    """See `data.val_resize`."""
    classes: tuple[str, ...]
    """In label order; () for a model without a classifier, which returns features."""

    @property
    def name(self) -> ModelName:
        return check_model_name(self.model)

    def constructor(self) -> list[str]:
        """Return lines of Python that build `model`. Raises ModelError: see `Library.constructor`."""
        rescaling = {"transform_input": True} if getattr(self.module, "transform_input", False) else {}
        kwargs = {**self.name.kwargs, **rescaling}
        return LIBRARIES[self.name.library].constructor(self.name.name, len(self.classes), self.input.image_size, kwargs)

    def description(self) -> dict[str, Any]:
        """Return model, classes and preprocessing as JSON values."""
        return {
            "model": self.model,
            "output": "logits" if self.classes else "features",
            "classes": list(self.classes),
            "image_size": self.input.image_size,
            "val_resize": self.val_resize,
            "interpolation": self.input.interpolation,
            "mean": list(self.input.mean),
            "std": list(self.input.std),
        }


class Network(nn.Module):
    """Maps images_BCHW, normalized float32 or with `preprocess` uint8, to logits (B, K) or features."""

    def __init__(self, student: Student, *, preprocess: bool) -> None:
        super().__init__()
        self.model = student.module
        self.preprocess = preprocess
        mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1) for values in (student.input.mean, student.input.std))
        self.mean_C11, self.std_C11 = nn.Buffer(mean_C11), nn.Buffer(std_C11)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.preprocess:
            images_BCHW = (images_BCHW.to(torch.float32) / 255 - self.mean_C11) / self.std_C11
        return logits_and_aux(self.model(images_BCHW))[0]


def read_student(checkpoint: Path) -> Student:
    """Load the model of a checkpoint of ours. Raises CheckpointError: it cannot be read, or does not describe its model."""
    header = read_checkpoint_header(checkpoint) if is_safetensors(checkpoint) else None
    if header is None or not header.mean:
        raise CheckpointError(f"{checkpoint} does not describe its model: give a run, or a checkpoint that `distill train` wrote")
    if (file := file_of(header.model)) is not None:
        notice(f"{checkpoint} is a {option_key(header.model)} of {file}, which is run now")
    classes = header.classes if header.num_classes else ()
    fit: dict[str, Any] = {"image_size": header.image_size, "classes": classes, "seed": 0, "logits": bool(classes)}
    resize = read_metadata(checkpoint).get("val_resize")
    seen = ModelInput(header.image_size, header.mean, header.std, header.interpolation)
    return Student(load_teacher(header.model, str(checkpoint), **fit).float(), header.model, seen, resize, classes)


def note_layers_behind_embedding(student: Student) -> None:
    """Raise a notice if a backbone has layers after its tap `embedding`, which distillation does not train."""
    with contextlib.suppress(ModelError), torch.no_grad():  # a user's model may declare no such tap
        taps = Taps(student.module, ["embedding"], name=student.model, image_size=student.input.image_size)
        with taps.capture():
            output_BD = student.module(torch.ones(2, 3, student.input.image_size, student.input.image_size))
            (embedding_BD,) = taps.pop()
        if output_BD.shape != embedding_BD.shape or not torch.allclose(output_BD, embedding_BD):
            notice(
                f"{student.model} has layers after its tap `embedding` that distillation did not train, but its output uses them"
            )


def data_of(student: Student, data: DataConfig) -> DataConfig:
    """Return `data` changed to read validation images with the student's preprocessing."""
    seen, elsewhere = student.input, {"more": (), "stage": "none", "decoder": "auto", "loader_workers": 1}
    own = {"image_size": seen.image_size, "val_resize": student.val_resize, "mean": seen.mean, "std": seen.std}
    return data.model_copy(update=elsewhere | own)
