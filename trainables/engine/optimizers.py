"""The optimizers for `optim.name`: torch's SGD and AdamW with our keys, and timm's under their own names.

All get parameter groups, never a model, so that only `optim.decay_norm_and_bias` decides which parameters have weight decay.
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
"""Builders by `optim.name`. `dot` is two SGDs, see `loss_optimizers.build_optimizers`. All other names are timm's."""
_OURS = (
    *("params", "lr", "weight_decay", "momentum", "nesterov", "max_grad_norm"),
    *("fused", "foreach", "capturable", "differentiable", "maximize"),
)
"""Optimizer arguments that are set by other keys or by this package."""


def build(groups: ParameterGroups, optim: OptimConfig, fused: bool | None) -> torch.optim.Optimizer:
    """Build the optimizer `optim.name` with `optim.args`. Raises ExperimentError: it does not exist, or rejects the arguments."""
    return OPTIMIZERS[optim.name](groups, optim, fused) if optim.name in OPTIMIZERS else _build_timm(groups, optim)


def num_states(optim: OptimConfig) -> int:
    """Count the tensors per parameter in the optimizer's state. Raises ExperimentError: see `check_optimizer`."""
    return sum(isinstance(value, torch.Tensor) and value.numel() == _SIZE**2 for value in _state_after_step(optim).values())


def _build_timm(groups: ParameterGroups, optim: OptimConfig) -> torch.optim.Optimizer:
    ours = (*OPTIMIZERS, "dot")
    try:
        from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
    except ImportError:
        text = f"{optim.name} is none of {', '.join(ours)}: for timm's optimizers, run `pip install raydistill[timm]`"
        raise ExperimentError.of_key("optim.name", text) from None
    if optim.name not in list_optimizers():
        otherwise = f"write {', '.join(ours)}, or one of timm.optim.list_optimizers(), such as lamb"
        instead = did_you_mean(optim.name.lower(), [*ours, *list_optimizers()], otherwise)
        raise ExperimentError.of_key("optim.name", f"there is no {optim.name}: {instead}")
    info = get_optimizer_info(optim.name)
    if isinstance(info.opt_class, str):  # of a package that timm imports on use
        package = info.opt_class.partition(".")[0]
        text = f"{optim.name} needs {package}, which is not supported: choose another one, such as adamw"
        raise ExperimentError.of_key("optim.name", text)
    if info.second_order:
        raise ExperimentError.of_key("optim.name", f"{optim.name} needs second derivatives: choose another one")
    args = _args(info.opt_class, optim)
    if "max_grad_norm" in inspect.signature(info.opt_class).parameters:
        args["max_grad_norm"] = None  # only optim.clip_grad_norm limits the norm
    # An unset optim.momentum gives timm's default, which most optimizers ignore.
    optimizer: torch.optim.Optimizer = create_optimizer_v2(groups, optim.name, lr=optim.lr, momentum=optim.momentum, **args)
    return optimizer


def _args(kind: type[torch.optim.Optimizer], optim: OptimConfig) -> dict[str, Any]:
    """Return `optim.args`, with lists as tuples. Raises ExperimentError: the optimizer has no such argument."""
    # torch's fused SGD also dampens the first step, unlike its other versions.
    ours = (*_OURS, "dampening") if kind is torch.optim.SGD else _OURS
    known = [name for name in inspect.signature(kind).parameters if name not in ours]
    for name in optim.args:
        if name not in known:
            instead = f"write one of {', '.join(known)}" if known else "remove it"
            text = f"{optim.name} has no argument {name}: {instead}"
            raise ExperimentError.of_key(f"optim.args.{name}", text)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in optim.args.items()}


def check_optimizer(optim: OptimConfig) -> None:
    """Check that an optimizer can be built and stepped, and that checkpoints can store its state.

    Raises ExperimentError: names the key and what to write.
    """
    for slot, value in _state_after_step(optim).items():
        if not isinstance(value, torch.Tensor | int | float):
            raise ExperimentError.of_key(
                "optim.name", f"{optim.name} stores {slot} as {type(value).__name__}, not as a tensor: choose another one"
            )


_SIZE = 4


def _state_after_step(optim: OptimConfig) -> Mapping[str, Any]:
    """Return the optimizer's state of a (4, 4) weight. Raises ExperimentError: the optimizer cannot be built or stepped."""
    # Use a moderate rate: the user's may only work in float64.
    optim = optim.model_copy(update={"name": "sgd" if optim.name == "dot" else optim.name, "lr": 1e-3})
    weight = torch.nn.Parameter(torch.ones(_SIZE, _SIZE))
    try:
        optimizer = build([{"params": [weight], "weight_decay": 0.0}], optim, None)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    except DistillError:
        raise
    except Exception as error:  # arbitrary arguments may raise anything
        text = f"{optim.name} does not work{' with these' if optim.args else ''} ({type(error).__name__}: {first_line(error)})"
        raise ExperimentError.of_key("optim.args" if optim.args else "optim.name", text) from error
    return dict(optimizer.state[weight])


def plain_numbers(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> dict[str, Any]:
    """Return an optimizer's state other than tensors: step counts of its groups, and numbers of its parameters by name.

    timm's optimizers count steps in a group or in a parameter's state.
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
    """Return a group's step count, if any; LAMB's is a tensor."""
    step = group.get("step")
    return {"step": step.item(), "is_tensor": True} if isinstance(step, torch.Tensor) else {} if step is None else {"step": step}


def set_plain_numbers(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore the `groups` of `plain_numbers`."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        if "step" in numbers:
            step = numbers["step"]
            group["step"] = torch.tensor(step, dtype=torch.float32) if "is_tensor" in numbers else step


def init_momentum_buffers(sgd: torch.optim.Optimizer, *_: object) -> None:
    """Set missing momentum buffers of parameters with a gradient to 0 before a step.

    torch's fused SGD allocates them uninitialized, and leaves them so if the first step overflows and is skipped. It also fails
    if only some parameters of a group have one. The first step does not change: μ·0 + g.
    """
    for group in sgd.param_groups:
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            if parameter.grad is not None and sgd.state[parameter].get("momentum_buffer") is None:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
