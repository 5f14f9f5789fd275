"""The experiment: one YAML file, its overrides, its checks, and the one line that a wrong value gets.

A file may name a `base` (a recipe or another file) and change only what differs. Every value remembers where it came from.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from service.config import strict_yaml
from service.config.dotted import flatten, merge, put
from service.config.messages import SETTABLE, explain, known_keys, nearest, source_of
from service.config.method_rules import check_distill, distills, own_optimizers
from service.config.space import SpaceError, check_space
from service.config.sweep import SweepConfig
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
from trainables.errors import ExperimentError, ModelError, near
from trainables.methods import file_of
from trainables.models.names import check_model_name
from trainables.rundir import expanded

MAX_NAME = 150
"""Characters of an experiment's name: its run directories, MLflow runs and Ray jobs are called after it."""
MAX_FILE_BYTES = 16 << 20


class TrackingConfig(Section):
    """Where MLflow keeps the records."""

    enabled: bool = True
    uri: str | None = Field(None, description="an MLflow server or database; absent: the SQLite store of the runs' root")
    experiment: str = Field("raydistill", min_length=1, description="name of the MLflow experiment")
    log_model: bool = Field(True, description="log the student as an MLflow model")


class Experiment(Section):
    """All that a user may say, checked."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)] = "experiment"
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
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    sweep: SweepConfig = SweepConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        batch, workers = self.data.global_batch_size, self.scale.num_workers
        if batch % workers:
            lower = max(batch // workers, 1) * workers
            raise ValueError(
                f"data.global_batch_size {batch} is not divisible by scale.num_workers {workers}: "
                f"write {lower} or {lower + workers}"
            )
        resize, size = self.data.val_resize, self.data.image_size
        if resize is not None and resize < size:
            raise ValueError(f"data.val_resize {resize} is below data.image_size {size}: write at least {size}, or leave it out")
        if self.optim.accumulate > batch // workers:
            raise ValueError(
                f"optim.accumulate {self.optim.accumulate} exceeds the {batch // workers} samples of one worker's batch"
            )
        if self.data.device_augment.mixes:
            if batch // workers % 2:
                raise ValueError(
                    f"data.device_augment: mixup and cutmix mix pairs, but each of {workers} workers has {batch // workers} of "
                    f"data.global_batch_size {batch}: write {batch + workers}, or set both to 0"
                )
            if self.data.last_batch == "short":
                raise ValueError(
                    "data.device_augment: mixup and cutmix mix pairs, which a short last batch may part: "
                    "set data.last_batch to drop, or both to 0"
                )
        if self.data.device_augment.mixes and self.teacher is not None and (key := self.teacher.logits_only) is not None:
            raise ValueError(
                f"{key}: it gives the logits of each image, which mixup and cutmix mix with another: "
                f"set data.device_augment.mixup and data.device_augment.cutmix to 0, or leave {key} out"
            )
        if self.data.decodes_on_device and self.teacher is not None and self.teacher.service is not None:
            raise ValueError(
                f"teacher.service: it is sent images that the host has decoded, and data.decoder {self.data.decoder} decodes on "
                "each worker's GPU: set data.decoder to auto, or leave teacher.service out"
            )
        if self.assistants and self.teacher is None:
            raise ValueError("assistants: there is no teacher whom they could assist: write teacher.model")
        lengths = {"optim.epochs": self.optim.epochs, "teacher.epochs": self.teacher.epochs if self.teacher else None}
        lengths |= {f"assistants[{n}].epochs": assistant.epochs for n, assistant in enumerate(self.assistants)}
        for key, epochs in lengths.items():
            if epochs is not None and self.optim.warmup_epochs >= epochs:
                raise ValueError(f"optim.warmup_epochs {self.optim.warmup_epochs:g} leaves no epoch of {key} {epochs}")
        if self.optim.nesterov and not self.optim.momentum:
            raise ValueError("optim.nesterov needs optim.momentum above 0")
        grace, every = self.sweep.grace_epochs, self.train.evaluate_every
        if self.sweep.policy == "asha" and grace % every:
            raise ValueError(
                f"sweep.grace_epochs {grace}: asha compares trials after so many epochs first, and train.evaluate_every {every} "
                f"leaves that one without an accuracy: write {-(-grace // every) * every}, or train.evaluate_every 1"
            )
        if self.data.decodes_on_device and self.scale.use_gpu is False:
            raise ValueError(f"data.decoder {self.data.decoder} works on GPUs only: set scale.use_gpu, or data.decoder to auto")
        return self

    @property
    def preparation(self) -> dict[str, TeacherConfig | AssistantConfig]:
        """The stages before the student's, in order, and whom each trains: the teacher, then the assistants."""
        assistants = {f"assistant{n}": assistant for n, assistant in enumerate(self.assistants, start=1)}
        return {**({"teacher": self.teacher} if self.teacher else {}), **assistants}

    def written_cache(self, kind: Literal["train", "sweep"]) -> Path | None:
        """The `teacher.cache` where a run or a sweep writes logits; None: nowhere. What is only timed writes none."""
        if self.teacher is None or self.teacher.cache is None or not distills(self):
            return None
        timed = self.train.max_steps is not None
        if kind == "sweep":
            timed = self.sweep.timing_steps is not None and not self.sweep.races
        return None if timed and not self.assistants else expanded(self.teacher.cache).absolute()

    def stage(self, name: str, output_dir: Path, labels: Mapping[str, str], weights: str | None = None) -> TrainConfig:
        """What the workers of one stage, of the `preparation` or `student`, are told.

        `weights` are those of the stage before it. All stages but the teacher's distil alike.
        """
        before = self.preparation
        teacher: TeacherConfig | None = None
        optim, model, train, distill = self.optim, self.student.model, self.train, self.distill if distills(self) else None
        if name in before:
            model, optim = before[name].model, optim.model_copy(update={"epochs": before[name].epochs or optim.epochs})
            train = train.model_copy(update={"until_top1_pct": None, "until_s": None})
        if name == "teacher":  # nothing is lowered but the labels' loss
            distill = None
        optim = own_optimizers(optim, distill)
        if name != "teacher":
            teacher = self._teacher_of(name)
            if teacher is not None and weights is not None:
                teacher = teacher.model_copy(update={"weights": weights})
            if teacher is not None and self.teacher is not None:  # it begins when those whom it answers do, and they are students
                teacher = teacher.model_copy(update={"service": self.teacher.service if name == "student" else None})
        return TrainConfig(
            stage=name, output_dir=str(output_dir), data=self.data, model=model, teacher=teacher, distill=distill, optim=optim,
            scale=self.scale, train=train, precision=self.precision, seed=self.seed, labels=dict(labels),
        )  # fmt: skip

    def _teacher_of(self, name: str) -> TeacherConfig | None:
        """Whom a stage after the teacher's learns from: the experiment's teacher, or the assistant before it."""
        names = [*self.preparation, name]
        nearest = names[names.index(name) - 1]
        if nearest in ("teacher", name) or self.teacher is None:
            return self.teacher
        kept = self.teacher.model_dump(include={"cache", "cache_top_k", "cache_epochs"})
        return TeacherConfig(model=self.preparation[nearest].model, **kept)


@dataclass(frozen=True)
class Resolved:
    """An experiment and, per dotted key, which file, recipe or override its value came from (absent: the default)."""

    experiment: Experiment
    sources: dict[str, str]
    unknown: tuple[str, ...] = ()
    """Keys of another version's file that this one does not know, see `understood`."""

    def to_yaml(self) -> str:
        """The resolved experiment; reading it back gives the same experiment."""
        return strict_yaml.dump(self.experiment.model_dump(mode="json"))

    def override(self, point: Mapping[str, Any], source: str, *, reading: bool = False) -> Resolved:
        """The experiment with dotted keys replaced, checked again. `reading`: only to be looked at, see `understood`.

        Raises:
            ExperimentError: a key or a value that does not exist or does not fit.
        """
        tree = self.experiment.model_dump(mode="json")
        for key, value in point.items():
            put(tree, key, value, source)
        experiment = understood(tree, source)[0] if reading else validate(tree, source)
        return Resolved(experiment, {**self.sources, **dict.fromkeys(point, source)})


def recipes() -> dict[str, str]:
    """Shipped recipes: name → the comment in their first line."""
    found = {}
    for file in sorted(resources.files("service.recipes").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            found[file.name.removesuffix(".yaml")] = file.read_text().splitlines()[0].lstrip("# ")
    return found


def load(recipe_or_file: str, overrides: Sequence[str] = (), *, elsewhere: bool = False) -> Resolved:
    """Read a recipe or a YAML file, apply its bases and `--set` overrides, check everything. `elsewhere`: see `check_names`.

    Raises:
        ExperimentError: with one line for each mistake, six at most.
    """
    written, sources, where = _read(recipe_or_file, ())
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_or_file).stem).lstrip("-._")
    written.setdefault("name", stem[:MAX_NAME] or "experiment")
    tree, written_sources = copy.deepcopy(written), sources
    for text in overrides:
        key, value = parse_override(text)
        if key.partition(".")[0] == "base":
            raise ExperimentError(
                f"--set {text}: only a file has a base: write `base: {value}` in it, or give {value} in place of the file"
            )
        put(tree, key, value, f"--set {text}")
        sources = {name: source for name, source in sources.items() if not name.startswith(f"{key}.")} | {key: "--set"}
    try:
        return Resolved(validate(tree, where, sources, elsewhere=elsewhere), sources)
    except ExperimentError:
        if overrides and _is_right(written, where, written_sources):  # then the overrides are what is wrong
            validate(tree, "--set", {}, elsewhere=elsewhere)
        raise


def _is_right(tree: Mapping[str, Any], where: str, sources: Mapping[str, str]) -> bool:
    try:
        validate(tree, where, sources)
    except ExperimentError:
        return False
    return True


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
    """The `experiment.yaml` of a run directory. `reading`: only to be looked at, see `understood`.

    Raises:
        ExperimentError: one line a mistake.
    """
    tree, sources, where = _read(str(path), ())
    experiment, unknown = understood(tree, where) if reading else (validate(tree, where), ())
    return Resolved(experiment, sources, unknown)


def understood(tree: Mapping[str, Any], where: str) -> tuple[Experiment, tuple[str, ...]]:
    """An experiment that is read and not carried out, and the keys in it that this version does not know: they are left out.

    So a run that another version wrote can be looked at. Names of models and methods, their options, and the space of a sweep
    are taken as they are.

    Raises:
        ExperimentError: a value that this version cannot read.
    """
    tree = copy.deepcopy(dict(tree))
    unknown: list[str] = []
    while True:
        try:
            return Experiment.model_validate(tree), tuple(unknown)
        except ValidationError as error:
            left_out = [
                key for detail in error.errors() if detail["type"] == "extra_forbidden" and (key := _drop(tree, detail["loc"]))
            ]
            if not left_out:
                reason = explain(error, Experiment, where)
                raise ExperimentError(
                    f"{reason}; if another version wrote it, change or remove it there to read this run"
                ) from error
            unknown += left_out


def _drop(tree: Any, loc: Sequence[str | int]) -> str:
    """Take the key at `loc` out of `tree`; its dotted name, or nothing where there is no such key."""
    names = []
    for part in loc[:-1]:
        if part in (tree if isinstance(tree, dict) else range(len(tree))):  # otherwise it is the name of a union's branch
            names.append(str(part))
            tree = tree[part]
    if not isinstance(tree, dict) or loc[-1] not in tree:
        return ""
    del tree[loc[-1]]
    return ".".join([*names, str(loc[-1])])


def _read(name: str, named_by: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str], str]:
    """The tree of a recipe or file and its bases, where each key came from, and what it is called itself.

    `named_by`: the files whose `base` led here, the first one first.
    """
    path = (*named_by, name)
    if name in recipes():
        text, where, itself = (resources.files("service.recipes") / f"{name}.yaml").read_text(), f"recipe {name}", name
    else:
        text, where, itself = _text_of(name, f"{named_by[-1]}: base: {name}" if named_by else name), name, os.path.realpath(name)
    if itself in [os.path.realpath(file) for file in named_by]:
        raise ExperimentError(f"{name}: `base` leads back to itself ({' → '.join(Path(file).name for file in path)})")
    tree = _parse(text, where)
    base = tree.pop("base", None)
    sources = dict.fromkeys(flatten(tree), where)
    if base is None:
        return tree, sources, where
    if not isinstance(base, str):
        raise ExperimentError(f"{where}: base: give one recipe or file")
    relative = str(Path(name).parent / base) if name not in recipes() and base not in recipes() else base
    below, below_sources, _ = _read(relative, path)
    below.pop("name", None)  # a run is named after what was carried out, not after what that builds on
    below_sources.pop("name", None)
    return merge(below, tree), {**below_sources, **sources}, where


def _text_of(file: str, where: str) -> str:
    """What an experiment's file holds. Raises ExperimentError where there is no such text."""
    if not os.path.isfile(file):
        if os.path.isdir(file):
            raise ExperimentError(f"{where}: is a folder: give a YAML file in it, or a recipe ({', '.join(recipes())})")
        similar = near(Path(file).stem, recipes())
        hint = f"did you mean {similar[0]}?" if similar else f"recipes: {', '.join(recipes())}"
        raise ExperimentError(f"{where or repr(file)}: neither a recipe nor a file; {hint}")
    try:
        if os.path.getsize(file) > MAX_FILE_BYTES:
            raise ExperimentError(f"{where}: larger than {MAX_FILE_BYTES >> 20} MiB, as no experiment is: give a YAML file")
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{where}: not a text file (byte {error.start}): give a YAML file") from error
    except OSError as error:
        raise ExperimentError(f"{where}: cannot be read: {error.strerror}") from error


def _parse(text: str, where: str) -> dict[str, Any]:
    tree = strict_yaml.parse(text, where)
    if not isinstance(tree, dict):
        kind = {list: "a list", type(None): "empty", str: "text"}.get(type(tree), "a single value")
        raise ExperimentError(f"{where}: an experiment is a mapping such as `data: {{path: digits}}`, this is {kind}")
    for key in tree:
        if not isinstance(key, str):
            raise ExperimentError(f"{where}: {key}: no such key: keys are words such as data, student, optim")
    return tree


def validate(
    tree: Mapping[str, Any], where: str, sources: Mapping[str, str] | None = None, *, elsewhere: bool = False
) -> Experiment:
    """A checked experiment. `sources` says which dotted key came from elsewhere than `where`; `elsewhere`: see `check_names`.

    Raises:
        ExperimentError: one line a mistake.
    """
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise ExperimentError(explain(error, Experiment, where, sources, missing=SETTABLE)) from error
    check_names(experiment, where, sources or {}, elsewhere=elsewhere)
    if experiment.tracking.enabled and experiment.tracking.uri is not None:
        try:
            checked_uri(experiment.tracking.uri)
        except ExperimentError as error:
            raise ExperimentError(f"{source_of('tracking.uri', sources or {}, where)}: {error}") from error
    searched = "sweep.points" if experiment.sweep.points else "sweep.space"
    where = (sources or {}).get(searched, where)
    try:
        check_space(experiment.sweep.axes, experiment.sweep.policy)
    except SpaceError as error:
        raise ExperimentError(f"{where}: {searched}: {error}") from error
    keys = list(known_keys(Experiment))
    for key in experiment.sweep.axes:
        known = key in keys or (key.startswith("distill.options.") and key.count(".") == 3)
        if not known or key.startswith(("sweep", "tracking", "name")):
            hint = "" if known else nearest(key, keys)
            raise ExperimentError(f"{where}: {searched}: {key}: no such key to search over{hint}")
        if key.startswith(("teacher", "assistants")):
            raise ExperimentError(
                f"{where}: {searched}: {key}: one teacher is prepared and shared by all trials: run a sweep for each teacher"
            )
    return experiment


def check_names(experiment: Experiment, where: str, sources: Mapping[str, str], *, elsewhere: bool = False) -> None:
    """Refuse a method or a model that does not exist; imports no torch, unless a method is given options.

    `elsewhere`: the experiment runs on another machine. Where the file of a method is not on this one, what depends on methods
    is not checked.

    Raises:
        ExperimentError: with the nearest name.
    """
    files = [file for name in experiment.distill.method if (file := file_of(name)) is not None]
    if not elsewhere or all(file.is_file() for file in files):
        check_distill(experiment, where, sources)
    teacher = experiment.teacher
    sections = {"teacher.model": teacher, "student.model": experiment.student}
    sections |= {f"teacher.others[{n}].model": other for n, other in enumerate(teacher.others if teacher else ())}
    sections |= {f"assistants[{n}].model": assistant for n, assistant in enumerate(experiment.assistants)}
    for key, section in sections.items():
        try:
            if section is not None:
                check_model_name(section.model)
        except ModelError as error:
            raise ExperimentError(f"{source_of(key, sources, where)}: {key}: {error}") from error
