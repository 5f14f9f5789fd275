"""Models by name, with a head of the right size and an initialisation that its name and seed alone decide.

Importing this costs no torch, so that the driver can check a name at once (`check_model_name`).

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from trainables.errors import ModelError
from trainables.models.names import MODELS, ModelName, check_model_name

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "MODELS", "build_model", "check_forward", "check_model_name", "construct", "dry_forward", "library_options", "logits_and_aux",
    "seeded",
]  # fmt: skip

AUX_WEIGHTS = {"InceptionOutputs": 0.4, "GoogLeNetOutputs": 0.3}
"""Weight of an auxiliary head's cross-entropy: Szegedy et al. 2014 (GoogLeNet) give 0.3; Inception v3 is trained with 0.4."""

CALCULATED = 10**10
"""Parameters times pixels up to which a forward check calculates, in some 50 ms. The meta device, which only follows shapes, is
for larger models: its batch norm imports torch._dynamo, 1.4 s of a core."""

USUAL_SIZES = (8, 16, 32, 64, 75, 96, 128, 160, 192, 224, 256, 299, 384, 448, 512)


def build_model(name: str, *, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """A freshly initialised model on the CPU in float32 that takes (B, 3, image_size, image_size) and can be trained on it.

    Initial parameters are a pure function of (name, num_classes, seed), and of image_size where the architecture is; torch's
    generators are left as they were.

    Raises:
        ModelError: no such model, or it does not take images of this size, in one line.
    """
    model = construct(name, num_classes=num_classes, image_size=image_size, seed=seed)
    check_forward(model, image_size, num_classes, name=name)
    check_forward(model, image_size, num_classes, name=name, training=True)
    return model


def construct(name: str, *, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """`build_model` without its forward checks."""
    found = check_model_name(name)
    if found.library == "joined":
        from trainables.models.reused import build_reused

        part = partial(construct, num_classes=num_classes, image_size=image_size, seed=seed)
        return build_reused(name, part, image_size=image_size, seed=seed)
    with seeded(f"{found.library}/{found.name}:{num_classes}:{seed}"):
        try:
            model = _construct(found, num_classes, image_size)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            message = f"model {name} cannot be built for images of {image_size}×{image_size} ({one_line(error)})"
            raise ModelError(f"{message}: set data.image_size to what it takes, often 224, or choose another model") from None
    return model


def _construct(found: ModelName, num_classes: int, image_size: int) -> nn.Module:
    model: nn.Module
    if found.library == "ours":
        model = pkgutil.resolve_name(MODELS[found.name])(num_classes, image_size)
    elif found.library == "torchvision":
        import torchvision

        options = library_options(found, image_size)
        if found.name in ("googlenet", "inception_v3"):
            options["init_weights"] = True
        model = torchvision.models.get_model(found.name, weights=None, num_classes=num_classes, **options)
    else:
        import timm

        model = timm.create_model(found.name, num_classes=num_classes, **library_options(found, image_size))
    return model


def library_options(found: ModelName, image_size: int) -> dict[str, Any]:
    """What a library's constructor must be told about the image size: most take any, those with a position table do not."""
    if found.library == "torchvision":
        if found.name.startswith("vit_"):
            return {"image_size": image_size}
        return {"input_size": (image_size, image_size)} if found.name.startswith("maxvit_") else {}
    if found.library == "timm":
        import timm

        published = timm.get_pretrained_cfg(found.name)
        if published is not None and published.fixed_input_size and published.input_size[-1] != image_size:
            return {"img_size": image_size}
    return {}


def check_forward(model: nn.Module, image_size: int, num_classes: int, *, name: str = "", training: bool = False) -> None:
    """Refuse a model that does not turn (2, 3, image_size, image_size) into (2, num_classes), in eval or in training mode.

    Costs a fraction of a second for the smallest and the largest model. Neither parameters, batch statistics nor generators move.

    Raises:
        ModelError: with the nearest usual size that works.
    """
    named = f"model {name or type(model).__name__}"
    try:
        shape = _output_shape(model, image_size, training)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        does = "cannot be trained on" if training else "does not take"
        sizes = sorted(USUAL_SIZES, key=lambda size: (abs(size - image_size), size))
        fits = next((size for size in sizes if size != image_size and _takes(model, size, training)), None)
        instead = f"set data.image_size to {fits}, or choose another model" if fits else "choose another model"
        raise ModelError(f"{named} {does} images of {image_size}×{image_size} ({one_line(error)}): {instead}") from None
    if shape != (2, num_classes):
        raise ModelError(
            f"{named} answers a batch of 2 with shape {shape}, not (2, {num_classes}): it is no classifier; choose another model"
        )


def _output_shape(model: nn.Module, image_size: int, training: bool) -> tuple[int, ...]:
    return tuple(logits_and_aux(dry_forward(model, image_size, training=training))[0].shape)


def dry_forward(
    model: nn.Module, image_size: int, *, training: bool, batch_size: int = 2, frozen: tuple[type[nn.Module], ...] = ()
) -> Any:
    """What `model` answers to blank images, on the CPU or for a large model on the meta device.

    Neither parameters, batch statistics, modes nor generators move. Modules of the `frozen` classes stay in eval mode.
    """
    import torch
    from torch.func import functional_call

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    work = image_size**2 * sum(tensor.numel() for tensor in tensors.values())
    device = "cpu" if work <= CALCULATED else "meta"
    shadow = {key: tensor.detach().to(device, copy=True) for key, tensor in tensors.items()}
    images_BCHW = torch.zeros(batch_size, 3, image_size, image_size, device=device, dtype=next(model.parameters()).dtype)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        for module, _ in modes:
            if isinstance(module, frozen):
                module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return functional_call(model, shadow, (images_BCHW,))
    finally:
        for module, mode in modes:
            module.training = mode


def _takes(model: nn.Module, image_size: int, training: bool) -> bool:
    try:
        _output_shape(model, image_size, training)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return True


def logits_and_aux(output: Any) -> tuple[Tensor, tuple[tuple[float, Tensor], ...]]:
    """Logits (B, K), and (weight, logits) of each auxiliary head, whose weighted cross-entropy joins the task's in training.

    Raises:
        ModelError: the model answered with something else than logits.
    """
    import torch

    if isinstance(output, torch.Tensor):
        return output, ()
    weight = AUX_WEIGHTS.get(type(output).__name__)
    if weight is None:
        raise ModelError(f"the model answered with {type(output).__name__}, not with logits: choose a classifier")
    logits_BK, *heads = output
    return logits_BK, tuple((weight, aux_BK) for aux_BK in heads if aux_BK is not None)


@contextmanager
def seeded(key: str) -> Iterator[None]:
    """torch's CPU generator seeded from `key`, and put back afterwards. Other devices' generators are not touched."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
        yield


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__
