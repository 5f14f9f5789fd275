"""An experiment: one YAML file and its overrides, validated.

A file may name a `base` (a recipe or another file) and change only what differs. Every value remembers where it came from.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.config import strict_yaml
from service.config.batch_size import AUTO
from service.config.dotted import flatten, put
from service.config.files import read_experiment_file
from service.config.messages import SETTABLE, ConfigProblems, known_keys, nearest, problems_of
from service.config.paths import absolute_paths
from service.config.rules import MethodFiles, check_rules, model_names
from service.config.schema import MAX_NAME, Experiment
from service.config.space import GLOBAL_BATCH, SpaceError, check_space
from service.config.sweep import SweepConfig
from service.config.uris import checked_uri, secret_refusal
from trainables.data.source import SOURCES
from trainables.errors import ExperimentError, ModelError
from trainables.models.names import check_model_name, library_of
from trainables.models.trained_input import trained_input
from trainables.redact import redact_values
from trainables.user_code import read_source


@dataclass(frozen=True)
class Resolved:
    """An experiment and, per dotted key, which file, recipe or override its value came from (absent: the default)."""

    experiment: Experiment
    sources: dict[str, str]

    def to_yaml(self) -> str:
        """The resolved experiment; reading it back gives the same experiment."""
        return strict_yaml.dump(self.experiment.model_dump(mode="json"))

    def override(self, point: Mapping[str, Any], source: str, *, reading: bool = False) -> Resolved:
        """The experiment with dotted keys replaced, checked again, but for rules where it is only read, see `read_resolved`.

        Raises ExperimentError: a key or a value that does not exist or does not fit.
        """
        tree = self.experiment.model_dump(mode="json")
        for key, value in point.items():
            put(tree, key, value, source)
        experiment = _readable(tree, source) if reading else validate(tree, source)
        return Resolved(experiment, {**self.sources, **dict.fromkeys(point, source)})


def load(recipe_or_file: str, overrides: Sequence[str] = (), *, method_files: MethodFiles = "run") -> Resolved:
    """Read a recipe or a YAML file, apply its bases and `--set` overrides, check everything; its paths are absolute then.

    Raises ExperimentError: a line for each problem, six at most.
    """
    written = read_experiment_file(recipe_or_file)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_or_file).stem).lstrip("-._")
    written.tree.setdefault("name", stem[:MAX_NAME] or "experiment")
    tree, sources, marks = copy.deepcopy(written.tree), written.sources, written.marks
    for text in overrides:
        key, value = parse_override(text)
        if key.partition(".")[0] == "base":
            raise ExperimentError(
                f"--set {text}: only a file has a base: write `base: {value}` in it, or give {value} in place of the file"
            )
        put(tree, key, value, f"--set {text}")
        sources, marks = (
            {name: source for name, source in known.items() if not name.startswith(f"{key}.")} | {key: "--set"}
            for known in (sources, marks)
        )
    try:
        experiment = _checked(tree, method_files)
        if own := _own_input(experiment, tree):
            for key, value in own.items():
                put(tree, key, value, written.where)
            name, weights = experiment.student.model, experiment.student.weights
            sources = {**sources, **dict.fromkeys(own, f"{name}'s own" if weights is None else f"{weights} of {name}")}
            experiment = _checked(tree, method_files)
        return Resolved(_with_absolute_paths(experiment), sources)
    except ConfigProblems as problems:
        if overrides and _is_valid(written.tree, method_files):  # then the overrides are what is wrong
            raise ExperimentError(problems.text("--set")) from problems
        raise ExperimentError(problems.text(written.where, {**sources, **marks})) from problems


def _own_input(experiment: Experiment, tree: Mapping[str, Any]) -> dict[str, Any]:
    """What the student's input is made for, by keys of `data` that are not written: the size, and of weights the normalization.

    Images that are no files have a size of their own.
    """
    student, own = experiment.student, dict[str, Any]()
    if (record := trained_input(student.model, student.weights) if student.weights is not None else None) is not None:
        own = {"data.image_size": record.image_size}
        own |= {"data.mean": list(record.mean), "data.std": list(record.std)} if record.mean else {}
    else:
        library, name = library_of(student.model)
        own = {"data.image_size": library.default_size(name)}
    written = {f"data.{key}" for key in tree.get("data", {})} | experiment.sweep.axes.keys()
    own = {key: value for key, value in own.items() if value is not None and key not in written}
    if experiment.data.path in SOURCES:
        own.pop("data.image_size", None)
    if "student.model" in experiment.sweep.axes and own:
        problem = f"{min(own)}: the students of a sweep see the same crops: write it"
        raise ConfigProblems([(min(own), problem)])
    return own


def _with_absolute_paths(experiment: Experiment) -> Experiment:
    """The experiment as it is understood from any directory: relative paths begin in this one."""
    tree = experiment.model_dump(mode="json")
    for key, value in absolute_paths(tree).items():
        put(tree, key, value, key)
    return Experiment.model_validate(tree)


def parse_override(text: str, option: str = "--set") -> tuple[str, Any]:
    """The dotted key and the value of one `--set`, or of another option like it. Raises ExperimentError: not KEY=VALUE."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value or not all(key.split(".")):
        such = "data.global_batch_size=256" if option == "--set" else "weight=2"
        raise ExperimentError(f"{option} {text}: write {option} key=value, such as {option} {such}")
    try:
        return key, strict_yaml.parse(value, f"{option} {text}")
    except ExperimentError as error:
        if value[0] in "[{" and value[-1] not in "]}":
            split = f"{option} {text}: ends inside its brackets: where a shell has split it at a space, write {option} '{key}=…'"
            raise ExperimentError(f"{split} in quotes") from error
        raise


def read_resolved(path: Path, *, reading: bool = False) -> Resolved:
    """The `experiment.yaml` of a run directory.

    `reading`: the run is not carried out. Rules between keys, names of models and methods, their options and the space of a sweep
    are not checked; no method's file is needed or run.

    Raises ExperimentError.
    """
    written = read_experiment_file(str(path))
    read = _readable if reading else validate
    return Resolved(read(written.tree, written.where, written.marks), written.sources)


def validate(tree: Mapping[str, Any], where: str, sources: Mapping[str, str] | None = None) -> Experiment:
    """A checked experiment. `sources`: dotted key → where its value came from, if that is not `where`. Raises ExperimentError."""
    try:
        return _checked(tree, "run")
    except ConfigProblems as problems:
        raise ExperimentError(problems.text(where, sources)) from problems


def _readable(tree: Mapping[str, Any], where: str, marks: Mapping[str, str] | None = None) -> Experiment:
    """An experiment that is only read, see `read_resolved`. Raises ExperimentError: one line, on the first problem."""
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        problem = problems_of(error, Experiment).text(where, marks).partition("\n")[0]
        raise ExperimentError(f"{problem}; if another version of raydistill wrote this run, read it with that one") from error


def _is_valid(tree: Mapping[str, Any], method_files: MethodFiles) -> bool:
    try:
        _checked(tree, method_files)
    except ConfigProblems:
        return False
    return True


def _checked(tree: Mapping[str, Any], method_files: MethodFiles) -> Experiment:
    """The validated experiment. Raises ConfigProblems."""
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise problems_of(error, Experiment, missing=SETTABLE) from error
    check_rules(experiment, method_files)
    _check_models(experiment, method_files)
    if experiment.tracking.enabled and experiment.tracking.uri is not None:
        try:
            checked_uri(experiment.tracking.uri)
        except ExperimentError as error:
            raise ConfigProblems([("tracking.uri", str(error))]) from error
    _check_sweep(experiment.sweep)
    _check_secrets(experiment)
    return experiment


def _check_models(experiment: Experiment, method_files: MethodFiles) -> None:
    """Refuse models that do not exist, and files of models that do not unless they are ignored; imports no torch."""
    for key, name in model_names(experiment).items():
        try:
            check_model_name(name)
            if method_files == "run":
                read_source(name, key)
        except (ExperimentError, ModelError) as error:
            raise ConfigProblems([(key, f"{key}: {str(error).removeprefix(f'{key}: ')}")]) from error


def _check_secrets(experiment: Experiment) -> None:
    """Refuse passwords and keys in values: the experiment is written into every record of its runs."""
    values = flatten(experiment.model_dump(mode="json"))
    found = [(key, secret_refusal(key, value)) for key, value in values.items() if redact_values(value) != value]
    if found:
        raise ConfigProblems(found)


def _check_sweep(sweep: SweepConfig) -> None:
    """Refuse a space that cannot be searched as it is written."""
    searched = "sweep.points" if sweep.points else "sweep.space"
    try:
        check_space(sweep.axes, sweep.policy)
    except SpaceError as error:
        raise ConfigProblems([(searched, f"{searched}: {error}")]) from error
    keys = list(known_keys(Experiment))
    for key, values in sweep.axes.items():
        known = key in keys or (key.startswith("distill.options.") and key.count(".") == 3)
        problem = None
        if not known or key.startswith(("sweep", "tracking", "name")):
            problem = f"no such key to search over{'' if known else nearest(key, keys)}"
        elif key.startswith(("teacher", "assistants")):
            problem = "one teacher is prepared and shared by all trials: run a sweep for each teacher"
        elif key == GLOBAL_BATCH and isinstance(values, list) and AUTO in values:
            problem = f"{AUTO} is decided when `distill train` begins: list numbers"
        if problem is not None:
            raise ConfigProblems([(searched, f"{searched}: {key}: {problem}")])
