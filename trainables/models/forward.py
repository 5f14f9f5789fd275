"""Forward passes without side effects, logits of any classifier's output, and seeding.

Importing this module does not import torch.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainables.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

AUX_WEIGHTS = {"InceptionOutputs": 0.4, "GoogLeNetOutputs": 0.3}
"""Weight of an auxiliary head's cross-entropy: Szegedy et al. 2014 (GoogLeNet) give 0.3; Inception v3 is trained with 0.4."""

COSINES = "_cosines"
"""Name of the module that computes logits from features in a model without a classifier, see `class_embeddings`."""

MAX_CPU_WORK = 10**10
"""Maximum product of parameters and pixels for a dry forward pass on the CPU, about 50 ms. Larger models run on the meta device,
which only computes shapes, but whose batch norm imports torch._dynamo in 1.4 CPU seconds."""


def dry_forward(
    model: nn.Module, image_size: int, *, training: bool, batch_size: int = 2, frozen: tuple[type[nn.Module], ...] = ()
) -> Any:
    """Run `model` on blank images, on the CPU or for a large model on the meta device, and return its output.

    Parameters, batch statistics, modes and generators stay unchanged. Modules of the `frozen` classes run in eval mode.
    """
    import torch
    from torch.func import functional_call

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    work = image_size**2 * sum(tensor.numel() for tensor in tensors.values())
    device = "cpu" if work <= MAX_CPU_WORK else "meta"
    copies = {key: tensor.detach().to(device, copy=True) for key, tensor in tensors.items()}
    images_BCHW = torch.zeros(batch_size, 3, image_size, image_size, device=device, dtype=next(model.parameters()).dtype)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        for module, _ in modes:
            if isinstance(module, frozen):
                module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return functional_call(model, copies, (images_BCHW,))
    finally:
        for module, mode in modes:
            module.training = mode


def has_classifier(model: nn.Module) -> bool:
    """Whether the model returns logits; otherwise it returns pooled features (B, D), as timm's do with `num_classes` 0."""
    return getattr(model, "num_classes", None) != 0 or hasattr(model, COSINES)


def logits_and_aux(output: Any) -> tuple[Tensor, tuple[tuple[float, Tensor], ...]]:
    """Return the logits (B, K), and (weight, logits) of each auxiliary head, whose weighted cross-entropy is added in training.

    Raises ModelError: the output is not logits.
    """
    import torch

    if isinstance(output, torch.Tensor):
        return output, ()
    weight = AUX_WEIGHTS.get(type(output).__name__)
    if weight is None:
        raise ModelError(f"the model returned {type(output).__name__}, not logits: choose a classifier")
    logits_BK, *heads = output
    return logits_BK, tuple((weight, aux_BK) for aux_BK in heads if aux_BK is not None)


@contextmanager
def seeded(key: str) -> Iterator[None]:
    """Seed torch's CPU generator from `key` within the context, then restore its state. Other generators stay unchanged."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
        yield
