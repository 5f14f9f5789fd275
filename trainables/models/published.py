"""Models with the weights that torchvision and timm publish."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainables.errors import ModelError, did_you_mean, first_line
from trainables.models.names import ModelName
from trainables.models.registry import library_options


def published_model(found: ModelName, weights: str, num_classes: int, image_size: int) -> nn.Module:
    """The model with its published `weights`, from the library's cache or downloaded.

    Raises ModelError: no such weights, weights for another number of classes, a failed download, or images of a wrong size.
    """
    if found.library == "torchvision":
        return _torchvision(found, weights, num_classes, image_size)
    if found.library == "timm":
        return _timm(found, weights, num_classes, image_size)
    raise ModelError(
        f"there are no published weights {weights!r} of {found.name}, a model of ours: give the path of a checkpoint of it"
    )


def _torchvision(found: ModelName, weights: str, num_classes: int, image_size: int) -> nn.Module:
    import torchvision

    known = torchvision.models.get_model_weights(found.name).__members__
    _check_known(found.name, weights, list(known))
    published = known[weights]
    _check_classes(found.name, weights, len(published.meta["categories"]), num_classes)
    options = library_options(found, image_size)
    # torchvision builds it, since some of its models rename old parameters or scale their input for these weights.
    try:
        model: nn.Module = torchvision.models.get_model(found.name, weights=published, progress=False, **options)
    except ValueError as error:
        raise ModelError(
            f"weights {weights} of {found.name} do not take images of {image_size}×{image_size} ({first_line(error)}):"
            f" set data.image_size to {published.meta['min_size'][0]}"
        ) from None
    except Exception as error:  # any way in which the network, a proxy or the disk can fail
        raise ModelError(
            f"weights {weights} of {found.name} could not be loaded from {published.url} ({first_line(error)}):"
            f" put that file into {Path(torch.hub.get_dir()) / 'checkpoints'}"
        ) from None
    return model


def _timm(found: ModelName, weights: str, num_classes: int, image_size: int) -> nn.Module:
    import timm

    name = f"timm/{found.name}"
    tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{found.name}.*")]
    _check_known(name, weights, tags, *(["DEFAULT"] if tags else []))
    full_name = found.name if weights == "DEFAULT" else f"{found.name}.{weights}"
    config = timm.get_pretrained_cfg(full_name)
    _check_classes(name, weights, config.num_classes, num_classes)
    options = library_options(found, image_size)
    try:
        model: nn.Module = timm.create_model(full_name, pretrained=True, num_classes=num_classes, **options)
    except Exception as error:  # any way in which the network, the hub's client or the disk can fail
        raise ModelError(
            f"weights {weights} of {name} could not be loaded from {config.hf_hub_id or config.url} ({first_line(error)}):"
            " fetch them where there is a network and give the file's path as the weights"
        ) from None
    return model


def _check_known(name: str, weights: str, known: Sequence[str], *others: str) -> None:
    """Refuse weights that are neither `known`, which a message may list, nor one of the `others`."""
    if weights not in (*known, *others):
        there_are = f"there are: {', '.join(known) if known else 'none'}; or give a file's path"
        raise ModelError(f"{name} has no weights {weights!r}; {did_you_mean(weights, known, there_are)}")


def _check_classes(name: str, weights: str, of_weights: int, of_data: int) -> None:
    if of_weights != of_data:
        raise ModelError(
            f"weights {weights} of {name} have {of_weights} classes and the data has {of_data}:"
            " set teacher.weights to null, so that the teacher is trained first, or give a checkpoint trained on this data"
        )
