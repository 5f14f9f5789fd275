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


def clipping(optim: OptimConfig, model: nn.Module) -> Callable[[Sequence[nn.Parameter]], object] | None:
    """What bounds the gradients of parameters before a step, as one of the keys `clip_grad_…` says; None: nothing.

    AGC (Brock et al. 2021) is timm's, and leaves out the model's classifier as the paper does.
    """
    if optim.clip_grad_norm is not None:
        return partial(nn.utils.clip_grad_norm_, max_norm=optim.clip_grad_norm)
    if optim.clip_grad_value is not None:
        return partial(nn.utils.clip_grad_value_, clip_value=optim.clip_grad_value)
    if optim.clip_grad_agc is None:
        return None
    from timm.utils.agc import adaptive_clip_grad

    head = last_layer(model)
    heads = head if isinstance(head, tuple) else (head,)
    left_out = {p for module in heads if isinstance(module, nn.Module) for p in module.parameters()}
    limit = optim.clip_grad_agc
    return lambda parameters: adaptive_clip_grad([p for p in parameters if p not in left_out], clip_factor=limit)


def parameter_copies(optim: OptimConfig) -> int:
    """How many times its own memory a trained parameter takes, with its gradient, the optimizer's state and its average."""
    averages = 0 if optim.ema_decay is None else 1
    if optim.name == "dot":  # SGD twice, each with a gradient and a momentum
        return 5 + averages
    return 2 + num_states(optim) + averages


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, lr_scales: Mapping[nn.Parameter, float]
) -> torch.optim.Optimizer:
    """The optimizer of `optim.name`; `LossOptimizer.set_learning_rate` sets its learning rate before each step."""
    groups = parameter_groups(parameters, optim, lr_scales)
    fused = any(p.is_cuda for group in groups for p in group["params"]) or None
    return build(groups, optim, fused)


def peak_learning_rate(optim: OptimConfig, global_batch_size: int) -> float:
    """`lr`, times batch/lr_base_batch under linear scaling (Goyal et al. 2017), or times its root."""
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[optim.lr_scaling]
    return float(optim.lr * (global_batch_size / optim.lr_base_batch) ** exponent)


def learning_rate(step: int, steps_per_epoch: int, optim: OptimConfig, peak: float) -> float:
    """Learning rate of the optimizer step with index `step` (0-based): a pure function, so that nothing of it needs saving.

    Warm-up rises linearly to `peak`. Cosine then falls to `min_lr_factor` of it (Loshchilov & Hutter 2017, without restarts),
    wsd stays and falls linearly to that in the last `decay_ratio` of the epochs (Hu et al. 2024, "MiniCPM"); both end there, or
    where the cool-down begins, in which it stays. Step multiplies by `gamma` at each milestone epoch.
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
