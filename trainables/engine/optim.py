"""Parameter groups, the optimizer, and the learning rate as a function of the step."""

import bisect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from trainables.config import OptimConfig


def parameter_groups(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> list[dict[str, Any]]:
    """The trainable ones of these parameters with their weight decay.

    Without `decay_norm_and_bias` every parameter of at most one dimension (norm scales and shifts, biases) has none, as in
    Goyal et al. 2017 and He et al. 2019, "Bag of Tricks".
    """
    trainable = [p for p in parameters if p.requires_grad]
    if optim.decay_norm_and_bias:
        return [{"params": trainable, "weight_decay": optim.weight_decay}]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]


def parameter_copies(optim: OptimConfig) -> int:
    """How many times its own memory a trained parameter takes, with its gradient and the optimizer's state."""
    if optim.name == "dot":  # SGD twice, each with a gradient and a momentum
        return 5
    return 2 + OPTIMIZERS[optim.name].num_states(optim)


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `optim.name`; `LossOptimizer.set_learning_rate` sets its learning rate before each step."""
    groups = parameter_groups(parameters, optim)
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
    if epoch < optim.warmup_epochs:
        return peak * (step + 1) / (optim.warmup_epochs * steps_per_epoch + 1)
    if optim.schedule == "cosine":
        done = (epoch - optim.warmup_epochs) / max(optim.epochs - optim.warmup_epochs, 1e-9)
        return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    if optim.schedule == "step":
        return float(peak * optim.gamma ** bisect.bisect_right(sorted(optim.milestones), epoch))
    return peak
