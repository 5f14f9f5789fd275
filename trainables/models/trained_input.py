"""Whether images and classes are those that a teacher was trained with, as far as its weights come with a record of them."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainables.config import DataConfig
from trainables.errors import CheckpointError
from trainables.models.checkpoint_header import locate_checkpoint, read_checkpoint_header
from trainables.models.names import check_model_name
from trainables.notices import notice

TOLERANCE = 1e-3
"""Of mean and standard deviation, which are published with three digits."""
_WORDNET_ID = re.compile(r"n\d{8}")
_NUMBERED = re.compile(r"\D*(\d+)")


class TrainedInput(NamedTuple):
    """The record that weights come with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    num_classes: int
    categories: tuple[str, ...] = ()
    """Published names of the classes in label order; () where there are none."""


def trained_input(name: str, weights: str) -> TrainedInput | None:
    """The record of a model's weights, without their tensors and without a download; None where there is none.

    Raises:
        CheckpointError: see `locate_checkpoint` and `read_checkpoint_header`.
        ModelError: no such model.
    """
    found, path = check_model_name(name), locate_checkpoint(weights)
    if path is not None:
        header = read_checkpoint_header(path) if path.suffix == ".safetensors" else None
        if header is None or not header.mean or check_model_name(header.model) != found:
            return None
        return TrainedInput(header.mean, header.std, header.image_size, header.num_classes)
    if found.library == "torchvision":
        from torchvision.models import get_model_weights

        published = get_model_weights(found.name).__members__.get(weights)
        if published is None:  # refused where they are loaded
            return None
        preset = published.transforms()
        categories = tuple(published.meta["categories"] or ())
        return TrainedInput(tuple(preset.mean), tuple(preset.std), preset.crop_size[0], len(categories), categories)
    if found.library == "timm":
        from timm import get_pretrained_cfg, list_pretrained

        full_name = found.name if weights == "DEFAULT" else f"{found.name}.{weights}"
        if weights != "DEFAULT" and full_name not in list_pretrained(f"{found.name}.*"):
            return None
        config = get_pretrained_cfg(full_name)
        categories = _imagenet() if config.num_classes == 1000 else ()
        return TrainedInput(config.mean, config.std, config.input_size[-1], config.num_classes, categories)
    return None


def check_trained_input(name: str, weights: str, data: DataConfig, classes: Sequence[str]) -> None:
    """Refuse data that is normalised, or whose classes are ordered, otherwise than a teacher's; notice another image size.

    Raises CheckpointError: with what to write; and as `trained_input`.
    """
    trained = trained_input(name, weights)
    if trained is None or trained.num_classes != len(classes):  # which is refused where they are loaded
        return
    _check_order(name, weights, trained.categories, classes)
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


def _check_order(name: str, weights: str, categories: Sequence[str], classes: Sequence[str]) -> None:
    """Refuse WordNet ids, names or numbers of as many published classes in another order; other names are not compared."""
    if not categories:
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


def _listed(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"
