"""The optimizers that `optim.name` may name: torch's SGD and AdamW with our keys, and timm's under its own names.

All get parameter groups, never a model: which parameters have weight decay is decided by `optim.decay_norm_and_bias` alone.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainables.config import OptimConfig
from trainables.errors import ExperimentError

ParameterGroups = list[dict[str, Any]]


class OptimizerSpec(NamedTuple):
    """An optimizer of ours."""

    build: Callable[[ParameterGroups, OptimConfig, bool | None], torch.optim.Optimizer]
    """An optimizer of torch's parameter groups; the last argument is torch's `fused`."""
    num_states: Callable[[OptimConfig], int]
    """Tensors of a parameter's size in its state."""


def build_sgd(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    """SGD whose momentum starts at 0."""
    sgd = torch.optim.SGD(
        groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused, **_args(torch.optim.SGD, optim)
    )
    sgd.register_step_pre_hook(init_momentum_buffers)
    return sgd


def build_adamw(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=optim.lr, fused=fused, **_args(torch.optim.AdamW, optim))


OPTIMIZERS = {
    "sgd": OptimizerSpec(build_sgd, num_states=lambda optim: int(optim.momentum > 0)),
    "adamw": OptimizerSpec(build_adamw, num_states=lambda optim: 2),
}
"""By `optim.name`; `dot` is SGD twice, see `loss_optimizers.build_optimizers`. Every other name is timm's."""
_OURS = ("params", "lr", "weight_decay", "momentum", "nesterov", "fused", "foreach")
"""Arguments of an optimizer that keys of their own or this package set."""


def build(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    """The optimizer of `optim.name` with `optim.args`. Raises ExperimentError: there is none, or it does not take them."""
    try:
        if optim.name in OPTIMIZERS:
            return OPTIMIZERS[optim.name].build(groups, optim, fused)
        return _build_timm(groups, optim)
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise ExperimentError.of_key("optim.name", f"{optim.name} cannot be built: {error}") from error


def num_states(optim: OptimConfig) -> int:
    """Tensors of a parameter's size in the optimizer's state; of timm's at most two."""
    return OPTIMIZERS[optim.name].num_states(optim) if optim.name in OPTIMIZERS else 2


def _build_timm(groups: ParameterGroups, optim: OptimConfig) -> torch.optim.Optimizer:
    try:
        from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
    except ImportError:
        names = ", ".join([*OPTIMIZERS, "dot"])
        text = f"{optim.name} is none of {names}, and timm's need `pip install raydistill[timm]`"
        raise ExperimentError.of_key("optim.name", text) from None
    if optim.name not in list_optimizers():
        names = ", ".join([*OPTIMIZERS, "dot"])
        raise ExperimentError.of_key(
            "optim.name", f"there is no {optim.name}: write {names}, or one of timm.optim.list_optimizers(), such as lamb"
        )
    info = get_optimizer_info(optim.name)
    if info.second_order:
        raise ExperimentError.of_key("optim.name", f"{optim.name} needs second derivatives: take another one")
    args = _args(info.opt_class, optim)
    if "max_grad_norm" in inspect.signature(info.opt_class).parameters:
        args["max_grad_norm"] = None  # optim.clip_grad_norm is the one bound of it
    # Without a momentum of ours an optimizer gets timm's default, which most ignore.
    optimizer: torch.optim.Optimizer = create_optimizer_v2(groups, optim.name, lr=optim.lr, momentum=optim.momentum, **args)
    return optimizer


def _args(kind: type[torch.optim.Optimizer], optim: OptimConfig) -> dict[str, Any]:
    """`optim.args`, lists as the tuples that optimizers take. Raises ExperimentError: it has no such argument."""
    known = [name for name in inspect.signature(kind).parameters if name not in (*_OURS, "max_grad_norm")]
    for name in optim.args:
        if name not in known:
            text = f"{optim.name} takes no {name}: write one of {', '.join(known)}"
            raise ExperimentError.of_key(f"optim.args.{name}", text)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in optim.args.items()}


def check_optimizer(optim: OptimConfig) -> None:
    """Refuse an optimizer that cannot be built, or whose state a checkpoint cannot hold.

    Raises ExperimentError: which key, and what to write.
    """
    if optim.name == "dot":
        return
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = build([{"params": [weight], "weight_decay": 0.0}], optim, None)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    for slot, value in optimizer.state[weight].items():
        if not isinstance(value, torch.Tensor | int | float):
            raise ExperimentError.of_key(
                "optim.name", f"{optim.name} keeps {slot} as {type(value).__name__}, which no checkpoint holds: take another one"
            )


def plain_numbers(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> dict[str, Any]:
    """What an optimizer remembers besides tensors: numbers of its groups that steps change, and of its parameters, by name.

    timm's count their steps in a group, or in a parameter's state.
    """
    return {
        "groups": [_steps(group) for group in optimizer.param_groups],
        "parameters": {
            names[p]: numbers
            for p, slots in optimizer.state.items()
            if (numbers := {slot: value for slot, value in slots.items() if not isinstance(value, torch.Tensor)})
        },
    }


def _steps(group: dict[str, Any]) -> dict[str, Any]:
    """A group's count of steps, where it has one: LAMB's is a tensor."""
    step = group.get("step")
    return {"step": step.item(), "is_tensor": True} if isinstance(step, torch.Tensor) else {} if step is None else {"step": step}


def set_plain_numbers(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer's groups what `plain_numbers` has of them."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        if "step" in numbers:
            step = numbers["step"]
            group["step"] = torch.tensor(step, dtype=torch.float32) if "is_tensor" in numbers else step


def init_momentum_buffers(sgd: torch.optim.Optimizer, *_: object) -> None:
    """Before a step: a momentum that does not exist yet is 0, of what has a gradient.

    Torch's fused SGD takes memory for it as it finds it, and leaves it so where the first step overflows and is skipped; and it
    ends in an error where some of a group have a momentum and others do not. The first step is the same: μ·0 + g.
    """
    for group in sgd.param_groups:
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            if parameter.grad is not None and sgd.state[parameter].get("momentum_buffer") is None:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
