"""Read what weights record about their training: image preprocessing and classes."""

from trainables.config.models import HUB_SCHEMES
from trainables.models.checkpoint_header import CheckpointHeader, is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.libraries import LIBRARIES
from trainables.models.libraries.interface import TrainedInput
from trainables.models.names import check_model_name

__all__ = ["TrainedInput", "header_record", "trained_input"]


def trained_input(name: str, weights: str) -> TrainedInput | None:
    """Return the record of a model's weights without loading tensors; None if there is none.

    For a Hugging Face Hub repository only its config.json is downloaded.

    Raises:
        CheckpointError: see `locate_checkpoint` and `read_checkpoint_header`.
        ModelError: the model or published weights do not exist, or the download failed.
    """
    found, path = check_model_name(name), locate_checkpoint(weights)
    header = read_checkpoint_header(path) if path is not None and is_safetensors(path) else None
    if header is not None:
        return header_record(header) if found.is_built_as(check_model_name(header.model)) else None
    library = LIBRARIES[found.library]
    if weights.startswith(HUB_SCHEMES) and not library.has_hub:  # loading raises the error
        return None
    return library.input(found.name, weights if path is None else str(path))


def header_record(header: CheckpointHeader) -> TrainedInput:
    """Return the record of a checkpoint of ours; mean and std are () in older ones."""
    return TrainedInput(
        header.image_size,
        header.mean,
        header.std,
        header.num_classes,
        interpolation=header.interpolation,
        categories=header.classes,
    )
