"""Gradient checkpointing: activations are computed again in the backward pass, so that they need no memory until then."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.errors import ModelError


def use_gradient_checkpointing(model: nn.Module, name: str) -> None:
    """Turn on the library's own, of timm and transformers.

    Raises ModelError: the model has none, or batch norms, whose statistics the second forward pass would change again.
    """
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ModelError(
            f"train.gradient_checkpointing: {name} has batch norms, whose statistics a second forward pass would change: take a"
            " model without them, such as a ViT, or leave it out"
        )
    switches = ("set_grad_checkpointing", "gradient_checkpointing_enable")
    switch = next((getattr(each, key) for each in model.modules() for key in switches if hasattr(each, key)), None)
    if switch is None:
        raise ModelError(
            f"train.gradient_checkpointing: {name} has no switch for it, as models of timm and transformers have: leave it out"
        )
    try:
        switch()
    except (AssertionError, ValueError) as error:
        raise ModelError(f"train.gradient_checkpointing: {name} does not support it ({error}): leave it out") from error
