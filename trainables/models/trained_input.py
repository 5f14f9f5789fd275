"""Whether images are those that a teacher was trained with, as far as its weights come with a record of them."""

import math
from collections.abc import Sequence

from trainables.config import DataConfig
from trainables.config.models import HUB_SCHEMES
from trainables.errors import CheckpointError
from trainables.models.checkpoint_header import CheckpointHeader, is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.libraries import LIBRARIES
from trainables.models.libraries.interface import TrainedInput
from trainables.models.names import check_model_name
from trainables.notices import notice

__all__ = ["TrainedInput", "check_trained_input", "trained_input"]

TOLERANCE = 1e-3
"""Largest difference of a mean or standard deviation: they are published with three digits."""


def trained_input(name: str, weights: str) -> TrainedInput | None:
    """The record of a model's weights, without their tensors; None where there is none.

    Of a repository of the Hugging Face Hub its config.json is downloaded, and nothing else.

    Raises:
        CheckpointError: see `locate_checkpoint` and `read_checkpoint_header`.
        ModelError: no such model or published weights, or a failed download.
    """
    found, path = check_model_name(name), locate_checkpoint(weights)
    header = read_checkpoint_header(path) if path is not None and is_safetensors(path) else None
    if header is not None:
        return record_of(header) if header.mean and check_model_name(header.model) == found else None
    library = LIBRARIES[found.library]
    if weights.startswith(HUB_SCHEMES) and not library.has_hub:  # which is refused where they are loaded
        return None
    return library.input(found.name, weights if path is None else str(path))


def record_of(header: CheckpointHeader) -> TrainedInput:
    """The record of a checkpoint of ours; mean and deviation are () in older ones."""
    return TrainedInput(header.image_size, header.mean, header.std, header.num_classes, categories=header.classes)


def check_trained_input(name: str, weights: str, data: DataConfig, classes: Sequence[str]) -> None:
    """Refuse data that is normalised otherwise than a teacher's; notice another image size.

    Raises CheckpointError: with what to write; and as `trained_input`.
    """
    trained = trained_input(name, weights)
    if trained is None:
        return
    expected, given = (*trained.mean, *trained.std), (*data.mean, *data.std)
    if not all(math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(expected, given, strict=True)):
        raise CheckpointError(
            f"{weights} of {name} was trained on images of mean {_listed(trained.mean)} and standard deviation "
            f"{_listed(trained.std)}, and data.mean is {_listed(data.mean)}, data.std {_listed(data.std)}: "
            f"set data.mean: {_listed(trained.mean)} and data.std: {_listed(trained.std)}"
        )
    if trained.image_size != data.image_size:
        notice(
            f"teacher {name}: {weights} is for images of {trained.image_size} pixels, and data.image_size is {data.image_size}"
        )


def _listed(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"
