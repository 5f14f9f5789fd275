"""The sweeps that reproduce a table, or a part of it: one for the students alone, one for each teacher."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config.dotted import flatten, put
from service.config.experiment import Resolved, load, parse_override, validate
from service.config.files import recipes
from service.reproduce.table import ALONE, Table
from trainables.errors import ExperimentError, did_you_mean

DECIDED_BY_THE_TABLE = ("teacher.model", "teacher.weights", "student", "distill.method", "seed", "name", "sweep")
"""Keys that a user may not set, but for `HARMLESS` ones among them."""
OF_NO_STUDENT = {"name", "teacher", "teachers", "assistants", "distill", "sweep", "tracking"}
"""Sections of a recipe that a table's student does not take from it."""
HARMLESS = (
    "data.path",
    "data.loader_workers",
    "data.loader",
    "data.prefetch_batches",
    "data.stage",
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
"""Keys that may be set without changing what is trained: how fast it runs and what is recorded."""


@dataclass(frozen=True)
class Request:
    """The part of a table that is to be run."""

    pairs: tuple[str, ...]
    columns: tuple[str, ...]
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, table: Table, pairs: str | None, methods: str | None, seeds: str) -> Request:
        """From the options of the command line, with commas between names; an option that is not given means all.

        Raises ExperimentError: a name that the table does not have, or a seed that is no number.
        """
        if not re.fullmatch(r"\d+(,\d+)*", seeds):
            raise ExperimentError(f"--seeds {seeds}: write numbers from 0 with commas between them, such as 0,1,2")
        numbers = tuple(dict.fromkeys(map(int, seeds.split(","))))
        selected = _selected("--pairs", pairs, tuple(table.pairs))
        columns = _selected("--methods", methods, (ALONE, *table.columns))
        request = cls(selected, columns, numbers)
        if not request.cells(table):
            raise ExperimentError(f"--methods {methods}: the table has no number of it for {', '.join(selected)}")
        return request

    def cells(self, table: Table) -> list[tuple[str, str]]:
        """Pair and column of each number that is published, by pairs."""
        return [(p, c) for p in self.pairs for c in self.columns if table.published(p, c) is not None]


def _selected(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            instead = did_you_mean(name, known, f"the table has {', '.join(known)}")
            raise ExperimentError(f"{option} {name}: there is none in this table; {instead}")
    return names


@dataclass(frozen=True)
class PlannedSweep:
    """One sweep of a reproduction, in the folder `name`."""

    name: str
    teacher: str | None
    """Students without one learn from labels alone."""
    resolved: Resolved
    rows: Mapping[tuple[str, str], range]
    """(student, column) → the numbers of its trials, in the order of the seeds."""

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
        experiment, total = self.resolved.experiment, 0
        for point in experiment.sweep.points:
            total += int(point.get("optim.epochs", experiment.optim.epochs))
            total += sum(int(epochs) for key, epochs in point.items() if key.endswith(".init_epochs"))
        teacher = (experiment.teacher.epochs if experiment.teacher else None) or experiment.optim.epochs
        return total + self.trained_teacher * teacher


def changes(overrides: Sequence[str]) -> tuple[str, ...]:
    """The keys among `overrides` that change the training from the published one.

    Raises ExperimentError: a key that the table decides.
    """
    keys = [parse_override(text)[0] for text in overrides]
    for key in keys:
        if _within(key, DECIDED_BY_THE_TABLE) and not _within(key, HARMLESS):
            raise ExperimentError(f"--set {key}: the table decides it: choose with --pairs, --methods, --seeds or --teachers")
    return tuple(dict.fromkeys(key for key in keys if not _within(key, HARMLESS)))


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def compose(
    table: Table, request: Request, overrides: Sequence[str], data: str | None, teachers: Path | None
) -> list[PlannedSweep]:
    """The sweeps, in the order in which they run. `overrides` count more than the table's settings of a column or a pair.

    Raises ExperimentError: the resulting experiments are wrong, or a teacher's checkpoint is not in `teachers`.
    """
    settings = [*overrides, *([f"data.path={data}"] if data is not None else [])]
    set_keys = [parse_override(text)[0] for text in settings]
    base = load(table.recipe, settings)
    tree, sweeps = base.experiment.model_dump(mode="json"), []
    for teacher in (None, *dict.fromkeys(table.pairs[name].teacher for name in request.pairs)):
        pairs: dict[tuple[str, str], str] = {}
        for pair, column in request.cells(table):
            if teacher == (None if column == ALONE else table.pairs[pair].teacher):
                pairs.setdefault((table.pairs[pair].student, column), pair)
        if not pairs:
            continue
        name = "students" if teacher is None else f"teacher-{teacher.replace('/', '-')}"
        common = _common(tree, table, teacher, teachers, name)
        points, rows = list[dict[str, Any]](), dict[tuple[str, str], range]()
        for (student, column), pair in pairs.items():
            values = {"student.model": student, **_of_recipe(table, student), **table.settings(pair, column)}
            point = {key: value for key, value in values.items() if not _within(key, set_keys)}
            where = f"pairs.{pair}.{column} of the table" + (", with what --set changes" if overrides else "")
            others = {key: source for key, source in base.sources.items() if key not in point}
            validate(_with(common, {**point, "seed": request.seeds[0]}), where, others)
            rows[student, column] = range(len(points), len(points) + len(request.seeds))
            points += [{**point, "seed": seed} for seed in request.seeds]
        searched = {"student.model": points[0]["student.model"], "sweep.points": points}
        resolved = Resolved(validate(_with(common, searched), f"table {table.title}"), base.sources)
        sweeps.append(PlannedSweep(name, teacher, resolved, rows))
    return sweeps


def _of_recipe(table: Table, student: str) -> dict[str, Any]:
    """Return the model of a student that is a recipe, and its values that differ from the table's recipe, by dotted key."""
    if student not in recipes():
        return {}
    base, own = (
        flatten(load(each).experiment.model_dump(mode="json", exclude=OF_NO_STUDENT)) for each in (table.recipe, student)
    )
    return {key: value for key, value in own.items() if key not in base or base[key] != value} | {
        "student.model": own["student.model"]
    }


def _common(tree: Mapping[str, Any], table: Table, teacher: str | None, teachers: Path | None, name: str) -> dict[str, Any]:
    """The tree that all points of a sweep share."""
    sweep: dict[str, Any] = {"space": {}, "policy": "grid", "metric": "top1_pct", "steps": None, "target_pct": None}
    common = _with(tree, {"name": name, **{f"sweep.{key}": value for key, value in sweep.items()}})
    if teacher is None:
        return common | {"teacher": None, "distill": {}}
    return common | {"teacher": {**(tree["teacher"] or {}), "model": teacher, "weights": _weights(table, teacher, teachers)}}


def _with(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with dotted keys set."""
    changed = copy.deepcopy(dict(tree))
    put(changed, values, "the table's settings")
    return changed


def _weights(table: Table, teacher: str, teachers: Path | None) -> str | None:
    published = table.teachers.models[teacher]
    if teachers is None:
        return published.weights
    name = published.checkpoint or f"{teacher}.safetensors"
    if not (teachers / name).is_file():
        raise ExperimentError(f"--teachers {teachers}: there is no {name}")
    return str((teachers / name).absolute())
