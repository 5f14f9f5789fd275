"""The experiment: one YAML file, its overrides, its checks, and the one line that a wrong value gets.

A file may name a `base` (a recipe or another file) and change only what differs. Every value remembers where it came from.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from service.search.space import SpaceError, check_space
from trainables.config import (
    Count,
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
from trainables.errors import ExperimentError

MINIMIZED = frozenset({"epoch_s", "step_s", "loss", "val_loss", "data_pct"})


class SweepConfig(Section):
    """A search over values of the experiment."""

    space: dict[str, Any] = Field(
        default_factory=dict, description="dotted key → list, {range: [first, last, step]}, or a distribution"
    )
    policy: Literal["grid", "random", "asha"] = "grid"
    metric: str = Field("images_per_s", description="what the best trial has most (or, for times and losses, least) of")
    num_samples: Count = Field(16, description="trials drawn by the policies random and asha")
    steps: Count | None = Field(
        None, description="a timing sweep: each trial runs so many steps after warm-up; absent: to its epochs"
    )
    max_concurrent: Count = Field(1, description="trials at a time; bounded by what the cluster holds")
    grace_epochs: Count = Field(1, description="asha: epochs before a trial may be stopped")
    reduction_factor: Annotated[int, Field(ge=2)] = Field(3, description="asha: one in so many goes on")

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether `metric` is minimised or maximised."""
        return "min" if self.metric in MINIMIZED else "max"


class TrackingConfig(Section):
    """Where MLflow keeps the records."""

    enabled: bool = True
    uri: str | None = Field(None, description="an MLflow server or database; absent: the SQLite store of the runs' root")
    experiment: str = Field("raydistill", min_length=1, description="name of the MLflow experiment")
    log_model: bool = Field(True, description="log the student as an MLflow model")


class Experiment(Section):
    """All that a user may say, checked."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "experiment"
    data: DataConfig = DataConfig()
    teacher: TeacherConfig | None = None
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
        if self.optim.accumulate > batch // workers:
            raise ValueError(
                f"optim.accumulate {self.optim.accumulate} exceeds the {batch // workers} samples of one worker's batch"
            )
        if self.optim.warmup_epochs >= self.optim.epochs:
            raise ValueError(
                f"optim.warmup_epochs {self.optim.warmup_epochs:g} leaves no epoch of optim.epochs {self.optim.epochs}"
            )
        if self.optim.nesterov and not self.optim.momentum:
            raise ValueError("optim.nesterov needs optim.momentum above 0")
        if self.scale.sync_batch_norm and self.scale.use_gpu is False:
            raise ValueError("scale.sync_batch_norm works on GPUs only: set scale.use_gpu or leave it out")
        return self

    def stage(
        self, name: Literal["teacher", "student"], output_dir: Path, labels: Mapping[str, str], weights: str | None = None
    ) -> TrainConfig:
        """What the workers of one stage are told. For the student, `weights` are the trained teacher's."""
        optim, teacher, model = self.optim, self.teacher, self.student.model
        if name == "teacher":
            assert teacher is not None
            model, optim = teacher.model, optim.model_copy(update={"epochs": teacher.epochs or optim.epochs})
            teacher = None
        elif teacher is not None and weights is not None:
            teacher = teacher.model_copy(update={"weights": weights})
        return TrainConfig(
            stage=name, output_dir=str(output_dir), data=self.data, model=model, teacher=teacher, distill=self.distill,
            optim=optim,
            scale=self.scale, train=self.train, precision=self.precision, seed=self.seed, labels=dict(labels),
        )  # fmt: skip


@dataclass(frozen=True)
class Resolved:
    """An experiment and, per dotted key, which file, recipe or override its value came from (absent: the default)."""

    experiment: Experiment
    sources: dict[str, str]

    def to_yaml(self) -> str:
        """The resolved experiment; reading it back gives the same experiment."""
        return yaml.safe_dump(self.experiment.model_dump(mode="json"), sort_keys=False)

    def override(self, point: Mapping[str, Any], source: str) -> Resolved:
        """The experiment with dotted keys replaced, checked again.

        Raises:
            ExperimentError: a key or a value that does not exist or does not fit.
        """
        tree = self.experiment.model_dump(mode="json")
        for key, value in point.items():
            put(tree, key, value, source)
        return Resolved(validate(tree, source), {**self.sources, **dict.fromkeys(point, source)})


def recipes() -> dict[str, str]:
    """Shipped recipes: name → the comment in their first line."""
    found = {}
    for file in sorted(resources.files("service.recipes").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            found[file.name.removesuffix(".yaml")] = file.read_text().splitlines()[0].lstrip("# ")
    return found


def load(recipe_or_file: str, overrides: Sequence[str] = ()) -> Resolved:
    """Read a recipe or a YAML file, apply its bases and `--set` overrides, check everything.

    Raises:
        ExperimentError: with one line for each mistake, six at most.
    """
    tree, sources, where = _read(recipe_or_file, ())
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise ExperimentError(f"--set {text}: write --set key=value, such as --set data.global_batch_size=256")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ExperimentError(f"--set {text}: the value is not YAML: quote it") from error
        put(tree, key, parsed, f"--set {text}")
        sources = {name: source for name, source in sources.items() if not name.startswith(f"{key}.")} | {key: "--set"}
    tree.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_or_file).stem).lstrip("-._") or "experiment")
    return Resolved(validate(tree, where), sources)


def read_resolved(path: Path) -> Resolved:
    """The `experiment.yaml` of a run directory."""
    tree, sources, where = _read(str(path), ())
    return Resolved(validate(tree, where), sources)


def _read(name: str, seen: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str], str]:
    if name in seen:
        raise ExperimentError(f"{name}: `base` leads back to itself ({' → '.join((*seen, name))})")
    if name in recipes():
        text, where = (resources.files("service.recipes") / f"{name}.yaml").read_text(), f"recipe {name}"
    else:
        path = Path(name)
        if not path.is_file():
            near = difflib.get_close_matches(name, recipes(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(recipes())}"
            raise ExperimentError(f"{name}: neither a recipe nor a file; {hint}")
        where = name
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ExperimentError(f"{name}: not a text file (byte {error.start}): give a YAML file") from error
        except OSError as error:
            raise ExperimentError(f"{name}: cannot be read: {error.strerror}") from error
    tree = _parse(text, where)
    base = tree.pop("base", None)
    sources = dict.fromkeys(flatten(tree), where)
    if base is None:
        return tree, sources, where
    if not isinstance(base, str):
        raise ExperimentError(f"{where}: base: give one recipe or file")
    relative = str(Path(name).parent / base) if name not in recipes() and base not in recipes() else base
    below, below_sources, _ = _read(relative, (*seen, name))
    return merge(below, tree), {**below_sources, **sources}, where


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise ExperimentError(f"{place}: not YAML: {problem}") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ExperimentError(f"{where}: an experiment is a mapping such as `data: {{path: …}}`, this is {type(tree).__name__}")
    return tree


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mappings merged key by key; a sweep's space is replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) and key != "space" else value
    return merged


def put(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in place. Under `sweep.space` the rest of the key is one key, dots and all.

    Raises:
        ExperimentError: a part of the key is not a section.
    """
    parts = ["sweep", "space", key.removeprefix("sweep.space.")] if key.startswith("sweep.space.") else key.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            raise ExperimentError(f"{where}: {'.'.join(parts[:depth])} is a value, not a section")
        tree = tree[part]
    tree[parts[-1]] = value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value; a sweep's space stays one value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value and name != "sweep.space" else {name: value}
    return flat


def known_keys(section: type[BaseModel] = Experiment, prefix: str = "") -> Iterator[str]:
    """Every dotted key that an experiment can have."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, Section):
                yield from known_keys(part, f"{prefix}{name}.")


def nearest(key: str) -> str:
    """`; did you mean KEY?` for a key that does not exist, or nothing."""
    keys = list(known_keys())
    last = key.rsplit(".", 1)[-1]
    same_section = [k for k in keys if k.rsplit(".", 1)[0] == key.rsplit(".", 1)[0]]
    by_name = {k.rsplit(".", 1)[-1]: k for k in keys}
    for pool in (same_section, keys):
        if found := difflib.get_close_matches(key, pool, n=1, cutoff=0.75):
            return f"; did you mean {found[0]}?"
    # `batch_size` is near to `global_batch_size` by its words, not by its letters.
    contained = [k for name, k in by_name.items() if last in name or (name in last and len(name) > 3)]
    found = difflib.get_close_matches(last, by_name, n=1, cutoff=0.6)
    if contained or found:
        return f"; did you mean {contained[0] if contained else by_name[found[0]]}?"
    return ""


def validate(tree: Mapping[str, Any], where: str) -> Experiment:
    """A checked experiment.

    Raises:
        ExperimentError: one line a mistake.
    """
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail, where) for detail in error.errors(include_url=False)]
        shown = lines[:5] + ([f"… and {len(lines) - 5} more"] if len(lines) > 5 else [])
        raise ExperimentError("\n".join(dict.fromkeys(shown))) from error
    try:
        check_space(experiment.sweep.space, experiment.sweep.policy)
    except SpaceError as error:
        raise ExperimentError(f"{where}: sweep.space: {error}") from error
    sections = set(known_keys())
    for key in experiment.sweep.space:
        if key not in sections or key.startswith(("sweep", "tracking", "name")):
            raise ExperimentError(
                f"{where}: sweep.space: {key}: no such key to search over{nearest(key) if key not in sections else ''}"
            )
    return experiment


def _explain(detail: Any, where: str) -> str:
    # pydantic puts the branch of a union behind the key; only names and indices that the user wrote belong in the message.
    keys = list(known_keys())
    parts: list[str] = []
    for part in detail["loc"]:
        name = ".".join([*parts, str(part)])
        if detail["type"] == "extra_forbidden" or name in keys or not parts:
            parts.append(str(part))
    key = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        return f"{where}: {key}: no such key{nearest(key)}"
    if detail["type"] == "missing":
        return f"{where}: {key}: missing: write it in the file or --set {key}=…"
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{where}: {key + ': ' if key else ''}{message}" + (
        f", not {detail['input']!r}" if key and detail["type"] != "value_error" else ""
    )


def default_runs_root() -> Path:
    """`RAYDISTILL_RUNS`, else `runs/` here; inside a Ray job, whose working directory is thrown away, `~/runs`."""
    if named := os.environ.get("RAYDISTILL_RUNS"):
        return Path(named).expanduser().absolute()
    here = Path.cwd()
    return Path.home() / "runs" if "runtime_resources" in here.parts else here / "runs"
