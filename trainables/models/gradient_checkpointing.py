"""Gradient checkpointing: recompute activations in the backward pass to save memory."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.errors import ModelError


def use_gradient_checkpointing(model: nn.Module, name: str) -> None:
    """Turn on the gradient checkpointing of timm or transformers.

    Raises ModelError: the model does not support it, or has batch norms, whose statistics would be updated twice.
    """
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ModelError(
            f"train.gradient_checkpointing: {name} has batch norms, whose statistics would be updated twice: choose a model"
            " without them, such as a ViT, or leave it out"
        )
    switches = ("set_grad_checkpointing", "gradient_checkpointing_enable")
    switch = next((getattr(each, key) for each in model.modules() for key in switches if hasattr(each, key)), None)
    if switch is None:
        raise ModelError(
            f"train.gradient_checkpointing: {name} does not support it, as timm and transformers models do: leave it out"
        )
    try:
        switch()
    except (AssertionError, ValueError) as error:
        raise ModelError(f"train.gradient_checkpointing: {name} does not support it ({error}): leave it out") from error
