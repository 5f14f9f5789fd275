"""A model's input format: image size, normalization and interpolation, as its weights record it or as it is set.

This module does not import torch; `trainables.models.pixels` makes a model prepare its input.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.config import DataConfig, StudentConfig, TrainConfig, WeightedConfig
from trainables.config.models import HUB_SCHEMES
from trainables.models.checkpoint_header import is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.libraries import LIBRARIES
from trainables.models.libraries.interface import TrainedInput
from trainables.models.names import check_model_name, library_of

ANTIALIASED = ("bilinear", "bicubic")


@dataclass(frozen=True)
class ModelInput:
    """Images (B, 3, image_size, image_size), normalized as (pixels - mean) / std."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    """torch's mode for the antialiased resizing of crops of another size."""

    def __str__(self) -> str:
        return f"{self.image_size} px, mean {_listed(self.mean)}, std {_listed(self.std)}, {self.interpolation}"


def trained_input(name: str, weights: str) -> TrainedInput | None:
    """Return what a model's weights record about their training, without loading tensors; None if they record nothing.

    For a Hugging Face Hub repository only its config.json is downloaded.

    Raises:
        CheckpointError: see `locate_checkpoint` and `read_checkpoint_header`.
        ModelError: the model or published weights do not exist, or the download failed.
    """
    found, path = check_model_name(name), locate_checkpoint(weights)
    header = read_checkpoint_header(path) if path is not None and is_safetensors(path) else None
    if header is not None:
        return header.trained_input if found.is_built_as(check_model_name(header.model)) else None
    library = LIBRARIES[found.library]
    if weights.startswith(HUB_SCHEMES) and not library.has_hub:  # loading raises the error
        return None
    return library.input(found.name, weights if path is None else str(path))


def student_input(data: DataConfig) -> ModelInput:
    """Return the input of a model trained on these images from scratch."""
    return ModelInput(data.image_size, data.mean, data.std)


def teacher_input(teacher: WeightedConfig, data: DataConfig) -> ModelInput:
    """Return a teacher's input: from the experiment, else from its weights' record, else from the data.

    A model that accepts any size gets the data's size unless the experiment sets one. Raises as `trained_input` does.
    """
    if teacher.weights is None:  # it is trained from scratch
        return student_input(data)
    record = trained_input(teacher.model, teacher.weights)
    recorded = record or TrainedInput(data.image_size, data.mean, data.std, num_classes=0)
    library, name = library_of(teacher.model)
    size = recorded.image_size if library.has_fixed_size(name) else data.image_size
    return ModelInput(
        teacher.image_size or size,
        teacher.mean or recorded.mean or data.mean,
        teacher.std or recorded.std or data.std,
        recorded.interpolation if recorded.interpolation in ANTIALIASED else "bicubic",
    )


def trained_model_input(config: TrainConfig) -> ModelInput:
    """Return the input of the model that a job trains: that of a fine-tuned teacher, otherwise the data's."""
    return student_input(config.data) if config.finetuned is None else teacher_input(config.finetuned, config.data)


def input_warnings(model: WeightedConfig | StudentConfig, data: DataConfig, key: str = "teacher") -> list[str]:
    """Return warnings, one line each, about the input of a model with weights. `key` is its section of the experiment."""
    record, lines = trained_input(model.model, str(model.weights)), []
    if isinstance(model, StudentConfig):
        name, seen, keys, is_written = f"student {model.model}", student_input(data), "data", False
    else:
        name, seen, keys, is_written = f"teacher {model.model}", teacher_input(model, data), key, model.mean is not None
    normalized = f"mean {_listed(seen.mean)} and std {_listed(seen.std)}"
    if not is_written and not (record and record.mean):
        lines.append(
            f"{name}: {model.weights} does not record its normalization: it gets {normalized}; if that is wrong, set "
            f"{keys}.mean and {keys}.std"
        )
    if record is not None and record.mean and (record.mean, record.std) != (seen.mean, seen.std):
        lines.append(
            f"{name} was trained with mean {_listed(record.mean)} and std {_listed(record.std)}, but gets {normalized}: if that "
            f"is wrong, leave out {keys}.mean and {keys}.std"
        )
    if seen.image_size > data.image_size:
        lines.append(
            f"{name} gets crops of {data.image_size} px enlarged to {seen.image_size}: a larger data.image_size has more detail"
        )
    if record is not None and record.image_size != seen.image_size:
        lines.append(
            f"{name} was trained on images of {record.image_size} px but gets {seen.image_size}: set {keys}.image_size to "
            f"{record.image_size} to resize them"
        )
    return lines


def _listed(values: tuple[float, ...]) -> str:
    """Format as a list, or as one number if all are equal."""
    return f"{values[0]:g}" if len({*values}) == 1 else f"[{', '.join(f'{value:g}' for value in values)}]"
