"""Build models by name, with a head of the right size, initialized as a function of name and seed only.

Importing this module does not import torch, so that the driver can check names quickly (`check_model_name`).

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainables.errors import ModelError, first_line
from trainables.models.forward import dry_forward, logits_and_aux, seeded
from trainables.models.libraries import LIBRARIES
from trainables.models.names import check_model_name
from trainables.user_code import file_of, model_parts

if TYPE_CHECKING:
    from torch import nn

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""Exceptions that a forward pass may raise."""
USUAL_SIZES = (8, 16, 32, 64, 75, 96, 128, 160, 192, 224, 256, 299, 384, 448, 512)


def build_model(name: str, *, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """Build a freshly initialized model on the CPU in float32 that can be trained on (B, 3, image_size, image_size).

    Initial parameters are a pure function of (name, num_classes, seed), and of image_size if the architecture depends on it;
    torch's generators stay unchanged. Raises ModelError: there is no such model, or it does not accept this image size.
    """
    model = construct(name, num_classes=num_classes, image_size=image_size, seed=seed)
    check_forward(model, image_size, num_classes, name=name, training=True)
    return model


def construct(name: str, *, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """Build a model as `build_model` does, but without checking its forward pass."""
    found = check_model_name(name)
    if len(model_parts(name)) > 1:
        from trainables.models.reused_classifier import build_reused

        part = partial(construct, num_classes=num_classes, image_size=image_size, seed=seed)
        return build_reused(name, part, image_size=image_size, seed=seed)
    with seeded(f"{'/'.join(found.key)}:{num_classes}:{seed}"):
        try:
            return LIBRARIES[found.library].create(found.name, num_classes, image_size, found.kwargs)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, TypeError) and found.arguments:
                problem = f"its constructor does not accept these arguments ({first_line(error)})"
                raise ModelError(f"model {name}: {problem}: correct student.args or teacher.args") from error
            message = f"model {name} cannot be built for images of {image_size}×{image_size} ({first_line(error)})"
            instead = "set data.image_size, or the teacher's image_size, to a size it accepts, often 224, or choose another model"
            raise ModelError(f"{message}: {instead}") from error


def check_forward(
    model: nn.Module, image_size: int, num_classes: int, *, name: str = "", training: bool = False, instead: str | None = None
) -> None:
    """Check that a model maps (2, 3, image_size, image_size) to (2, num_classes), or for 0 classes to (2, D); with `training`
    also in training mode.

    Takes a fraction of a second for any model. Parameters, batch statistics and generators stay unchanged.

    Raises ModelError: with the remedy `instead`, or with the nearest common size that works.
    """
    named = f"model {name or type(model).__name__}"
    modes = (False, True) if training else (False,)
    for mode in modes:
        try:
            shape = _output_shape(model, image_size, mode)
        except FAILURES as error:
            does = "cannot be trained on" if mode else "does not accept"
            sizes = sorted(USUAL_SIZES, key=lambda size: (abs(size - image_size), size))
            problem = f"{named} {does} images of {image_size}×{image_size}"
            if file_of(name):
                raise ModelError(f"{problem} ({type(error).__name__}: {first_line(error)}): correct its code") from error
            if instead is not None:
                raise ModelError(f"{problem} ({first_line(error)}): {instead}") from error
            fits = next((size for size in sizes if size != image_size and _takes(model, size, modes)), None)
            key = "data.image_size" if training else "data.image_size, or the teacher's image_size,"
            instead = f"set {key} to {fits}, or choose another model" if fits else "choose another model"
            raise ModelError(f"{problem} ({first_line(error)}): {instead}") from error
        if shape != (2, num_classes or max(1, *shape[-1:])):
            returns = f"returns shape {shape} for a batch of 2, not (2, {num_classes or 'features'})"
            instead = f"correct it for num_classes={num_classes}" if file_of(name) else "choose another model"
            raise ModelError(f"{named} {returns}; {instead}")


def _output_shape(model: nn.Module, image_size: int, training: bool) -> tuple[int, ...]:
    return tuple(logits_and_aux(dry_forward(model, image_size, training=training))[0].shape)


def _takes(model: nn.Module, image_size: int, modes: Sequence[bool]) -> bool:
    try:
        for training in modes:
            _output_shape(model, image_size, training)
    except FAILURES:
        return False
    return True
