"""Which runs a part of a table takes: a sweep for the students alone, one for each teacher, and where each cell's trials are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config.dotted import flatten, merge, put
from service.config.experiment import Resolved, load, parse_override, validate
from service.config.paths import absolute
from service.reproduce.table import ALONE, Table
from trainables.errors import ExperimentError, near

OURS = ("teacher.model", "teacher.weights", "student", "distill.method", "seed", "name", "sweep")
"""What the table decides, but for how many trials run at a time."""
HARMLESS = (
    "data.path",
    "data.loader_workers",
    "data.prefetch_batches",
    "data.stage",
    "data.cache",
    "data.cache_mib",
    "scale.use_gpu",
    "scale.cpus_per_worker",
    "scale.max_failures",
    "sweep.max_concurrent",
    "tracking",
    "train.log_every",
    "train.checkpoint_every",
    "train.channels_last",
    "train.compile",
    "train.telemetry_every_s",
)
"""What may be set without another training coming of it: how fast it runs and what is recorded."""


@dataclass(frozen=True)
class Request:
    """What of a table is to be run."""

    pairs: tuple[str, ...]
    columns: tuple[str, ...]
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, table: Table, pairs: str | None, methods: str | None, seeds: str) -> Request:
        """From the words of the command line, commas between them; None: all.

        Raises:
            ExperimentError: a name that the table does not have, or a seed that is no number.
        """
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in seeds.split(",")))
        except ValueError:
            raise ExperimentError(f"--seeds {seeds}: write numbers with commas between them, such as 0,1,2") from None
        if min(numbers) < 0:
            raise ExperimentError(f"--seeds {seeds}: seeds are 0 and above")
        chosen = _chosen("--pairs", pairs, tuple(table.pairs))
        columns = _chosen("--methods", methods, (ALONE, *table.columns))
        found = cls(chosen, columns, numbers)
        if not found.cells(table):
            raise ExperimentError(f"--methods {methods}: the table has no number of it for {', '.join(chosen)}")
        return found

    def cells(self, table: Table) -> list[tuple[str, str]]:
        """Pair and column of each number that is published, by pairs."""
        return [(p, c) for p in self.pairs for c in self.columns if table.published(p, c) is not None]


def _chosen(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            similar = near(name, known)
            instead = f"did you mean {similar[0]}?" if similar else f"the table has {', '.join(known)}"
            raise ExperimentError(f"{option} {name}: there is none in this table; {instead}")
    return names


@dataclass(frozen=True)
class Part:
    """One sweep of a reproduction, in the folder `name`."""

    name: str
    teacher: str | None
    """None: students that learn from labels alone."""
    resolved: Resolved
    rows: Mapping[tuple[str, str], tuple[str, ...]]
    """(student, column) → the ids of its trials, in the order of the seeds."""

    @property
    def trained_teacher(self) -> bool:
        """Whether the sweep trains its teacher before anything else."""
        teacher = self.resolved.experiment.teacher
        return teacher is not None and teacher.weights is None

    @property
    def num_runs(self) -> int:
        return len(self.resolved.experiment.sweep.points) + self.trained_teacher

    @property
    def num_epochs(self) -> int:
        """Epochs of all its runs, with the teacher's and the init stages of methods that have one."""
        experiment = self.resolved.experiment
        teacher = (experiment.teacher.epochs if experiment.teacher else None) or experiment.optim.epochs
        return sum(map(self.epochs_of, experiment.sweep.points)) + self.trained_teacher * teacher

    def epochs_of(self, point: Mapping[str, Any]) -> int:
        """Epochs of one of its points."""
        stages = sum(int(epochs) for key, epochs in point.items() if key.endswith(".init_epochs"))
        return stages + int(point.get("optim.epochs", self.resolved.experiment.optim.epochs))


def changes(overrides: Sequence[str]) -> tuple[str, ...]:
    """The keys among `overrides` that make another training of it than the published one.

    Raises:
        ExperimentError: a key that the table decides.
    """
    keys = [parse_override(text)[0] for text in overrides]
    for key in keys:
        if _within(key, OURS) and not _within(key, HARMLESS):
            raise ExperimentError(f"--set {key}: the table decides it: choose with --pairs, --methods, --seeds or --teachers")
    return tuple(dict.fromkeys(key for key in keys if not _within(key, HARMLESS)))


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def compose(table: Table, request: Request, overrides: Sequence[str], data: str | None, teachers: Path | None) -> list[Part]:
    """The sweeps, in the order in which they run. `overrides` count more than what the table says of a column or a pair.

    Raises:
        ExperimentError: the experiments that come of it are wrong, or a teacher's checkpoint is not in `teachers`.
    """
    given = [*overrides, *([f"data.path={data}"] if data is not None else [])]
    base = load(table.recipe, given)
    tree = base.experiment.model_dump(mode="json")
    tree["data"]["path"] = absolute(tree["data"]["path"])
    set_keys = [parse_override(text)[0] for text in given]
    pairs = [table.pairs[name] for name in request.pairs]
    parts = []
    for teacher in (None, *dict.fromkeys(pair.teacher for pair in pairs)):
        points: list[dict[str, Any]] = []
        firsts: dict[tuple[str, str], dict[str, Any]] = {}
        rows: dict[tuple[str, str], tuple[str, ...]] = {}
        for name in request.pairs:
            pair = table.pairs[name]
            for column in request.columns if teacher in (None, pair.teacher) else ():
                key = (pair.student, column)
                if table.published(name, column) is None or (teacher is None) is not (column == ALONE) or key in rows:
                    continue
                point = {"student.model": pair.student, **_settings(table, name, column)}
                kept = {key: value for key, value in point.items() if not _overridden(key, set_keys)}
                rows[key] = tuple(f"{len(points) + number:03d}" for number in range(len(request.seeds)))
                firsts[name, column] = {**kept, "seed": request.seeds[0]}
                points += [{**kept, "seed": seed} for seed in request.seeds]
        if not points:
            continue
        width = max(3, len(str(len(points) - 1)))  # as a sweep numbers its trials
        rows = {key: tuple(f"{int(trial):0{width}d}" for trial in trials) for key, trials in rows.items()}
        name = "students" if teacher is None else f"teacher-{teacher}"
        common = _common(tree, table, teacher, teachers, name)
        for (pair_name, column), point in firsts.items():
            places = {key: place for key, place in _places(table, pair_name, column).items() if not _overridden(key, set_keys)}
            where = f"pairs.{pair_name}.{column} of the table" + (", with what --set changes" if overrides else "")
            validate(_with(common, point), where, {**base.sources, **places})
        own = {"student.model": points[0]["student.model"], "sweep.points": points}
        parts.append(Part(name, teacher, Resolved(validate(_with(common, own), f"table {table.title}"), base.sources), rows))
    return parts


def _settings(table: Table, pair: str, column: str) -> dict[str, Any]:
    """Dotted keys and values of a cell: the student's, the column's over them, and what the pair has of its own over both."""
    merged: dict[str, Any] = {}
    for _, settings in _layers(table, pair, column):
        merged = merge(merged, settings)
    return flatten(merged)


def _places(table: Table, pair: str, column: str) -> dict[str, str]:
    """Dotted keys of a cell, and where in the table each one's value stands."""
    layers = _layers(table, pair, column)
    return {key: f"{place} of the table" for place, settings in layers for key in flatten(settings)}


def _layers(table: Table, pair: str, column: str) -> list[tuple[str, dict[str, Any]]]:
    """Place in the table and settings, of which the later ones count more."""
    there = table.pairs[pair]
    alone = (f"students.models.{there.student}.settings", table.students.models[there.student].settings)
    if column == ALONE:
        return [alone]
    own = (f"pairs.{pair}.settings.{column}", there.settings.get(column, {}))
    return [alone, (f"columns.{column}.settings", table.columns[column].settings), own]


def _overridden(key: str, set_keys: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in set_keys)


def _common(tree: Mapping[str, Any], table: Table, teacher: str | None, teachers: Path | None, name: str) -> dict[str, Any]:
    """What all points of a sweep share."""
    common = _with(
        tree,
        {
            "name": name,
            "sweep.space": {},
            "sweep.policy": "grid",
            "sweep.metric": "top1_pct",
            "sweep.steps": None,
            "sweep.target_pct": None,
        },
    )
    if teacher is None:
        return common | {"teacher": None, "distill": {}}
    return common | {"teacher": {**(tree["teacher"] or {}), "model": teacher, "weights": _weights(table, teacher, teachers)}}


def _with(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with dotted keys set."""
    merged = dict(tree)
    for key, value in values.items():
        nested: dict[str, Any] = {}
        put(nested, key, value, key)
        merged = merge(merged, nested)
    return merged


def _weights(table: Table, teacher: str, teachers: Path | None) -> str | None:
    found = table.teachers.models[teacher]
    if teachers is None:
        return found.weights
    wanted = [teachers / name for name in (found.checkpoint, f"{teacher}.pth", f"{teacher}.safetensors") if name is not None]
    path = next((path for path in wanted if path.is_file()), None)
    if path is None:
        raise ExperimentError(f"--teachers {teachers}: there is no {wanted[0].relative_to(teachers)}, nor {wanted[-1].name}")
    return str(path.absolute())
