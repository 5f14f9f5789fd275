"""From losses to new parameters: one optimizer for all losses, or several, each with the gradients of its own.

With several optimizers, `a = G1(D(x))` and `b = G2(D(x))`, one forward gives both losses; each optimizer is given the gradients
of its losses alone, all taken at the same parameters, and what they do to a parameter that they share is added up. No DDP: its
buckets hold one gradient a parameter. Gradients are averaged over ranks in one all-reduce a loss, after the last backward, so
that none of it hides behind one.

Memory beside one optimizer's: for each further optimizer its state and its gradients, and while they update two copies of the
shared parameters and a third of those that one changes; on several ranks a flat copy of one loss's gradients at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trainables.config import LossOptimConfig, OptimConfig
from trainables.distributed.group import Group
from trainables.engine.optim import (
    begin_momenta,
    build_optimizer,
    learning_rate,
    parameter_groups,
    peak_learning_rate,
    set_learning_rate,
)
from trainables.errors import ExperimentError
from trainables.methods.contract import Method
from trainables.rules import nesterov_has_momentum, warmup_leaves_an_epoch


class Total(Protocol):
    """The losses of a batch, see `trainables.engine.step.Losses`."""

    def total(self, weight: Tensor, keys: frozenset[str] | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Update:
    """An optimizer, whose losses it lowers, and its schedule."""

    losses: frozenset[str]
    """`task`, and `method/term` of terms of methods."""
    optimizer: torch.optim.Optimizer
    optim: OptimConfig

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


class DotSide(torch.optim.SGD):
    """DOT's SGD for the task or for the methods: other settings where the other side's gradient arrives too, in this step.

    As in the authors' code (mdistiller): what one side alone reaches has the momentum μ and weight decay; where both do, the
    task's momentum is μ − Δ and the methods' μ + Δ without weight decay. Not as there: their first step of what the methods alone
    reach goes without weight decay, ours has it.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig, where_both: Mapping[str, float]) -> None:
        """`where_both`: settings of a group there, in place of its own."""
        fused = any(p.is_cuda for group in groups for p in group["params"]) or None
        super().__init__(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
        self.register_step_pre_hook(begin_momenta)
        self._where_both = dict(where_both)
        self.both: Set[nn.Parameter] = frozenset()
        """What the gradients of both sides reach."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change what has a gradient; two passes, since a group's settings hold for all of it."""
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        kept = [dict(group) for group in self.param_groups]
        for shared in (False, True):
            for group, own in zip(self.param_groups, kept, strict=True):
                group.update({name: own[name] for name in self._where_both} if not shared else self._where_both)
            for p, gradient in gradients.items():
                p.grad = gradient if (p in self.both) == shared else None
            super().step()
        for group, own in zip(self.param_groups, kept, strict=True):
            group.update({name: own[name] for name in self._where_both})
        for p, gradient in gradients.items():
            p.grad = gradient


class Only(NamedTuple):
    """What a warm-up stage trains, and by which losses."""

    parameters: Sequence[nn.Parameter]
    losses: frozenset[str]


class Updates:
    """The optimizers of a job. A step is `backward` for each micro-batch, then `step`."""

    def __init__(
        self, updates: Sequence[Update], group: Group, clip_grad_norm: float | None = None, init_lr: float | None = None
    ):
        """With several optimizers, `clip_grad_norm` bounds the gradient of each one's losses.

        `init_lr`: the learning rate of a warm-up stage, where it is not the peak.
        """
        self.updates = tuple(updates)
        self._group, self._clip, self._init_lr = group, clip_grad_norm, init_lr
        self._collected: list[list[Tensor | None]] = []

    @property
    def several(self) -> bool:
        """Whether losses have optimizers of their own; the model then runs without DDP."""
        return len(self.updates) > 1

    def set_learning_rates(self, step: int, steps_per_epoch: int, global_batch_size: int) -> None:
        """For the step with this index; those before 0 belong to a warm-up stage and go at the peak rate, or its own."""
        for update in self.updates:
            peak = peak_learning_rate(update.optim, global_batch_size)
            lr = learning_rate(step, steps_per_epoch, update.optim, peak) if step >= 0 else self._init_lr or peak
            set_learning_rate(update.optimizer, lr)

    def backward(self, loss: Total, weight: Tensor, scaler: torch.amp.GradScaler, only: Only | None = None) -> None:
        """Add the gradients of a micro-batch."""
        if only is not None:
            total = scaler.scale(loss.total(weight, only.losses))
            self._collect([torch.autograd.grad(total, only.parameters, allow_unused=True)])
        elif not self.several:
            scaler.scale(loss.total(weight)).backward()  # type: ignore[no-untyped-call]
        else:
            last = self.updates[-1]
            self._collect([
                torch.autograd.grad(
                    scaler.scale(loss.total(weight, update.losses)), update.parameters, retain_graph=update is not last,
                    allow_unused=True,
                )
                for update in self.updates
            ])  # fmt: skip

    def step(self, scaler: torch.amp.GradScaler, only: Only | None = None) -> None:
        """Change the parameters, and forget the gradients. What no loss reaches is left as it is, without weight decay too."""
        if only is not None:
            _put(only.parameters, average(self._collected[0], self._group))
            self._advance(self.updates[0], scaler)
        elif not self.several:
            self._advance(self.updates[0], scaler)
        else:
            self._step_each(scaler)
        self._collected = []
        scaler.update()

    def _collect(self, found: Sequence[Sequence[Tensor | None]]) -> None:
        if not self._collected:
            self._collected = [list(gradients) for gradients in found]
            return
        for mine, gradients in zip(self._collected, found, strict=True):
            for place, gradient in enumerate(gradients):
                old = mine[place]
                mine[place] = gradient if old is None else old if gradient is None else old + gradient

    def _advance(self, update: Update, scaler: torch.amp.GradScaler) -> None:
        if self._clip is not None:
            scaler.unscale_(update.optimizer)
            nn.utils.clip_grad_norm_(update.parameters, self._clip)
        scaler.step(update.optimizer)
        update.optimizer.zero_grad(set_to_none=True)

    def _step_each(self, scaler: torch.amp.GradScaler) -> None:
        """Every optimizer starts from the same parameters, also where its update depends on them, as weight decay does."""
        self._tell_both()
        shared = [parameter.detach() for parameter in _shared(self.updates)]
        began = [parameter.clone() for parameter in shared]
        moved = [torch.zeros_like(parameter) for parameter in began]
        for update in self.updates:
            _put(update.parameters, average(self._collected.pop(0), self._group))  # no loss's gradients outlive its update
            self._advance(update, scaler)
            torch._foreach_add_(moved, torch._foreach_sub(shared, began))
            torch._foreach_copy_(shared, began)
        torch._foreach_add_(shared, moved)

    def _tell_both(self) -> None:
        """DOT's sides hear of what the gradients of both reach. Which gradients there are is known without the device."""
        sides = [update.optimizer for update in self.updates if isinstance(update.optimizer, DotSide)]
        if not sides:
            return
        pairs = [zip(update.parameters, found, strict=True) for update, found in zip(self.updates, self._collected, strict=True)]
        reached = [{parameter for parameter, gradient in pair if gradient is not None} for pair in pairs]
        for side in sides:
            side.both = set.intersection(*reached)


class Share(NamedTuple):
    """Losses that have an optimizer together, its settings, and what it changes."""

    losses: frozenset[str]
    optim: OptimConfig
    parameters: list[nn.Parameter]


def build_updates(student: nn.Module, methods: Mapping[str, Method], optim: OptimConfig) -> tuple[Update, ...]:
    """One optimizer for everything, or several as the methods, `optim.losses` or `optim.name: dot` say.

    DOT (Zhao, Cui, Li and Liang 2023, ICCV, "DOT: A Distillation-Oriented Trainer", algorithm 1): with momentum μ, the task's
    gradient goes at μ − Δ and the methods' at μ + Δ, see `DotSide`.

    Raises:
        ExperimentError: see `share_out`.
    """
    shares = share_out(student, methods, optim)
    if optim.name != "dot" or len(shares) == 1:
        return tuple(Update(losses, build_optimizer(moved, settings), settings) for losses, settings, moved in shares)
    apart = {"momentum": optim.momentum - optim.delta}, {"momentum": optim.momentum + optim.delta, "weight_decay": 0.0}
    return tuple(
        Update(losses, DotSide(parameter_groups(moved, plain), plain, where_both), plain)
        for (losses, plain, moved), where_both in zip(shares, apart, strict=True)
    )


def share_out(student: nn.Module, methods: Mapping[str, Method], optim: OptimConfig) -> tuple[Share, ...]:
    """Every loss with the others that its optimizer lowers.

    The labels' loss, `task`, changes the student; a method's loss the student and the method's own parameters, if it does not
    say otherwise (`Method.moved_by`).

    Raises:
        ExperimentError: see `own_losses`; or a term would change more than it says, by an optimizer that it shares.
    """
    every, own = _every_loss(methods), own_losses(methods, optim)
    plain = optim.model_copy(update={"name": "sgd"}) if optim.name == "dot" else optim
    if optim.name == "dot":
        own["task"] = frozenset({"task"}), plain
    if rest := every.difference(*(losses for losses, _ in own.values())):
        own["the rest"] = rest, plain
    shares = tuple(Share(losses, settings, _moved_by(losses, student, methods)) for losses, settings in own.values())
    for share in shares:
        _check_moved(share, student, methods)
    return shares


def _moved_by(losses: Set[str], student: nn.Module, methods: Mapping[str, Method]) -> list[nn.Parameter]:
    """What the optimizer of these losses changes, in an order that all ranks have."""
    moved = dict.fromkeys(student.parameters() if "task" in losses else ())
    for key, method in methods.items():
        for term in method.terms:
            if f"{key}/{term}" in losses:
                moved |= dict.fromkeys(method.moved_by(term, student))
        if not method.terms and "task" in losses:  # it has a warm-up stage alone, in which there is one optimizer
            moved |= dict.fromkeys(method.parameters())
    return list(moved)


def _check_moved(share: Share, student: nn.Module, methods: Mapping[str, Method]) -> None:
    """Refuse terms whose gradient would change more than they say: an optimizer has one gradient, of all its losses."""
    for key, method in methods.items():
        trained = [parameter for parameter in share.parameters if parameter.requires_grad]
        reached = {*student.parameters(), *method.parameters()}.intersection(trained)
        for term in method.terms:
            if f"{key}/{term}" in share.losses and reached.difference(method.moved_by(term, student)):
                raise ExperimentError(
                    f"distill.method: {key}'s {term} changes less than the losses beside it in its optimizer: write one of its"
                    f" own, optim.losses: {{{key}/{term}: {{}}}}, with optim.name sgd or adamw"
                )


def own_losses(methods: Mapping[str, Method], optim: OptimConfig) -> dict[str, tuple[frozenset[str], OptimConfig]]:
    """The losses with an optimizer of their own, as `optim.losses` names them: each with what it adds up, and its settings.

    Those of `optim.losses` in its order, then those that methods declare (`Method.optimizers`). A method's loss is made of its
    terms that have none of their own.

    Raises:
        ExperimentError: `optim.losses` names a loss that there is none of, a method declares an optimizer for a term that it does
            not have, or beside `optim.name: dot`; or the settings of a loss exclude each other.
    """
    declared = {f"{key}/{term}": settings for key, method in methods.items() for term, settings in method.optimizers.items()}
    every = _every_loss(methods)
    if unknown := next((name for name in declared if name not in every), None):
        key, _, term = unknown.partition("/")
        raise ExperimentError(
            f"distill.method: {key} declares an optimizer for {term!r}, which is no term of it: name one in terms"
        )
    if declared and optim.name == "dot":
        key, _, _ = next(iter(declared)).partition("/")
        raise ExperimentError(
            f"optim.name: {key} brings optimizers of its own, and dot has others: set optim.name to sgd or adamw"
        )
    names = dict.fromkeys([*optim.losses, *declared])
    alone = every & names.keys()
    whole = {key: _losses_of(key, method) - alone for key, method in methods.items()}
    losses = {**{name: frozenset({name}) for name in every}, **{key: terms for key, terms in whole.items() if terms}}
    if unknown := next((name for name in sorted(names) if name not in losses), None):
        known = ", ".join(sorted({"task", *declared, *(key for key, terms in whole.items() if terms)}))
        raise ExperimentError(f"optim.losses: there is no loss {unknown!r} here: write one of {known}, or METHOD/TERM")
    return {name: (losses[name], _settings(name, optim, declared.get(name))) for name in names}


def _settings(name: str, optim: OptimConfig, declared: LossOptimConfig | None) -> OptimConfig:
    """Those of one loss, which keep the rules of the whole section."""
    own, section = optim.for_loss(name, declared), f"optim.losses.{name}."
    problem = nesterov_has_momentum(own, section) or warmup_leaves_an_epoch(own, own.epochs, section=section)
    if problem is not None:
        raise ExperimentError(problem)
    return own


def _every_loss(methods: Mapping[str, Method]) -> frozenset[str]:
    return frozenset({"task"}).union(*(_losses_of(key, method) for key, method in methods.items()))


def _losses_of(key: str, method: Method) -> frozenset[str]:
    return frozenset(f"{key}/{term}" for term in method.terms)


def average(gradients: Sequence[Tensor | None], group: Group) -> list[Tensor | None]:
    """Each gradient's mean over ranks, in one all-reduce; what no loss reaches stays None, as on every rank."""
    if group.world_size == 1:
        return list(gradients)
    some = [gradient for gradient in gradients if gradient is not None]
    if not some:
        return list(gradients)
    flat = _flatten_dense_tensors(some)
    dist.all_reduce(flat)
    flat /= group.world_size
    means = iter(_unflatten_dense_tensors(flat, some))
    return [None if gradient is None else next(means) for gradient in gradients]


def _put(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None]) -> None:
    """In the parameter's own memory order, as autograd leaves a gradient itself: fused optimizers read both by address."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient


def _shared(updates: Sequence[Update]) -> list[nn.Parameter]:
    """The parameters that more than one optimizer changes."""
    seen: dict[nn.Parameter, int] = {}
    for update in updates:
        for parameter in update.parameters:
            seen[parameter] = seen.get(parameter, 0) + 1
    return [parameter for parameter, count in seen.items() if count > 1]
