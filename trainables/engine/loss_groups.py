"""Which losses share an optimizer, with which settings, and which parameters it changes. Nothing is trained here."""

from collections.abc import Mapping, Set
from typing import NamedTuple

from torch import nn

from trainables.config import LossOptimConfig, OptimConfig
from trainables.engine.optim import OPTIMIZERS
from trainables.errors import ExperimentError
from trainables.methods.contract import Method
from trainables.rules import nesterov_has_momentum, warmup_leaves_an_epoch

LossKeys = frozenset[str]
"""`task`, and `method/term` of terms of methods."""


class LossGroup(NamedTuple):
    """Losses that share an optimizer, its settings, and the parameters it changes."""

    losses: LossKeys
    optim: OptimConfig
    parameters: list[nn.Parameter]


def group_losses(student: nn.Module, methods: Mapping[str, Method], optim: OptimConfig) -> tuple[LossGroup, ...]:
    """Every loss of a job, each in one group.

    The labels' loss, `task`, changes the student; a method's loss changes the student and the method's own parameters, unless
    the method declares fewer (`Method.term_parameters`).

    Raises ExperimentError: see `separate_losses`; or a term would change more than it declares, in an optimizer that it shares.
    """
    groups = separate_losses(methods, optim)
    shared = optim
    if optim.name == "dot":
        shared = optim.model_copy(update={"name": "sgd"})
        groups["task"] = frozenset({"task"}), shared
    rest = _all_losses(methods).difference(*(losses for losses, _ in groups.values()))
    if rest:
        groups["the rest"] = rest, shared
    found = tuple(LossGroup(losses, settings, _parameters_of(losses, student, methods)) for losses, settings in groups.values())
    for group in found:
        _check_parameters(group, student, methods)
    return found


def separate_losses(methods: Mapping[str, Method], optim: OptimConfig) -> dict[str, tuple[LossKeys, OptimConfig]]:
    """The losses with an optimizer of their own, under the names that `optim.losses` uses: what each adds up, its settings.

    Those of `optim.losses` in its order, then those that methods declare (`Method.optimizers`). A method's loss is made of its
    terms that have none of their own.

    Raises ExperimentError: `optim.losses` names a loss that does not exist; a method declares an optimizer for a term that it
    does not have, or next to `optim.name: dot`; or the settings of a loss exclude each other.
    """
    declared = {f"{key}/{term}": settings for key, method in methods.items() for term, settings in method.optimizers.items()}
    _check_declared(declared, _all_losses(methods), optim)
    names = dict.fromkeys([*optim.losses, *declared])
    losses = {name: frozenset({name}) for name in _all_losses(methods)}
    of_methods = {key: _losses_of(key, method) - names.keys() for key, method in methods.items()}
    losses |= {key: terms for key, terms in of_methods.items() if terms}
    unknown = next((name for name in sorted(names) if name not in losses), None)
    if unknown is not None:
        known = ", ".join(sorted({"task", *declared, *(key for key, terms in of_methods.items() if terms)}))
        raise ExperimentError(f"optim.losses: there is no loss {unknown!r} here: write one of {known}, or METHOD/TERM")
    return {name: (losses[name], _settings(name, optim, declared.get(name))) for name in names}


def _check_declared(declared: Mapping[str, LossOptimConfig], losses: LossKeys, optim: OptimConfig) -> None:
    """Refuse optimizers that methods declare for terms that they do not have, or next to `optim.name: dot`."""
    unknown = next((name for name in declared if name not in losses), None)
    if unknown is not None:
        key, _, term = unknown.partition("/")
        raise ExperimentError(
            f"distill.method: {key} declares an optimizer for {term!r}, which is no term of it: name one in terms"
        )
    if declared and optim.name == "dot":
        key, _, _ = next(iter(declared)).partition("/")
        raise ExperimentError(
            f"optim.name: {key} brings optimizers of its own, and dot has others: set optim.name to {' or '.join(OPTIMIZERS)}"
        )


def _settings(name: str, optim: OptimConfig, declared: LossOptimConfig | None) -> OptimConfig:
    """The settings of one loss, checked as those of the whole section are."""
    settings, section = optim.for_loss(name, declared), f"optim.losses.{name}."
    problem = nesterov_has_momentum(settings, section) or warmup_leaves_an_epoch(settings, settings.epochs, section=section)
    if problem is not None:
        raise ExperimentError(problem)
    return settings


def _parameters_of(losses: Set[str], student: nn.Module, methods: Mapping[str, Method]) -> list[nn.Parameter]:
    """The parameters that these losses' optimizer changes, in an order that is the same on all ranks."""
    parameters = dict.fromkeys(student.parameters() if "task" in losses else ())
    for key, method in methods.items():
        for term in method.terms:
            if f"{key}/{term}" in losses:
                parameters |= dict.fromkeys(method.term_parameters(term, student))
    return list(parameters)


def _check_parameters(group: LossGroup, student: nn.Module, methods: Mapping[str, Method]) -> None:
    """Refuse terms whose gradient would change more than they declare: an optimizer has one gradient, of all its losses."""
    for key, method in methods.items():
        trained = [parameter for parameter in group.parameters if parameter.requires_grad]
        reached = {*student.parameters(), *method.parameters()}.intersection(trained)
        for term in method.terms:
            if f"{key}/{term}" in group.losses and reached.difference(method.term_parameters(term, student)):
                raise ExperimentError(
                    f"distill.method: {key}'s {term} changes less than the losses beside it in its optimizer: write one of its"
                    f" own, optim.losses: {{{key}/{term}: {{}}}}, with optim.name {' or '.join(OPTIMIZERS)}"
                )


def _all_losses(methods: Mapping[str, Method]) -> LossKeys:
    return frozenset({"task"}).union(*(_losses_of(key, method) for key, method in methods.items()))


def _losses_of(key: str, method: Method) -> LossKeys:
    return frozenset(f"{key}/{term}" for term in method.terms)
