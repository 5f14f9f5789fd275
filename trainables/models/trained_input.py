"""How images were prepared, and which classes there were, when weights were trained: what comes with them says so."""

from trainables.config.models import HUB_SCHEMES
from trainables.models.checkpoint_header import CheckpointHeader, is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.libraries import LIBRARIES
from trainables.models.libraries.interface import TrainedInput
from trainables.models.names import check_model_name

__all__ = ["TrainedInput", "header_record", "trained_input"]


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
        return header_record(header) if found.is_built_as(check_model_name(header.model)) else None
    library = LIBRARIES[found.library]
    if weights.startswith(HUB_SCHEMES) and not library.has_hub:  # which is refused where they are loaded
        return None
    return library.input(found.name, weights if path is None else str(path))


def header_record(header: CheckpointHeader) -> TrainedInput:
    """The record of a checkpoint of ours; mean and deviation are () in older ones."""
    return TrainedInput(
        header.image_size,
        header.mean,
        header.std,
        header.num_classes,
        interpolation=header.interpolation,
        categories=header.classes,
    )
