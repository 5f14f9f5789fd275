"""Whether the methods of an experiment exist, can be told what they are told, and get what they need.

Importing this costs no torch. A method is loaded, and torch with it, only where its options or its needs decide.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from pydantic import ValidationError

from service.config.messages import SETTABLE, explain
from service.config.sweep import SweepConfig
from trainables.config import AssistantConfig, DataConfig, DistillConfig, OptimConfig, ScaleConfig, TeacherConfig
from trainables.errors import ExperimentError
from trainables.methods import METHODS, check_name, load, option_key


class Said(Protocol):
    """What of an experiment its methods depend on."""

    @property
    def distill(self) -> DistillConfig: ...
    @property
    def teacher(self) -> TeacherConfig | None: ...
    @property
    def assistants(self) -> tuple[AssistantConfig, ...]: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def scale(self) -> ScaleConfig: ...
    @property
    def sweep(self) -> SweepConfig: ...


def distills(experiment: Said) -> bool:
    """Whether the student has more than labels to learn from: a teacher, or a method that does without one."""
    method = experiment.distill.method
    return bool(method) and (experiment.teacher is not None or method != ("kd",))


def own_optimizers(optim: OptimConfig, distill: DistillConfig | None) -> OptimConfig:
    """The section with optimizers for losses that there are: no method's without `distill`, and none of a method of weight 0."""
    weighed = _weighed(distill) if distill is not None else []
    losses = {key: own for key, own in optim.losses.items() if _is_loss(key, weighed)}
    return optim.model_copy(update={"losses": losses})


def _is_loss(key: str, methods: Collection[str]) -> bool:
    """Whether a key of `optim.losses` names the labels' loss, or that of one of these methods or a term of it."""
    return key == "task" or key.partition("/")[0] in methods


def _weighed(distill: DistillConfig) -> list[str]:
    """The keys of the methods that are not given the weight 0."""
    return [key for key in map(option_key, distill.method) if distill.options.get(key, {}).get("weight") != 0]


def needs_teacher(distill: DistillConfig, searched: Collection[str]) -> bool:
    """Whether one of the methods, or one that a sweep over the `searched` keys may choose, reads a teacher."""
    if distill.method == ("kd",) or any(key.startswith("distill.method") for key in searched):
        return True
    return any(load(name).requires.teacher for name in distill.method)


def check_distill(experiment: Said, where: str, sources: Mapping[str, str]) -> None:
    """Refuse methods that do not exist, options that they do not have, and what a method cannot work with.

    Raises:
        ExperimentError: one line a mistake.
    """
    distill = experiment.distill
    searched = _searched_methods(experiment.sweep)
    try:
        for name in distill.method:
            check_name(name)
        for key, options in distill.options.items():
            named = [name for name in (*distill.method, *searched) if option_key(name) == key]
            for name in dict.fromkeys(named or [key]):
                if name not in distill.method:
                    check_name(name, searched.get(name, f"distill.options.{key}"))
                check_options(name, options, where, sources)
        for name in distill.method:  # one of ours works without options, and is not loaded to hear that
            if name not in METHODS and option_key(name) not in distill.options:
                check_options(name, {}, where, sources)
        if distills(experiment):
            _check_needs(experiment)
        if experiment.optim.name == "dot" and not searched and not (distills(experiment) and _weighed(distill)):
            raise ExperimentError(
                "optim.name: dot has a momentum for the labels and one for methods, and there is none: write sgd"
            )
    except WrongOptionsError:
        raise
    except ExperimentError as error:
        key = str(error).partition(":")[0]
        source = next((source for name, source in sources.items() if name == key or name.startswith(f"{key}.")), where)
        raise ExperimentError(f"{source}: {error}") from error


def _searched_methods(sweep: SweepConfig) -> dict[str, str]:
    """The methods that a sweep may choose → the key that names them. A malformed space is refused elsewhere."""
    values = sweep.axes.get("distill.method")
    key = f"{'sweep.points' if sweep.points else 'sweep.space'}: distill.method"
    several = [value if isinstance(value, list) else [value] for value in (values if isinstance(values, list) else [])]
    return {name: key for names in several for name in names if isinstance(name, str) and name != "none"}


class WrongOptionsError(ExperimentError):
    """Its lines already say where each value came from."""


def check_options(
    name: str, options: Mapping[str, object], where: str, sources: Mapping[str, str], missing: str = SETTABLE
) -> None:
    """Refuse options that the method does not have or that it lacks, or values that they cannot take. `missing`: see `explain`.

    Raises:
        WrongOptionsError: one line a mistake.
        ExperimentError: the method cannot be loaded.
    """
    kind = load(name).Options
    try:
        kind.model_validate(options)
    except ValidationError as error:
        below = f"distill.options.{option_key(name)}."
        raise WrongOptionsError(explain(error, kind, where, sources, below=below, missing=missing)) from error


def _check_needs(experiment: Said) -> None:
    distill, mixes, parts = experiment.distill, experiment.data.device_augment.mixes, experiment.optim.accumulate
    if distill.task_weight == 0 and not _weighed(distill):
        raise ExperimentError(
            "distill.task_weight: it and the weights of all methods are 0: nothing would be learned; set one above 0"
        )
    methods = [option_key(name) for name in distill.method]
    if unknown := sorted(key for key in experiment.optim.losses if not _is_loss(key, methods)):
        known = ", ".join(sorted(["task", *methods]))
        raise ExperimentError(f"optim.losses: there is no loss {unknown[0]!r} here: write one of {known}")
    teacher = experiment.teacher
    if teacher is not None and teacher.logits_only is not None and (distill.method != ("kd",) or distill.options):
        from trainables.methods.select import check_logits_only, select_methods

        check_logits_only(select_methods(distill), teacher)
    for name in distill.method if experiment.assistants and distill.method != ("kd",) else ():
        if load(name).requires.reuses_classifier:
            raise ExperimentError(
                f"distill.method: {name} gives each model the classifier of its teacher, and an assistant would have one that is"
                " not its own: leave out assistants"
            )
    if experiment.teacher is not None and experiment.teacher.others and distill.method != ("kd",):
        from trainables.methods.select import select_methods
        from trainables.teachers.ensemble import check_ensemble

        check_ensemble(experiment.teacher, select_methods(distill))
    if distill.method == ("kd",) or not (mixes or parts > 1 or experiment.teacher is None):
        return
    for name in distill.method:
        requires = load(name).requires
        if requires.teacher and experiment.teacher is None:
            raise ExperimentError(f"distill.method: {name} needs a teacher: write teacher.model")
        if requires.hard_labels and mixes:
            raise ExperimentError(
                f"distill.method: {name} needs images of one class each: set data.device_augment.mixup and"
                " data.device_augment.cutmix to 0, or set distill.method to kd"
            )
        if requires.whole_batch and parts > 1:
            raise ExperimentError(
                f"distill.method: {name} compares the samples of a batch, which optim.accumulate {parts} parts:"
                " set optim.accumulate to 1, or use more workers"
            )
        if requires.all_gather and parts > 1 and experiment.scale.num_workers > 1:
            raise ExperimentError(
                f"distill.method: {name} takes up what every worker's samples are answered, and of a short batch one worker has"
                " fewer parts than another: set optim.accumulate to 1, or scale.num_workers to 1"
            )
