"""Models with the weights that torchvision and timm publish."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import ModelError, did_you_mean, first_line
from trainables.models.names import ModelName
from trainables.models.registry import library_options, source_config, timm_architecture
from trainables.notices import notice


def published_model(found: ModelName, weights: str, num_classes: int, image_size: int) -> nn.Module:
    """The model with its published `weights`, from the library's cache or downloaded.

    Raises ModelError: no such weights, weights for another number of classes, a failed download, or images of a wrong size.
    """
    if weights.startswith(HUB_SCHEMES) and found.library != "timm":
        raise ModelError(f"{weights} is a model of timm's: write timm/{timm_architecture(weights)} as the model")
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
    check_known(found.name, weights, list(known))
    published = known[weights]
    _check_classes(found.name, weights, len(published.meta["categories"] or ()), num_classes)
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

    name, full_name = f"timm/{found.name}", timm_name(found, weights)
    config = timm_record(full_name)
    _check_classes(name, weights, config["num_classes"], num_classes)
    options = library_options(found, image_size)
    if "img_size" in options and config["input_size"][-1] != image_size:
        size = config["input_size"][-1]
        notice(f"teacher weights {weights} of {name}: timm resamples its tables from images of {size}×{size} to {image_size}")
    try:
        model: nn.Module = timm.create_model(full_name, pretrained=True, num_classes=num_classes, **options)
    except Exception as error:  # any way in which the network, the hub's client or the disk can fail
        source = config.get("hf_hub_id") or config.get("url") or weights
        raise ModelError(
            f"weights {weights} of {name} could not be loaded from {source} ({first_line(error)}):"
            " fetch them where there is a network and give the file's path as the weights"
        ) from None
    return model


def timm_name(found: ModelName, weights: str) -> str:
    """timm's name of a model with these weights. Raises ModelError: there are none of this name, or they are another model's."""
    if weights.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        if (saved := timm_architecture(weights)) != (wanted := timm_architecture(found.name)):
            raise ModelError(f"{weights} has a {saved}, not a {wanted}: write timm/{saved} as the model, or give other weights")
        return weights
    import timm

    tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{found.name}.*")]
    check_known(f"timm/{found.name}", weights, tags, *(["DEFAULT"] if tags else []))
    return found.name if weights == "DEFAULT" else f"{found.name}.{weights}"


def timm_record(full_name: str) -> dict[str, Any]:
    """timm's record of the weights of `timm_name`: num_classes, input_size, mean, std, crop_pct …."""
    import timm

    if full_name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        config = source_config(full_name)
        record = {**config.get("pretrained_cfg", config)}
        record["num_classes"] = config.get("num_classes", record.get("num_classes"))
    else:
        record = timm.get_pretrained_cfg(full_name).to_dict()
    return {**timm.models.PretrainedCfg().to_dict(), **record}


def check_known(name: str, weights: str, known: Sequence[str], *others: str) -> None:
    """Refuse weights that are neither `known`, which a message may list, nor one of the `others`."""
    if weights not in (*known, *others):
        there_are = f"there are: {', '.join(known) if known else 'none'}; or give a file's path"
        raise ModelError(f"{name} has no weights {weights!r}; {did_you_mean(weights, known, there_are)}")


def _check_classes(name: str, weights: str, of_weights: int, of_data: int) -> None:
    if not of_weights:
        raise ModelError(f"weights {weights} of {name} have no classifier: give weights that were trained with one on this data")
    if of_weights != of_data:
        raise ModelError(
            f"weights {weights} of {name} have {of_weights} classes and the data has {of_data}:"
            " set teacher.weights to null, so that the teacher is trained first, or give a checkpoint trained on this data"
        )
