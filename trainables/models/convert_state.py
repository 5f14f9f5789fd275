"""Convert weights with other names or for another image size by the model's library, and explain why weights do not fit.

torchvision resamples a ViT's position table. timm has a filter for most of its models, which resamples tables and renames the
tensors of the original publications, and it reads .npz files.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from trainables.errors import CheckpointError, ModelError, OtherClassesError, first_line, first_three
from trainables.models.foreign_files import CONVERT, foreign_names
from trainables.models.libraries import library_of_class
from trainables.models.registry import USUAL_SIZES, construct
from trainables.models.state_match import Match, compare, expected_tensors, is_read
from trainables.notices import notice

TRAINED_WITH_CLASSES = "choose weights that were trained with a classifier on this data"


def converted(model: nn.Module, match: Match, image_size: int) -> tuple[dict[str, Tensor], str]:
    """Convert a state by the library of `model`. Returns it with a description of the changes, or empty if it still does not
    fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the library's own resampling
            library = library_of_class(model)
            state = dict(library.convert(model, dict(match.state), image_size))
    except Exception:  # the library's code on arbitrary tensors: the mismatch message explains more
        return {}, ""
    state = {name: tensor for name, tensor in state.items() if is_read(name)}
    if any(compare(state, expected_tensors(model))):
        return {}, ""
    resampled = [
        f"{name} {tuple(match.state[name].shape)} → {tuple(state[name].shape)}"
        for name in state
        if name in match.state and match.state[name].shape != state[name].shape
    ]
    renamed, dropped = len(set(state) - set(match.state)), len(set(match.state) - set(state))
    changes = [f"resampled {first_three(resampled)}"] if resampled else []
    changes += [f"{'renamed' if renamed else 'left out'} {dropped} tensors"] if dropped else []
    return state, f"{library.name} {', '.join(changes) or 'reshaped tensors'}, for images of {image_size}×{image_size}"


def load_npz(model: nn.Module, path: Path, name: str, num_classes: int) -> None:
    """Load a .npz file into a timm model.

    Raises CheckpointError: timm does not support that, or tensors are missing, for example a head for these classes.
    """
    load_pretrained = getattr(model, "load_pretrained", None)
    if load_pretrained is None:
        raise CheckpointError(f"{path} is an .npz file, which timm converts for ViTs and ResNetV2s, not for {name}: {CONVERT}")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
    try:
        load_pretrained(str(path))
    except Exception as error:  # the library's code on arbitrary arrays
        raise CheckpointError(
            f"{path} is an .npz file that timm cannot convert for {name} ({first_line(error)}): choose another file"
        ) from None
    left = [key for key, tensor in model.state_dict().items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if left:
        fact = f"{path} has no values of these shapes for {first_three(left)} of {name}, or none for {num_classes} classes"
        raise OtherClassesError.of(fact, TRAINED_WITH_CLASSES, 0)
    notice(f"weights {path}: converted by timm for {name}")


def mismatch(match: Match, model: nn.Module, path: Path, name: str, num_classes: int, image_size: int) -> CheckpointError:
    """Return the error that explains in one line what does not fit, and the remedy."""
    if (count := _other_num_classes(match, model, name, image_size)) is not None:
        if count:
            fact = f"{path} has {count} classes and the data has {num_classes}"
        else:
            extra = f"; the file also has {first_three(match.outside)}" if match.outside else ""
            fact = f"{path} has {name} without its classifier{_where(match)}: it lacks {first_three(match.missing)}{extra}"
        return OtherClassesError.of(fact, TRAINED_WITH_CLASSES, count)
    expected, state, misshapen = expected_tensors(model), match.state, match.misshapen
    named = not match.missing and not match.unexpected
    if named and (size := _fitting_size(name, state, num_classes)):
        return CheckpointError(
            f"{path} fits {name} for images of {size}×{size} (see {misshapen[0]}): set teacher.image_size to {size}"
        )
    if not named and (foreign := foreign_names(match.unexpected)):
        return CheckpointError(f"{path} does not fit {name}: it is {foreign}")
    shapes = [f"{key} {tuple(state[key].shape)} for {tuple(expected[key].shape)}" for key in misshapen]
    parts = (("lacks", match.missing), ("has unknown", match.unexpected), ("has other shapes:", shapes))
    differences = "; ".join(f"{verb} {first_three(keys)}" for verb, keys in parts if keys)
    return CheckpointError(
        f"{path} does not fit {name}: it{_where(match)} {differences}; write the model that it was saved from, or another file"
    )


def _fitting_size(name: str, state: Mapping[str, Tensor], num_classes: int) -> int | None:
    """Return the common image size for which the model has the shapes of `state`, or None."""
    for size in USUAL_SIZES:
        try:
            with torch.device("meta"):
                model = construct(name, num_classes=num_classes, image_size=size, seed=0)
        except (ModelError, NotImplementedError):
            continue
        if not any(compare(state, expected_tensors(model))):
            return size
    return None


def _where(match: Match) -> str:
    """Describe the match's place in its file, as part of a message."""
    return f" under {match.prefix!r}" * bool(match.prefix) + f" in {match.candidate.path}" * bool(match.candidate.path)


def _other_num_classes(match: Match, model: nn.Module, name: str, image_size: int) -> int | None:
    """Return the number of classes (0 without a classifier) of a file that fits except for its classifier, otherwise None."""
    try:
        bare = construct(name, num_classes=0, image_size=image_size, seed=0)
    except ModelError:
        return None
    heads = expected_tensors(model).keys() - expected_tensors(bare).keys()
    body = {key: tensor for key, tensor in match.state.items() if key not in heads}
    if any(compare(body, expected_tensors(bare))) and not converted(bare, replace(match, state=body), image_size)[1]:
        return None
    return max((len(match.state[key]) for key in heads & match.state.keys()), default=0)
