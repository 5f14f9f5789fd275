"""The experiment: one YAML file and its overrides, validated.

A file may name a `base` (a recipe or another file) and change only what differs. Every value remembers where it came from.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from service.config import strict_yaml
from service.config.dotted import put
from service.config.files import read_experiment_file
from service.config.messages import SETTABLE, ConfigProblems, known_keys, nearest, problems_of
from service.config.method_rules import MethodFiles, check_methods, distills, own_optimizers
from service.config.rules import RULES
from service.config.space import SpaceError, check_space
from service.config.sweep import SweepConfig
from service.config.unknown_keys import validate_known_keys
from service.config.uris import checked_uri
from trainables.config import (
    AssistantConfig,
    DataConfig,
    DistillConfig,
    ModelConfig,
    OptimConfig,
    ScaleConfig,
    Section,
    TeacherConfig,
    TrainConfig,
    TrainingConfig,
)
from trainables.errors import ExperimentError, ModelError
from trainables.models.names import check_model_name
from trainables.rundir import expand_home

MAX_NAME = 150
"""Characters of an experiment's name: its run directories, MLflow runs and Ray jobs are called after it."""


class TrackingConfig(Section):
    """The MLflow store of the records."""

    enabled: bool = Field(True, description="record runs in MLflow")
    uri: str | None = Field(None, description="an MLflow server or database; absent: the SQLite store of the runs' root")
    experiment: str = Field("raydistill", min_length=1, description="name of the MLflow experiment")
    log_model: bool = Field(True, description="log the student as an MLflow model")


class Experiment(Section):
    """Everything that a user may write, validated."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)] = Field(
        "experiment", description="in run directories, MLflow runs and Ray jobs; absent from a file: the file's name"
    )
    data: DataConfig = DataConfig()
    teacher: TeacherConfig | None = None
    assistants: tuple[AssistantConfig, ...] = Field(
        (), description="models between teacher and student: each learns from the one before it, the student from the last"
    )
    student: ModelConfig
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = OptimConfig()
    scale: ScaleConfig = ScaleConfig()
    train: TrainingConfig = TrainingConfig()
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        "fp32", description="bf16, fp16: autocast, with a gradient scaler for fp16; fp64: all of it, for exact comparisons"
    )
    sweep: SweepConfig = SweepConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of initial weights, order of images and augmentation")

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        for rule in RULES:
            if problem := rule(self):
                raise ValueError(problem)
        return self

    @property
    def preparation(self) -> dict[str, TeacherConfig | AssistantConfig]:
        """The stages before the student's, in order, each with the model that it trains: the teacher, then the assistants."""
        assistants = {f"assistant{n}": assistant for n, assistant in enumerate(self.assistants, start=1)}
        return {**({"teacher": self.teacher} if self.teacher else {}), **assistants}

    def written_cache(self, kind: Literal["train", "sweep"]) -> Path | None:
        """The `teacher.cache` into which a run or a sweep writes logits; None: there is none. A timing run writes none."""
        if self.teacher is None or self.teacher.cache is None or not distills(self):
            return None
        timed = self.train.max_steps is not None
        if kind == "sweep":
            timed = self.sweep.timing_steps is not None and not self.sweep.races
        return None if timed and not self.assistants else expand_home(self.teacher.cache).absolute()

    def stage(self, name: str, output_dir: Path, labels: Mapping[str, str], weights: str | None = None) -> TrainConfig:
        """The configuration of the workers of one stage, of the `preparation` or `student`.

        `weights` are those of the stage before it. All stages but the teacher's distil alike.
        """
        before = self.preparation
        model, optim, train, scale = self.student.model, self.optim, self.train, self.scale
        if name in before:
            scale = scale.model_copy(update={"cut": None})
            model = before[name].model
            optim = optim.model_copy(update={"epochs": before[name].epochs or optim.epochs})
            train = train.model_copy(update={"until_top1_pct": None, "until_s": None})
        teacher = distill = None
        if name != "teacher":
            teacher = self._teacher_of(name, weights)
            distill = self.distill if distills(self) else None
        return TrainConfig(
            stage=name,
            output_dir=str(output_dir),
            data=self.data,
            model=model,
            teacher=teacher,
            distill=distill,
            optim=own_optimizers(optim, distill),
            scale=scale,
            train=train,
            precision=self.precision,
            seed=self.seed,
            labels=dict(labels),
        )

    def _teacher_of(self, name: str, weights: str | None) -> TeacherConfig | None:
        """The teacher of a stage after the teacher's, with `weights`: the experiment's, or the assistant before the stage."""
        if self.teacher is None:
            return None
        names = [*self.preparation, name]
        previous = names[names.index(name) - 1]
        teacher = self.teacher
        if previous != "teacher":
            cache = self.teacher.model_dump(include={"cache", "cache_top_k", "cache_epochs"})
            teacher = TeacherConfig(model=self.preparation[previous].model, **cache)
        # The teacher service starts together with the students, after the assistants.
        own: dict[str, Any] = {"service": self.teacher.service if name == "student" else None}
        return teacher.model_copy(update=own if weights is None else {**own, "weights": weights})


@dataclass(frozen=True)
class Resolved:
    """An experiment and, per dotted key, which file, recipe or override its value came from (absent: the default)."""

    experiment: Experiment
    sources: dict[str, str]
    unknown: tuple[str, ...] = ()
    """Keys of another version's file that this one does not know, see `read_resolved`."""

    def to_yaml(self) -> str:
        """The resolved experiment; reading it back gives the same experiment."""
        return strict_yaml.dump(self.experiment.model_dump(mode="json"))

    def override(self, point: Mapping[str, Any], source: str, *, reading: bool = False) -> Resolved:
        """The experiment with dotted keys replaced, checked again. `reading`: see `read_resolved`.

        Raises:
            ExperimentError: a key or a value that does not exist or does not fit.
        """
        tree = self.experiment.model_dump(mode="json")
        for key, value in point.items():
            put(tree, key, value, source)
        experiment = _readable(tree, source)[0] if reading else validate(tree, source)
        return Resolved(experiment, {**self.sources, **dict.fromkeys(point, source)})


def load(recipe_or_file: str, overrides: Sequence[str] = (), *, method_files: MethodFiles = "run") -> Resolved:
    """Read a recipe or a YAML file, apply its bases and `--set` overrides, check everything.

    Raises:
        ExperimentError: with one line for each problem, six at most.
    """
    written = read_experiment_file(recipe_or_file)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_or_file).stem).lstrip("-._")
    written.tree.setdefault("name", stem[:MAX_NAME] or "experiment")
    tree, sources = copy.deepcopy(written.tree), written.sources
    for text in overrides:
        key, value = parse_override(text)
        if key.partition(".")[0] == "base":
            raise ExperimentError(
                f"--set {text}: only a file has a base: write `base: {value}` in it, or give {value} in place of the file"
            )
        put(tree, key, value, f"--set {text}")
        sources = {name: source for name, source in sources.items() if not name.startswith(f"{key}.")} | {key: "--set"}
    try:
        return Resolved(_checked(tree, method_files), sources)
    except ConfigProblems as problems:
        if overrides and _is_valid(written.tree, method_files):  # then the overrides are what is wrong
            raise ExperimentError(problems.text("--set")) from problems
        raise ExperimentError(problems.text(written.where, sources)) from problems


def parse_override(text: str, option: str = "--set") -> tuple[str, Any]:
    """The dotted key and the value of one `--set`, or of another option like it.

    Raises:
        ExperimentError: not KEY=VALUE.
    """
    key, equals, value = text.partition("=")
    if not equals or not value or not all(key.split(".")):
        such = "data.global_batch_size=256" if option == "--set" else "weight=2"
        raise ExperimentError(f"{option} {text}: write {option} key=value, such as {option} {such}")
    return key, strict_yaml.parse(value, f"{option} {text}")


def read_resolved(path: Path, *, reading: bool = False) -> Resolved:
    """The `experiment.yaml` of a run directory.

    `reading`: the run is not carried out. It may be of another version, whose unknown keys are left out; names of models and
    methods, their options and the space of a sweep are not checked; no method's file is needed or run.

    Raises:
        ExperimentError: one line for each problem.
    """
    written = read_experiment_file(str(path))
    if not reading:
        return Resolved(validate(written.tree, written.where), written.sources)
    experiment, unknown = _readable(written.tree, written.where)
    return Resolved(experiment, written.sources, unknown)


def validate(tree: Mapping[str, Any], where: str, sources: Mapping[str, str] | None = None) -> Experiment:
    """A checked experiment. `sources`: dotted key → where its value came from, if that is not `where`.

    Raises:
        ExperimentError: one line for each problem.
    """
    try:
        return _checked(tree, "run")
    except ConfigProblems as problems:
        raise ExperimentError(problems.text(where, sources)) from problems


def _readable(tree: Mapping[str, Any], where: str) -> tuple[Experiment, tuple[str, ...]]:
    """An experiment that is only read, and the keys in it that this version does not know. See `read_resolved`."""
    try:
        return validate_known_keys(Experiment, tree)
    except ValidationError as error:
        text = problems_of(error, Experiment).text(where)
        raise ExperimentError(f"{text}; if another version wrote it, change or remove it there to read this run") from error


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
    check_methods(experiment, method_files)
    _check_models(experiment)
    if experiment.tracking.enabled and experiment.tracking.uri is not None:
        try:
            checked_uri(experiment.tracking.uri)
        except ExperimentError as error:
            raise ConfigProblems([("tracking.uri", str(error))]) from error
    _check_sweep(experiment.sweep)
    return experiment


def _check_models(experiment: Experiment) -> None:
    """Refuse models that do not exist; imports no torch."""
    teacher = experiment.teacher
    sections = {"teacher.model": teacher, "student.model": experiment.student}
    sections |= {f"teacher.others[{n}].model": other for n, other in enumerate(teacher.others if teacher else ())}
    sections |= {f"assistants[{n}].model": assistant for n, assistant in enumerate(experiment.assistants)}
    for key, section in sections.items():
        try:
            if section is not None:
                check_model_name(section.model)
        except ModelError as error:
            raise ConfigProblems([(key, f"{key}: {error}")]) from error


def _check_sweep(sweep: SweepConfig) -> None:
    """Refuse a space that cannot be searched as it is written."""
    searched = "sweep.points" if sweep.points else "sweep.space"
    try:
        check_space(sweep.axes, sweep.policy)
    except SpaceError as error:
        raise ConfigProblems([(searched, f"{searched}: {error}")]) from error
    keys = list(known_keys(Experiment))
    for key in sweep.axes:
        known = key in keys or (key.startswith("distill.options.") and key.count(".") == 3)
        problem = None
        if not known or key.startswith(("sweep", "tracking", "name")):
            problem = f"no such key to search over{'' if known else nearest(key, keys)}"
        elif key.startswith(("teacher", "assistants")):
            problem = "one teacher is prepared and shared by all trials: run a sweep for each teacher"
        if problem is not None:
            raise ConfigProblems([(searched, f"{searched}: {key}: {problem}")])
