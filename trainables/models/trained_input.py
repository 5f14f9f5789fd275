"""Whether images and classes are those that a teacher was trained with, as far as its weights come with a record of them."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainables.config.models import HUB_SCHEMES
from trainables.errors import CheckpointError
from trainables.models.checkpoint_header import is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.names import ModelName, check_model_name
from trainables.models.published import check_known, timm_name, timm_record
from trainables.models.registry import timm_folder_of

_WORDNET_ID = re.compile(r"n\d{8}")
_NUMBERED = re.compile(r"\D*(\d+)")


class TrainedInput(NamedTuple):
    """The record that weights come with: how images were prepared, as keys of `data`, and the classes."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    val_resize: int | None = None
    interpolation: str = "bilinear"
    """PyTorch's name of the filter with which they were resized: bilinear, bicubic, nearest …."""
    categories: tuple[str, ...] = ()
    """Published names of the classes in label order; () where there are none."""


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
        if not header.mean or check_model_name(header.model) != found:
            return None
        return TrainedInput(header.image_size, header.mean, header.std, header.num_classes)
    if path is not None:
        folder = timm_folder_of(path) if found.library == "timm" else None
        return _timm(found, folder) if folder else None
    if found.library == "timm":
        return _timm(found, weights)
    if found.library == "torchvision" and not weights.startswith(HUB_SCHEMES):  # which are refused where they are loaded
        return _torchvision(found, weights)
    return None


def _torchvision(found: ModelName, weights: str) -> TrainedInput:
    from torchvision.models import get_model_weights

    known = get_model_weights(found.name).__members__
    check_known(found.name, weights, list(known))
    images, categories = known[weights].transforms(), tuple(known[weights].meta["categories"] or ())
    (size,), (resize,) = images.crop_size, images.resize_size
    return TrainedInput(
        size, tuple(images.mean), tuple(images.std), len(categories), resize, images.interpolation.value, categories
    )


def _timm(found: ModelName, weights: str) -> TrainedInput:
    record = timm_record(timm_name(found, weights))
    size, num_classes = record["input_size"][-1], record["num_classes"]
    resize, categories = math.floor(size / record["crop_pct"]), _imagenet() if num_classes == 1000 else ()
    return TrainedInput(
        size, tuple(record["mean"]), tuple(record["std"]), num_classes, resize, record["interpolation"], categories
    )


def check_trained_classes(name: str, weights: str, classes: Sequence[str]) -> None:
    """Refuse data whose classes are ordered otherwise than a teacher's. Raises CheckpointError; and as `trained_input`."""
    trained = trained_input(name, weights)
    if trained is not None and trained.num_classes == len(classes):  # else it is refused where they are loaded
        check_class_order(name, weights, trained.categories, classes)


def check_class_order(name: str, weights: str, categories: Sequence[str], classes: Sequence[str]) -> None:
    """Refuse WordNet ids, names or numbers of as many published classes in another order; other names are not compared.

    Raises CheckpointError: with the first class that differs.
    """
    if len(categories) != len(classes):
        return
    numbers = {name: int(match[1]) for name in classes if (match := _NUMBERED.fullmatch(name))}
    if numbers and {*numbers.values()} == {*range(first := min(numbers.values()), first + len(classes))}:
        expected, found = sorted(classes, key=numbers.__getitem__), list(classes)  # not as text, which has 10 before 2
    elif all(map(_WORDNET_ID.fullmatch, classes)):
        expected, found = sorted(classes), list(classes)  # ImageNet's labels are in the order of their ids
    else:
        expected, found = ([each.lower().replace("_", " ") for each in names] for names in (categories, classes))
        if len({*found} & {*expected}) < len(expected) / 2:
            return
    known = {*expected}
    for label, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if ours != theirs and ours in known:
            raise CheckpointError(
                f"{weights} of {name} was trained on these classes in another order: its class {label} is {theirs!r}, the data's "
                f"is {ours!r}; bring them into that order, as folders named by WordNet ids (n01440764, …), or by numbers of one "
                "length (0002, …), have it"
            )


def _imagenet() -> tuple[str, ...]:
    """The names of ImageNet's 1000 classes, as torchvision has them; timm's weights come without."""
    from torchvision.models import ResNet18_Weights

    return tuple(ResNet18_Weights.DEFAULT.meta["categories"])
