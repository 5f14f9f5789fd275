"""The rules of an experiment (`trainables.rules`) and what the driver alone can check: its stages, its sweep, and that its
methods exist and have the options that are written.

Importing this costs no torch. A method is loaded, and torch with it, only where its options or its needs decide.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from service.config.batch_size import with_number
from service.config.messages import problems_of
from service.config.schema import Experiment
from service.config.sweep import TIME, SweepConfig
from trainables.config import DistillConfig
from trainables.config.models import ModelConfig
from trainables.errors import ExperimentError
from trainables.methods.registry import METHODS, check_name, load_method
from trainables.rules import (
    BATCH_RULES,
    METHOD_RULES,
    RULES,
    Rule,
    first_problem,
    first_problem_of_methods,
    labels_are_used,
    without_epoch,
)
from trainables.user_code import file_of, option_key

MethodFiles = Literal["run", "run if present", "ignore"]
"""What a check does with methods that are files (`FILE.py:CLASS`), whose code runs when they are loaded.

Files of models are not run here; with `run` they have to be there."""


def _stage_without_epoch(experiment: Experiment) -> str | None:
    """What leaves no epoch of a stage before the student's."""
    lengths = {"teacher.epochs": experiment.teacher.epochs if experiment.teacher else None}
    lengths |= {f"assistants[{n}].epochs": assistant.epochs for n, assistant in enumerate(experiment.assistants)}
    for key, epochs in lengths.items():
        optim = experiment.optim.model_copy(update={"epochs": epochs, "losses": {}})
        if epochs is not None and (problem := without_epoch(optim)):
            return f"{problem} no epoch of {key} {epochs}"
    return None


def _next_evaluated(experiment: Experiment) -> int | None:
    """The first epoch with an accuracy after asha's first comparison, which has none."""
    grace, every = experiment.sweep.grace_epochs, experiment.train.evaluate_every
    return -(-grace // every) * every if experiment.sweep.policy == "asha" and grace % every else None


_RULES: tuple[Rule, ...] = (
    (
        lambda s: s.sweep.steps and s.sweep.metric == TIME and s.sweep.policy != "guided",
        "sweep.steps: sweep.metric time_to_accuracy trains to the target: leave it out, or set sweep.policy to guided",
    ),
    (
        lambda s: s.distill.teacher_dropping and (len(s.all_teachers) < 2 or s.assistants),
        "distill.teacher_dropping: the student has one teacher: write several in teachers, without assistants, or leave it out",
    ),
    (_stage_without_epoch, "{found}: write less"),
    (
        _next_evaluated,
        "sweep.grace_epochs {s.sweep.grace_epochs}: asha compares trials after so many epochs first, and train.evaluate_every"
        " {s.train.evaluate_every} leaves that one without an accuracy: write {found}, or train.evaluate_every 1",
    ),
    (
        lambda s: s.optim.name == "dot" and not (_searched_methods(s.sweep) or (s.distillation and s.distillation.weighted)),
        "optim.name: dot has one momentum for the labels and one for methods, and there are no methods: write sgd",
    ),
)


def check_rules(experiment: Experiment, files: MethodFiles = "run") -> None:
    """Raise ExperimentError for what does not go together, methods that do not exist, and options that they do not have."""
    problem = first_problem(experiment, BATCH_RULES)
    experiment = with_number(experiment)
    if problem := problem or first_problem(experiment, (*RULES, *_RULES)):
        raise ExperimentError(problem)
    paths = [path for name in method_names(experiment) if (path := file_of(name)) is not None]
    if paths and (files == "ignore" or (files == "run if present" and not all(path.is_file() for path in paths))):
        return

    def methods() -> Sequence[Any]:
        distill = experiment.distillation
        is_plain = distill is not None and distill.method == ("kd",) and not distill.options.get("kd")
        is_plain = is_plain and not experiment.distill.teacher_dropping
        if distill is None or (is_plain and not experiment.optim.losses and experiment.data.labels):
            return ()  # plain kd goes with everything that has labels, and is not loaded
        from trainables.methods.select import select_methods

        return select_methods(distill)

    _check_options_of_all(experiment)
    problem = first_problem_of_methods(methods, experiment, 0, METHOD_RULES)
    if not {"distill.method", "distill.task_weight"} & experiment.sweep.axes.keys():  # each point is checked
        problem = problem or labels_are_used(experiment, methods())
    if problem:
        raise ExperimentError(problem)


def needs_teacher(distill: DistillConfig, searched: Collection[str]) -> bool:
    """Whether one of the methods, or one that a sweep over the `searched` keys may choose, reads a teacher."""
    if distill.method == ("kd",) or any(key.startswith("distill.method") for key in searched):
        return True
    return any(load_method(name).requires.teacher for name in distill.method)


def reads_teacher_classes(experiment: Experiment) -> bool:
    """Whether one of the methods, or one that the sweep may choose, reads what a teacher says of the classes: loads them."""
    from trainables.methods.select import select_methods

    chosen = [method.requires for method in select_methods(experiment.distill)]
    searched = [load_method(name).requires for name in _searched_methods(experiment.sweep)]
    return any(each.teacher and each.reads_classes for each in (*chosen, *searched))


def method_names(experiment: Experiment) -> list[str]:
    """The methods of an experiment and those that its sweep may choose, each once."""
    return list(dict.fromkeys([*experiment.distill.method, *_searched_methods(experiment.sweep)]))


def model_names(experiment: Experiment) -> dict[str, str]:
    """The keys of an experiment that name a model, each with its name."""
    sections: dict[str, ModelConfig | None] = {"teacher.model": experiment.teacher, "student.model": experiment.student}
    sections |= {f"teachers[{n}].model": teacher for n, teacher in enumerate(experiment.teachers)}
    sections |= {f"assistants[{n}].model": assistant for n, assistant in enumerate(experiment.assistants)}
    found = {key: section.model for key, section in sections.items() if section is not None}
    searched = experiment.sweep.axes.get("student.model")
    values = searched if isinstance(searched, list) else []
    key = f"{experiment.sweep.searched}.student.model"
    return found | {f"{key}[{n}]": name for n, name in enumerate(values) if isinstance(name, str)}


def _check_options_of_all(experiment: Experiment) -> None:
    distill, chosen = experiment.distill, dict.fromkeys(experiment.distill.method, "distill.method")
    named = _searched_methods(experiment.sweep) | chosen
    keys = {option_key(name) for name in named}
    unused = {key: f"distill.options.{key}" for key in distill.options if key not in keys}
    for name, where in (named | unused).items():
        options = distill.options.get(option_key(name))
        if name in chosen or options is not None:
            check_name(name, where)
        if options is not None or (name in chosen and name not in METHODS):  # one of ours works without, and is not loaded
            check_options(name, options or {})


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Refuse options that a method does not have or lacks, or invalid values. Raises ExperimentError: one line for each."""
    section = load_method(name).Options
    try:
        section.model_validate(options)
    except ValidationError as error:
        raise problems_of(error, section, prefix=f"distill.options.{option_key(name)}.") from error


def _searched_methods(sweep: SweepConfig) -> dict[str, str]:
    """The methods that a sweep may choose → the key that names them. A malformed space is refused elsewhere."""
    values, key = sweep.axes.get("distill.method"), f"{sweep.searched}.distill.method"
    several = [value if isinstance(value, list) else [value] for value in (values if isinstance(values, list) else [])]
    return {name: key for names in several for name in names if isinstance(name, str) and name != "none"}
