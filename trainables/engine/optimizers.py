"""The optimizers that `optim.name` may name: torch's SGD and AdamW with our keys, and timm's under its own names.

All get parameter groups, never a model: which parameters have weight decay is decided by `optim.decay_norm_and_bias` alone.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from trainables.config import OptimConfig
from trainables.errors import DistillError, ExperimentError, did_you_mean, first_line

ParameterGroups = list[dict[str, Any]]


def build_sgd(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    """SGD whose momentum starts at 0."""
    sgd = torch.optim.SGD(
        groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused, **_args(torch.optim.SGD, optim)
    )
    sgd.register_step_pre_hook(init_momentum_buffers)
    return sgd


def build_adamw(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=optim.lr, fused=fused, **_args(torch.optim.AdamW, optim))


OPTIMIZERS = {"sgd": build_sgd, "adamw": build_adamw}
"""By `optim.name`, each of groups, settings and torch's `fused`; `dot` is SGD twice, see `loss_optimizers.build_optimizers`.
Every other name is timm's."""
_OURS = (
    *("params", "lr", "weight_decay", "momentum", "nesterov", "max_grad_norm"),
    *("fused", "foreach", "capturable", "differentiable", "maximize"),
)
"""Arguments of an optimizer that keys of their own or this package set."""


def build(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    """The optimizer of `optim.name` with `optim.args`. Raises ExperimentError: there is none, or it has no such arguments."""
    return OPTIMIZERS[optim.name](groups, optim, fused) if optim.name in OPTIMIZERS else _build_timm(groups, optim)


def num_states(optim: OptimConfig) -> int:
    """Tensors of a parameter's size in the optimizer's state. Raises ExperimentError: see `check_optimizer`."""
    return sum(isinstance(value, torch.Tensor) and value.numel() == _SIZE**2 for value in _state_after_step(optim).values())


def _build_timm(groups: ParameterGroups, optim: OptimConfig) -> torch.optim.Optimizer:
    ours = (*OPTIMIZERS, "dot")
    try:
        from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
    except ImportError:
        text = f"{optim.name} is none of {', '.join(ours)}, and timm's need `pip install raydistill[timm]`"
        raise ExperimentError.of_key("optim.name", text) from None
    if optim.name not in list_optimizers():
        otherwise = f"write {', '.join(ours)}, or one of timm.optim.list_optimizers(), such as lamb"
        instead = did_you_mean(optim.name.lower(), [*ours, *list_optimizers()], otherwise)
        raise ExperimentError.of_key("optim.name", f"there is no {optim.name}: {instead}")
    info = get_optimizer_info(optim.name)
    if isinstance(info.opt_class, str):  # of a package that timm imports where it is used
        package = info.opt_class.partition(".")[0]
        text = f"{optim.name} needs {package}, which is not used here: take another one, such as adamw"
        raise ExperimentError.of_key("optim.name", text)
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
    # The fused SGD damps the first step too, and torch's others do not.
    ours = (*_OURS, "dampening") if kind is torch.optim.SGD else _OURS
    known = [name for name in inspect.signature(kind).parameters if name not in ours]
    for name in optim.args:
        if name not in known:
            instead = f"write one of {', '.join(known)}" if known else "leave it out"
            text = f"{optim.name} takes no {name}: {instead}"
            raise ExperimentError.of_key(f"optim.args.{name}", text)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in optim.args.items()}


def check_optimizer(optim: OptimConfig) -> None:
    """Refuse an optimizer that cannot be built or makes no step, or whose state a checkpoint cannot hold.

    Raises ExperimentError: which key, and what to write.
    """
    for slot, value in _state_after_step(optim).items():
        if not isinstance(value, torch.Tensor | int | float):
            raise ExperimentError.of_key(
                "optim.name", f"{optim.name} keeps {slot} as {type(value).__name__}, which no checkpoint holds: take another one"
            )


_SIZE = 4


def _state_after_step(optim: OptimConfig) -> Mapping[str, Any]:
    """What the optimizer remembers of a weight (4, 4). Raises ExperimentError: it cannot be built, or makes no step."""
    # A rate that suits float64 alone is no reason to refuse.
    optim = optim.model_copy(update={"name": "sgd" if optim.name == "dot" else optim.name, "lr": 1e-3})
    weight = torch.nn.Parameter(torch.ones(_SIZE, _SIZE))
    try:
        optimizer = build([{"params": [weight], "weight_decay": 0.0}], optim, None)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    except DistillError:
        raise
    except Exception as error:  # the arguments may be anything
        text = f"{optim.name} does not work{' with these' if optim.args else ''} ({type(error).__name__}: {first_line(error)})"
        raise ExperimentError.of_key("optim.args" if optim.args else "optim.name", text) from error
    return dict(optimizer.state[weight])


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
