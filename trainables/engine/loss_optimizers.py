"""The optimizers of a job: one for all losses, or one for each group of losses."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainables.config import OptimConfig
from trainables.engine.optim import (
    build_optimizer,
    learning_rate,
    learning_rate_scales,
    parameter_groups,
    peak_learning_rate,
)
from trainables.engine.optimizers import init_momentum_buffers
from trainables.methods.contract import Method
from trainables.methods.distillation_module import DistillationModule

LossKeys = frozenset[str]
"""`task`, and `method/term` for the methods' terms."""


@dataclass(frozen=True)
class LossOptimizer:
    """An optimizer with its settings, the losses that it minimizes, and the parameters that it changes."""

    losses: LossKeys
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    parameters: Sequence[nn.Parameter]

    def set_learning_rate(self, step: int, *, steps_per_epoch: int, global_batch_size: int) -> None:
        lr = learning_rate(step, steps_per_epoch, self.optim, peak_learning_rate(self.optim, global_batch_size))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]


class DotSGD(torch.optim.SGD):
    """DOT's SGD for the task or for the methods: a parameter's settings depend on whether both reach it in this step.

    As in the authors' code (mdistiller), a parameter that only one of the two reaches has the momentum μ and weight decay. If
    both reach it, the task's momentum is μ − Δ and the methods' μ + Δ without weight decay. The methods' first step on a
    parameter never has weight decay.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig, shared_settings: Mapping[str, float]) -> None:
        """`shared_settings` replace a group's settings for parameters that both reach."""
        fused = any(p.is_cuda for group in groups for p in group["params"]) or None
        super().__init__(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
        self._shared_settings = dict(shared_settings)
        self.shared: Set[nn.Parameter] = frozenset()
        """The parameters that both reach in this step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters in two passes, because settings apply to a whole group."""
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        own_settings = [{name: group[name] for name in self._shared_settings} for group in self.param_groups]
        # On a first step momentum has no effect yet, so the shared settings only change weight decay.
        has_first = bool(self._shared_settings["momentum"])
        shared = {p for p in gradients if p in self.shared or (has_first and "momentum_buffer" not in self.state[p])}
        init_momentum_buffers(self)
        self._step_subset(gradients, gradients.keys() - shared)
        for group in self.param_groups:
            group.update(self._shared_settings)
        self._step_subset(gradients, shared)
        for group, own in zip(self.param_groups, own_settings, strict=True):
            group.update(own)
        for p, gradient in gradients.items():
            p.grad = gradient

    def _step_subset(self, gradients: Mapping[nn.Parameter, torch.Tensor], subset: Set[nn.Parameter]) -> None:
        for p, gradient in gradients.items():
            p.grad = gradient if p in subset else None
        super().step()


def group_losses(methods: Mapping[str, Method], optim: OptimConfig) -> list[tuple[LossKeys, OptimConfig]]:
    """Group all losses of a job by optimizer, each group with its settings.

    `optim.losses` names losses with their own optimizer: `task`, a term, or a method for the rest of its terms. dot has one
    optimizer for the task and one for all other losses.
    """
    terms = {key: frozenset(f"{key}/{term}" for term in method.terms) for key, method in methods.items()}
    rest = frozenset({"task"}).union(*terms.values())
    groups = [(terms.get(key, frozenset({key})) - (optim.losses.keys() - {key}), optim.for_loss(key)) for key in optim.losses]
    if optim.name == "dot":
        optim = optim.model_copy(update={"name": "sgd"})
        groups = [(frozenset({"task"}), optim)]
    rest = rest.difference(*(losses for losses, _ in groups))
    return [*groups, (rest, optim)] if rest else groups


def _parameters_of(losses: LossKeys, student: nn.Module, methods: Mapping[str, Method]) -> list[nn.Parameter]:
    """Return what these losses train, in the same order on all ranks: the student, and the modules of their methods."""
    own = [method for key, method in methods.items() if any(loss.partition("/")[0] == key for loss in losses)]
    return list(dict.fromkeys(parameter for module in (student, *own) for parameter in module.parameters()))


def build_optimizers(student: nn.Module, methods: Mapping[str, Method], optim: OptimConfig) -> tuple[LossOptimizer, ...]:
    """Build one optimizer for everything, or several with `optim.losses` or `optim.name: dot`.

    For DOT (Zhao, Cui, Li and Liang 2023, ICCV, "DOT: A Distillation-Oriented Trainer", algorithm 1) see `DotSGD`.

    Raises ModelError: see `learning_rate_scales`.
    """
    groups = [(losses, own, _parameters_of(losses, student, methods)) for losses, own in group_losses(methods, optim)]
    optimizers: list[torch.optim.Optimizer]
    if optim.name == "dot" and len(groups) == 2:
        scales = learning_rate_scales(student, optim)
        task, distilled = (parameter_groups(parameters, own, scales) for _, own, parameters in groups)
        optimizers = [
            DotSGD(task, optim, {"momentum": optim.momentum - optim.delta}),
            DotSGD(distilled, optim, {"momentum": optim.momentum + optim.delta, "weight_decay": 0.0}),
        ]
    else:
        optimizers = [build_optimizer(parameters, own, learning_rate_scales(student, own)) for _, own, parameters in groups]
    return tuple(
        LossOptimizer(losses, optimizer, own, [p for each in optimizer.param_groups for p in each["params"]])
        for (losses, own, _), optimizer in zip(groups, optimizers, strict=True)
    )


def init_optimizer(module: DistillationModule, optim: OptimConfig) -> LossOptimizer:
    """Build an init stage's optimizer, for the methods' losses and the parameters that they train there."""
    parameters = module.init_parameters
    return LossOptimizer(frozenset(module.term_names), build_optimizer(parameters, optim, {}), optim, parameters)
