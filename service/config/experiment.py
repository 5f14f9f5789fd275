"""An experiment: one YAML file and its overrides, validated.

A file may name a `base` (a recipe or another file) and change only what differs. Every value remembers where it came from.
"""

from __future__ import annotations

import copy
import os
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
from service.config.messages import ConfigProblems, known_keys, nearest, problems_of, with_sources
from service.config.paths import absolute_paths
from service.config.rules import MethodFiles, check_rules, model_names
from service.config.schema import MAX_NAME, Experiment
from service.config.space import GLOBAL_BATCH, check_space
from service.config.sweep import SweepConfig
from service.config.uris import secret_refusal
from trainables.data.source import SOURCES
from trainables.errors import ExperimentError, ModelError
from trainables.models.model_input import trained_input
from trainables.models.names import check_model_name, library_of
from trainables.redact import redact_values
from trainables.user_code import read_source

TRACKING_URI = "MLFLOW_TRACKING_URI"
"""The environment variable from which MLflow's clients take the store; it replaces an absent `tracking.uri`."""


@dataclass(frozen=True)
class Resolved:
    """An experiment and where its values came from: dotted key → FILE:LINE:COLUMN, recipe, override or variable; absent: the
    default."""

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
        put(tree, point, source)
        experiment = _readable(tree, source) if reading else validate(tree, source)
        return Resolved(experiment, {**self.sources, **dict.fromkeys(point, source)})


def load(recipe_or_file: str, overrides: Sequence[str] = (), *, method_files: MethodFiles = "run") -> Resolved:
    """Read a recipe or a YAML file, apply its bases and `--set` overrides, check everything; its paths are absolute then.

    Raises ExperimentError: a line for each problem, six at most.
    """
    written = read_experiment_file(recipe_or_file)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_or_file).stem).lstrip("-._")
    written.tree.setdefault("name", stem[:MAX_NAME] or "experiment")
    tree, marks = copy.deepcopy(written.tree), written.marks
    for text in overrides:
        key, value = parse_override(text)
        put(tree, {key: value}, f"--set {text}")
        marks = {name: mark for name, mark in marks.items() if not name.startswith(f"{key}.")}
        marks |= dict.fromkeys([key, *flatten({key: value})], "--set")
    values = flatten(tree)
    if (uri := os.environ.get(TRACKING_URI)) and "tracking.uri" not in values and values.get("tracking.enabled") is not False:
        put(tree, {"tracking.uri": uri}, TRACKING_URI)
        marks["tracking.uri"] = TRACKING_URI
    try:
        experiment, sources = _checked(tree, method_files), _of_values(marks, tree)
        if own := _own_input(experiment, tree):
            put(tree, own, written.where)
            name, weights = experiment.student.model, experiment.student.weights
            sources |= dict.fromkeys(own, f"{name}'s own" if weights is None else f"{weights} of {name}")
            experiment = _checked(tree, method_files)
        return Resolved(_with_absolute_paths(experiment), sources)
    except ExperimentError as error:
        if overrides and _is_valid(written.tree, method_files):  # then the overrides are what is wrong
            raise with_sources(error, "--set") from error
        raise with_sources(error, written.where, marks) from error


def _of_values(marks: Mapping[str, str], tree: Mapping[str, Any]) -> dict[str, str]:
    """The places of values, without those of sections: what a section does not say is a default."""
    return {key: marks[key] for key in flatten(tree) if key in marks}


def _own_input(experiment: Experiment, tree: Mapping[str, Any]) -> dict[str, Any]:
    """What the student's input is made for, by keys of `data` that are not written: the size, and of weights the normalization.

    Images that are no files have a size of their own.
    """
    student = experiment.student
    record = trained_input(student.model, student.weights) if student.weights is not None else None
    library, name = library_of(student.model)
    own: dict[str, Any] = {"data.image_size": record.image_size if record is not None else library.default_size(name)}
    if record is not None and record.mean:
        own |= {"data.mean": list(record.mean), "data.std": list(record.std)}
    if experiment.data.path in SOURCES:
        del own["data.image_size"]
    written = {f"data.{key}" for key in tree.get("data", {})} | experiment.sweep.axes.keys()
    own = {key: value for key, value in own.items() if value is not None and key not in written}
    if "student.model" in experiment.sweep.axes and own:
        key = min(own)
        raise ExperimentError.of_key(key, "the students of a sweep see the same crops: write it")
    return own


def _with_absolute_paths(experiment: Experiment) -> Experiment:
    """The experiment as it is understood from any directory: relative paths begin in this one."""
    tree = experiment.model_dump(mode="json")
    put(tree, absolute_paths(tree), "paths")
    return Experiment.model_validate(tree)


def parse_override(text: str, option: str = "--set") -> tuple[str, Any]:
    """The dotted key and the value of one `--set`, or of another option like it. Raises ExperimentError: not KEY=VALUE."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value or not all(key.split(".")):
        raise ExperimentError(f"{option} {text}: write {option} key=value")
    try:
        return key, strict_yaml.parse(value, f"{option} {text}")
    except ExperimentError as error:
        raise ExperimentError(f"{error}; what has spaces needs quotes: {option} '{key}=…'") from error


def read_resolved(path: Path, *, reading: bool = False) -> Resolved:
    """The `experiment.yaml` of a run directory.

    `reading`: the run is not carried out. Rules between keys, names of models and methods, their options and the space of a sweep
    are not checked; no method's file is needed or run.

    Raises ExperimentError.
    """
    written = read_experiment_file(str(path))
    read = _readable if reading else validate
    return Resolved(read(written.tree, written.where, written.marks), _of_values(written.marks, written.tree))


def validate(tree: Mapping[str, Any], where: str, sources: Mapping[str, str] | None = None) -> Experiment:
    """A checked experiment. `sources`: dotted key → where its value came from, if that is not `where`. Raises ExperimentError."""
    try:
        return _checked(tree, "run")
    except ExperimentError as error:
        raise with_sources(error, where, sources) from error


def _readable(tree: Mapping[str, Any], where: str, marks: Mapping[str, str] | None = None) -> Experiment:
    """An experiment that is only read, see `read_resolved`. Raises ExperimentError: one line, on the first problem."""
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        problem = str(with_sources(problems_of(error, Experiment), where, marks)).partition("\n")[0]
        raise ExperimentError(f"{problem}; if another version of raydistill wrote this run, read it with that one") from error


def _is_valid(tree: Mapping[str, Any], method_files: MethodFiles) -> bool:
    try:
        _checked(tree, method_files)
    except ExperimentError:
        return False
    return True


def _checked(tree: Mapping[str, Any], method_files: MethodFiles) -> Experiment:
    """The validated experiment. Raises ExperimentError."""
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise problems_of(error, Experiment) from error
    check_rules(experiment, method_files)
    for key, name in model_names(experiment).items():
        _check_model(key, name, method_files)
    _check_sweep(experiment.sweep)
    _check_secrets(experiment)
    return experiment


def _check_model(key: str, name: str, method_files: MethodFiles) -> None:
    """Refuse a model that does not exist, and a file that does not unless files are ignored; imports no torch."""
    try:
        check_model_name(name)
        if method_files == "run":
            read_source(name, key)
    except ModelError as error:
        raise ExperimentError.of_key(key, str(error)) from error


def _check_secrets(experiment: Experiment) -> None:
    """Refuse passwords and keys in values: the experiment is written into every record of its runs."""
    values = flatten(experiment.model_dump(mode="json"))
    found = [(key, secret_refusal(key, value)) for key, value in values.items() if redact_values(value) != value]
    if found:
        raise ConfigProblems(found)


def _check_sweep(sweep: SweepConfig) -> None:
    """Refuse a space that cannot be searched as it is written."""
    check_space(sweep.space, sweep.policy)
    keys = known_keys(Experiment)
    for key, values in sweep.axes.items():
        known = key in keys or (key.startswith("distill.options.") and key.count(".") == 3)
        if not known or key.startswith(("sweep", "tracking", "name")):
            problem = f"no such key to search over{'' if known else nearest(key, keys)}"
        elif key.startswith(("teacher", "assistants")):
            problem = "one teacher is prepared and shared by all trials: run a sweep for each teacher"
        elif key == GLOBAL_BATCH and isinstance(values, list) and AUTO in values:
            problem = f"{AUTO} is decided when `distill train` begins: list numbers"
        else:
            continue
        raise ExperimentError.of_key(sweep.searched, f"{key}: {problem}")
