"""Rules about the methods of an experiment: they exist, have the options that are written, and get what they need.

Importing this costs no torch. A method is loaded, and torch with it, only where its options or its needs decide.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from pydantic import ValidationError

from service.config.messages import SETTABLE, ConfigProblems, problems_of
from service.config.schema import Experiment, is_loss, weighted_methods
from service.config.sweep import SweepConfig
from trainables.config import DistillConfig
from trainables.errors import ExperimentError
from trainables.methods.method_file import file_of, option_key
from trainables.methods.registry import METHODS, check_name, load_method
from trainables.rules import Problem, first_problem_of_method, num_micro_batches

MethodFiles = Literal["run", "run if present", "ignore"]
"""What a check does with methods that are files (`FILE.py:CLASS`), whose code runs when they are loaded."""


def needs_teacher(distill: DistillConfig, searched: Collection[str]) -> bool:
    """Whether one of the methods, or one that a sweep over the `searched` keys may choose, reads a teacher."""
    if distill.method == ("kd",) or any(key.startswith("distill.method") for key in searched):
        return True
    return any(load_method(name).requires.teacher for name in distill.method)


def method_names(experiment: Experiment) -> list[str]:
    """The methods of an experiment and those that its sweep may choose, each once."""
    return list(dict.fromkeys([*experiment.distill.method, *_searched_methods(experiment.sweep)]))


def check_methods(experiment: Experiment, files: MethodFiles = "run") -> None:
    """Refuse methods that do not exist, options that they do not have, and what a method cannot work with.

    Raises ConfigProblems.
    """
    paths = [path for name in method_names(experiment) if (path := file_of(name)) is not None]
    if paths and (files == "ignore" or (files == "run if present" and not all(path.is_file() for path in paths))):
        return
    try:
        _check_options_of_all(experiment)
        for key, rule in _RULES:
            if problem := rule(experiment):
                raise ConfigProblems([(key, problem)])
    except ExperimentError as error:
        raise ConfigProblems([(error.key, str(error))]) from error


def _check_options_of_all(experiment: Experiment) -> None:
    distill, searched = experiment.distill, _searched_methods(experiment.sweep)
    for name in distill.method:
        check_name(name)
    for key, options in distill.options.items():
        named = [name for name in (*distill.method, *searched) if option_key(name) == key]
        for name in dict.fromkeys(named or [key]):
            if name not in distill.method:
                check_name(name, searched.get(name, f"distill.options.{key}"))
            check_options(name, options)
    for name in distill.method:  # one of ours works without options, and is not loaded to find that out
        if name not in METHODS and option_key(name) not in distill.options:
            check_options(name, {})


def check_options(name: str, options: Mapping[str, object], missing: str = SETTABLE) -> None:
    """Refuse options that the method does not have or that it lacks, or invalid values. `missing`: see `problems_of`.

    Raises:
        ConfigProblems: one line for each.
        ExperimentError: the method cannot be loaded.
    """
    section = load_method(name).Options
    try:
        section.model_validate(options)
    except ValidationError as error:
        raise problems_of(error, section, prefix=f"distill.options.{option_key(name)}.", missing=missing) from error


def _searched_methods(sweep: SweepConfig) -> dict[str, str]:
    """The methods that a sweep may choose → the key that names them. A malformed space is refused elsewhere."""
    values = sweep.axes.get("distill.method")
    key = f"sweep.{'points' if sweep.points else 'space'}.distill.method"
    several = [value if isinstance(value, list) else [value] for value in (values if isinstance(values, list) else [])]
    return {name: key for names in several for name in names if isinstance(name, str) and name != "none"}


def _some_loss_counts(experiment: Experiment) -> Problem:
    if not experiment.distills or experiment.distill.task_weight != 0 or weighted_methods(experiment.distill):
        return None
    return "distill.task_weight: it and the weights of all methods are 0: nothing would be learned; set one above 0"


def _losses_exist(experiment: Experiment) -> Problem:
    methods = [option_key(name) for name in experiment.distill.method]
    unknown = sorted(key for key in experiment.optim.losses if not is_loss(key, methods))
    if not unknown or not experiment.distills:
        return None
    return f"optim.losses: there is no loss {unknown[0]!r} here: write one of {', '.join(sorted(['task', *methods]))}"


def _logits_are_enough(experiment: Experiment) -> Problem:
    """Raises ExperimentError too, see `check_logits_only`."""
    distill, teacher = experiment.distill, experiment.teacher
    only_kd = distill.method == ("kd",) and not distill.options
    if teacher is not None and teacher.logits_only is not None and experiment.distills and not only_kd:
        from trainables.methods.select import check_logits_only, select_methods

        check_logits_only(select_methods(distill), teacher)
    return None


def _assistants_have_classifiers(experiment: Experiment) -> Problem:
    if not experiment.assistants or not experiment.distills or experiment.distill.method == ("kd",):
        return None
    name = next((name for name in experiment.distill.method if load_method(name).requires.reuses_classifier), None)
    if name is None:
        return None
    return (
        f"distill.method: {name} gives each model the classifier of its teacher, and an assistant would have one that is"
        " not its own: leave out assistants"
    )


def _several_teachers_are_enough(experiment: Experiment) -> Problem:
    """Raises ExperimentError too, see `check_ensemble`."""
    if experiment.teacher is not None and experiment.teacher.others and experiment.distill.method != ("kd",):
        from trainables.methods.select import check_ensemble, select_methods

        check_ensemble(select_methods(experiment.distill), experiment.teacher)
    return None


def _methods_have_what_they_need(experiment: Experiment) -> Problem:
    only_kd = experiment.distill.method == ("kd",)
    limits = experiment.data.device_augment.mixes or num_micro_batches(experiment) > 1 or experiment.teacher is None
    if only_kd or not limits or not experiment.distills:  # no method is loaded for nothing
        return None
    problems = (first_problem_of_method(name, load_method(name).requires, experiment) for name in experiment.distill.method)
    return next((problem for problem in problems if problem is not None), None)


def _dot_has_a_method(experiment: Experiment) -> Problem:
    methods = _searched_methods(experiment.sweep) or (experiment.distills and weighted_methods(experiment.distill))
    if experiment.optim.name != "dot" or methods:
        return None
    return "optim.name: dot has a momentum for the labels and one for methods, and there is none: write sgd"


_RULES: tuple[tuple[str, Callable[[Experiment], Problem]], ...] = (
    ("distill.task_weight", _some_loss_counts),
    ("optim.losses", _losses_exist),
    ("distill.method", _logits_are_enough),
    ("distill.method", _assistants_have_classifiers),
    ("distill.method", _several_teachers_are_enough),
    ("distill.method", _methods_have_what_they_need),
    ("optim.name", _dot_has_a_method),
)
"""Rules with the dotted key that each is about."""
