"""Parameter groups, the optimizer, and the learning rate as a function of the step."""

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainables.config import OptimConfig
from trainables.engine.optimizers import build, num_states
from trainables.errors import ExperimentError, ModelError
from trainables.models.tap_names import last_layer


def parameter_groups(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, lr_scales: Mapping[nn.Parameter, float]
) -> list[dict[str, Any]]:
    """Group the trainable parameters by weight decay and `lr_scale`, the factor on their learning rate (default 1).

    Without `decay_norm_and_bias`, parameters with at most one dimension (norm scales and shifts, biases) have no weight decay,
    as in Goyal et al. 2017 and He et al. 2019, "Bag of Tricks".
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): []}  # the first group, maybe empty, has the logged rate
    for p in parameters:
        if p.requires_grad:
            groups.setdefault((optim.decay_norm_and_bias or p.ndim > 1, lr_scales.get(p, 1.0)), []).append(p)
    return [
        {"params": params, "weight_decay": optim.weight_decay if decays else 0.0, "lr_scale": scale}
        for (decays, scale), params in groups.items()
    ]


def learning_rate_scales(model: nn.Module, optim: OptimConfig) -> dict[nn.Parameter, float]:
    """Return the factors of `layer_decay` and `lr_head` on the learning rate of parameters; missing ones have 1.

    Layers are numbered as in timm's `param_groups_layer_decay` (after BEiT, Bao et al. 2021).

    Raises ModelError: the model does not define its layers as timm's models do.
    """
    scales: dict[nn.Parameter, float] = {}
    if optim.layer_decay is not None:
        matcher = getattr(model, "group_matcher", None)
        if matcher is None:
            raise ModelError(
                f"layer_decay: {type(model).__name__} does not define its layers, as timm's models do: choose a timm model "
                "(timm/NAME), or remove layer_decay"
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


def clipping(optim: OptimConfig, model: nn.Module) -> Callable[[Sequence[nn.Parameter]], object] | None:
    """Return a function that clips gradients as one of the keys `clip_grad_…` says, or None.

    AGC (Brock et al. 2021) uses timm, and skips the classifier as in the paper. Raises ExperimentError: timm is not installed.
    """
    if optim.clip_grad_norm is not None:
        return partial(nn.utils.clip_grad_norm_, max_norm=optim.clip_grad_norm)
    if optim.clip_grad_value is not None:
        return partial(nn.utils.clip_grad_value_, clip_value=optim.clip_grad_value)
    if optim.clip_grad_agc is None:
        return None
    try:
        from timm.utils.agc import adaptive_clip_grad
    except ImportError:
        text = "timm is not installed: run `pip install raydistill[timm]`, or write clip_grad_norm"
        raise ExperimentError.of_key("optim.clip_grad_agc", text) from None
    head = last_layer(model)
    heads = head if isinstance(head, tuple) else (head,)
    skipped = {p for module in heads if isinstance(module, nn.Module) for p in module.parameters()}
    limit = optim.clip_grad_agc
    return lambda parameters: adaptive_clip_grad([p for p in parameters if p not in skipped], clip_factor=limit)


def parameter_copies(optim: OptimConfig) -> int:
    """Return the memory of a trained parameter with its gradient, optimizer state and EMA, as a multiple of the parameter."""
    averages = 0 if optim.ema_decay is None else 1
    each = 1 + num_states(optim)
    return 1 + averages + (2 * each if optim.name == "dot" else each)  # dot is two SGDs, each with gradient and momentum


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, lr_scales: Mapping[nn.Parameter, float]
) -> torch.optim.Optimizer:
    """Build the optimizer `optim.name`. `LossOptimizer.set_learning_rate` sets its learning rate before each step."""
    groups = parameter_groups(parameters, optim, lr_scales)
    fused = any(p.is_cuda for group in groups for p in group["params"]) or None
    return build(groups, optim, fused)


def peak_learning_rate(optim: OptimConfig, global_batch_size: int) -> float:
    """Return `lr`, times batch/lr_base_batch with linear scaling (Goyal et al. 2017), or times its square root."""
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[optim.lr_scaling]
    return float(optim.lr * (global_batch_size / optim.lr_base_batch) ** exponent)


def learning_rate(step: int, steps_per_epoch: int, optim: OptimConfig, peak: float) -> float:
    """Return the learning rate of optimizer step `step` (0-based). It depends only on the arguments, so needs no saved state.

    Warm-up rises linearly to `peak`. Then `cosine` falls to `min_lr_factor` of it (Loshchilov & Hutter 2017, without restarts),
    and `wsd` stays and falls linearly to that in the last `decay_ratio` of the epochs (Hu et al. 2024, "MiniCPM"). Both finish
    at the end or where the cool-down begins, which stays at the minimum. `step` multiplies by `gamma` at each milestone epoch.
    """
    epoch = step / steps_per_epoch
    warmup_epochs = optim.epochs_of_warmup or min(optim.warmup_steps / steps_per_epoch, optim.epochs)
    if epoch < warmup_epochs:
        return peak * (step + 1) / (warmup_epochs * steps_per_epoch + 1)
    if optim.schedule == "step":
        return float(peak * optim.gamma ** bisect.bisect_right(sorted(optim.milestones), epoch))
    if optim.schedule == "constant":
        return peak
    end = optim.epochs - optim.cooldown_epochs
    begin = warmup_epochs if optim.schedule == "cosine" else max(warmup_epochs, end - optim.decay_ratio * optim.epochs)
    done = min(max((epoch - begin) / max(end - begin, 1e-9), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return peak * (optim.min_lr_factor + (1 - optim.min_lr_factor) * left)
