"""Parameter groups, the optimizer, and the learning rate as a function of the step."""

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from trainables.config import OptimConfig
from trainables.errors import ModelError
from trainables.models.tap_names import last_layer


def parameter_groups(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, lr_scales: Mapping[nn.Parameter, float]
) -> list[dict[str, Any]]:
    """The trainable ones of these parameters, in groups of one weight decay and one `lr_scale`, by which the learning rate is
    multiplied (absent: 1).

    Without `decay_norm_and_bias` every parameter of at most one dimension (norm scales and shifts, biases) has no weight decay,
    as in Goyal et al. 2017 and He et al. 2019, "Bag of Tricks".
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): []}  # the first one, maybe empty, has `learning_rate`
    for p in parameters:
        if p.requires_grad:
            groups.setdefault((optim.decay_norm_and_bias or p.ndim > 1, lr_scales.get(p, 1.0)), []).append(p)
    return [
        {"params": params, "weight_decay": optim.weight_decay if decays else 0.0, "lr_scale": scale}
        for (decays, scale), params in groups.items()
    ]


def learning_rate_scales(model: nn.Module, optim: OptimConfig) -> dict[nn.Parameter, float]:
    """What `layer_decay` and `lr_head` multiply the learning rate of a model's parameters by; absent: 1.

    The layers are timm's, with which it decays too (`param_groups_layer_decay`, after BEiT, Bao et al. 2021).

    Raises ModelError: the model is not timm's, and its layers are not known.
    """
    scales: dict[nn.Parameter, float] = {}
    if optim.layer_decay is not None:
        matcher = getattr(model, "group_matcher", None)
        if matcher is None:
            raise ModelError(
                f"layer_decay: {type(model).__name__} does not say what its layers are, as timm's models do: write a model of "
                "timm's (timm/NAME), or leave layer_decay out"
            )
        from timm.models import group_parameters

        layer_of = group_parameters(model, matcher(coarse=False), reverse=True)
        last = max(layer_of.values())
        scales = {p: optim.layer_decay ** (last - layer_of.get(name, last)) for name, p in model.named_parameters()}
    if optim.lr_head is not None:
        head = last_layer(model)
        for module in head if isinstance(head, tuple) else (head,):
            scales |= dict.fromkeys(module.parameters(), optim.lr_head / optim.lr)
    return scales


def parameter_copies(optim: OptimConfig) -> int:
    """How many times its own memory a trained parameter takes, with its gradient and the optimizer's state."""
    if optim.name == "dot":  # SGD twice, each with a gradient and a momentum
        return 5
    return 2 + OPTIMIZERS[optim.name].num_states(optim)


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, lr_scales: Mapping[nn.Parameter, float]
) -> torch.optim.Optimizer:
    """The optimizer of `optim.name`; `LossOptimizer.set_learning_rate` sets its learning rate before each step."""
    groups = parameter_groups(parameters, optim, lr_scales)
    fused = any(p.is_cuda for group in groups for p in group["params"]) or None
    return OPTIMIZERS[optim.name].build(groups, optim, fused)


def build_sgd(groups: list[dict[str, Any]], optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    """SGD whose momentum starts at 0."""
    sgd = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused)
    sgd.register_step_pre_hook(init_momentum_buffers)
    return sgd


def build_adamw(groups: list[dict[str, Any]], optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=optim.lr, fused=fused)


class OptimizerSpec(NamedTuple):
    """An optimizer that `optim.name` may name."""

    build: Callable[[list[dict[str, Any]], OptimConfig, bool | None], torch.optim.Optimizer]
    """An optimizer of torch's parameter groups; the last argument is torch's `fused`."""
    num_states: Callable[[OptimConfig], int]
    """Tensors of a parameter's size in its state."""


OPTIMIZERS = {
    "sgd": OptimizerSpec(build_sgd, num_states=lambda optim: int(optim.momentum > 0)),
    "adamw": OptimizerSpec(build_adamw, num_states=lambda optim: 2),
}
"""By `optim.name`; `dot` is SGD twice, see `loss_optimizers.build_optimizers`."""


def init_momentum_buffers(sgd: torch.optim.Optimizer, *_: object) -> None:
    """Before a step: a momentum that does not exist yet is 0, of what has a gradient.

    Torch's fused SGD takes memory for it as it finds it, and leaves it so where the first step overflows and is skipped; and it
    ends in an error where some of a group have a momentum and others do not. The first step is the same: μ·0 + g.
    """
    for group in sgd.param_groups:
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            if parameter.grad is not None and sgd.state[parameter].get("momentum_buffer") is None:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def peak_learning_rate(optim: OptimConfig, global_batch_size: int) -> float:
    """`lr`, times batch/lr_base_batch under linear scaling (Goyal et al. 2017), or times its root."""
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[optim.lr_scaling]
    return float(optim.lr * (global_batch_size / optim.lr_base_batch) ** exponent)


def learning_rate(step: int, steps_per_epoch: int, optim: OptimConfig, peak: float) -> float:
    """Learning rate of the optimizer step with index `step` (0-based): a pure function, so that nothing of it needs saving.

    Warm-up rises linearly to `peak`; cosine then falls to 0 at the last epoch's end (Loshchilov & Hutter 2017, without
    restarts); step multiplies by `gamma` at each milestone epoch.
    """
    epoch = step / steps_per_epoch
    warmup_epochs = optim.epochs_of_warmup or min(optim.warmup_steps / steps_per_epoch, optim.epochs)
    if epoch < warmup_epochs:
        return peak * (step + 1) / (warmup_epochs * steps_per_epoch + 1)
    if optim.schedule == "cosine":
        done = (epoch - warmup_epochs) / max(optim.epochs - warmup_epochs, 1e-9)
        return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if optim.schedule == "step":
        return float(peak * optim.gamma ** bisect.bisect_right(sorted(optim.milestones), epoch))
    return peak
