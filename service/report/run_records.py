"""What a report is made of: a run directory read into plain rows, however far the run has come."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from service.config.dotted import flatten
from service.config.schema import Experiment
from service.config.space import SCALE_AXES
from service.runs.result import RunResult, TrialRow
from service.runs.run_directory import reopen
from service.runs.run_log import RunLog, read_log
from service.search.points import relative_error
from trainables.redact import redact_values
from trainables.rundir import RunDir

UNRUN = ("pending", "untested")  # how a trial stands that has not ended
_WINDOW_MS = re.compile(rb'"train/phase/step_ms": ([0-9.e+-]+)')
_FEWEST_WINDOWS = 3  # means between log lines: fewer say nothing of their spread


class Row(TrialRow):
    """A trial as the report sees it."""

    error: float | None = None
    """Relative standard error of its mean step; None where too little is known."""

    @classmethod
    def of(cls, row: TrialRow, windows_s: Sequence[float] = ()) -> Row:
        """The row with the error of its steps' times; without these, of the mean step times between its log lines."""
        fields = {**dict(row), "error": spread(row.steps_s or windows_s)}
        return cls.model_construct(_fields_set=row.model_fields_set, **fields)


@dataclass(frozen=True)
class History:
    """What one stage recorded while it ran, in order."""

    label: str  # "trial 003", "teacher", "assistant1", "student"
    lines: Sequence[Mapping[str, Any]]
    windows_s: Sequence[float] = ()  # mean step time between log lines

    def of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The lines of these kinds."""
        return [line for line in self.lines if line["kind"] in kinds]

    @property
    def start_ms(self) -> float:
        """When the stage was first started; before its first line."""
        return float(self.lines[0]["time_ms"]) if self.lines else math.nan


@dataclass(frozen=True)
class Records:
    """A run directory as the report sees it."""

    root: Path
    result: RunResult
    experiment: Mapping[str, Any]  # by dotted keys; without secrets
    sources: Mapping[str, str]
    rows: Sequence[Row] = ()  # of a sweep
    histories: Sequence[History] = field(default_factory=tuple)
    hangs: Sequence[str] = ()

    @property
    def is_sweep(self) -> bool:
        return self.result.kind == "sweep"

    @property
    def best(self) -> Row | None:
        return best_of(self.result, self.rows)

    @property
    def unit(self) -> str:
        """What one worker runs on."""
        return self.result.unit


def records_of_run(path: Path) -> Records:
    """The records of a run directory. Raises ExperimentError: no run there."""
    resolved, run_dir, result = reopen(path)
    return read_records(run_dir, result, resolved.experiment, resolved.sources)


def read_records(run_dir: RunDir, result: RunResult, experiment: Experiment, sources: Mapping[str, str]) -> Records:
    """Rows and histories of a run directory, as far as it has come."""
    flat, log = redact_values(flatten(experiment.model_dump(mode="json"))), read_log(run_dir)
    if result.kind != "sweep":
        found = [read_history(name, log, name, steps=True) for name in experiment.stage_names]
        histories = [history for history in found if history.lines]
        return Records(run_dir.root, result, flat, sources, (), histories, hangs_of(log))
    rows, histories = [], []
    for row in result.rows:
        history = read_history(f"trial {row.id}", log, f"trials/{row.id}/student", steps=False)
        rows.append(Row.of(row, history.windows_s))
        if history.lines:
            histories.append(history)
    return Records(run_dir.root, result, flat, sources, rows, histories, hangs_of(log))


def hangs_of(log: RunLog) -> list[str]:
    """A line for each hang of a run, also of the measurements that a guided search repeated."""
    return [
        f"{stage} hung at {datetime.fromtimestamp(event['time_ms'] / 1e3):%Y-%m-%d %H:%M:%S}: {event['message']}"
        for stage in log.stages
        for event in log.of_stage(stage, "hang")
    ]


def read_history(label: str, log: RunLog, stage: str, steps: bool) -> History:
    """A stage's events. Without `steps`, the many log lines only give the mean step time of each window."""
    windows = [_WINDOW_MS.search(line.raw) for kind, line in log.raw_of(stage) if kind == "step"]
    lines, time_ms = [], 0.0
    for event in log.of_stage(stage, "start", "resume", "epoch", "summary", *(("step",) if steps else ())):
        time_ms = max(time_ms, event["time_ms"])  # after a restart they are of another node, whose clock may be behind
        lines.append(event | {"time_ms": time_ms})
    windows_s = [float(window[1]) / 1e3 for window in windows if window]
    return History(label, lines, windows_s[1:])  # the first window has the warm-up in it


def teacher_lines(result: RunResult) -> list[str]:
    """How accurate each teacher is: one with given weights as it was measured, one that the run has trained at its best epoch."""
    trained = [
        f"teacher {stage.model}: {stage.metrics['best_top1_pct']:.2f}% top-1, trained here"
        for stage in result.stages
        if stage.stage == "teacher" and "best_top1_pct" in stage.metrics
    ]
    given = [str(teacher) for row in (*result.stages, *result.rows) for teacher in row.teachers]
    return list(dict.fromkeys([*trained, *given]))


def rows_of(result: RunResult) -> list[Row]:
    """The rows of `result.json` alone, without the trials' epochs."""
    return [Row.of(row) for row in result.rows]


def best_of(result: RunResult, rows: Iterable[Row]) -> Row | None:
    return next((row for row in rows if result.best is not None and row.id == result.best.id), None)


def spread(times_s: Sequence[float]) -> float | None:
    """Relative standard error of the mean step time (see `relative_error`); None where too little is known."""
    return relative_error(times_s) if len(times_s) >= _FEWEST_WINDOWS else None


def value(row: Row, key: str) -> Any:
    """What a trial has on an axis: `auto` loader workers as the number that they came to."""
    return row.scale.by_key.get(key, row.params.get(key))


def ordered(values: Iterable[Any]) -> list[Any]:
    """Numbers by size, then words: `auto` loader workers stay a word where a trial was recalled by a resumed sweep.

    Lists, and the nothing of a point that a sweep lists without this key, stand among the words.
    """
    found = {repr(item): item for item in values}.values()
    return sorted(found, key=lambda item: (0, item, "") if isinstance(item, int | float) else (1, 0, str(item)))


def axes(rows: Sequence[Row]) -> list[str]:
    """The keys in which the trials differ, the three of every sweep first."""
    keys = dict.fromkeys([*SCALE_AXES, *(key for row in rows for key in row.params)])
    return [key for key in keys if len({repr(value(row, key)) for row in rows}) > 1]


def ran(rows: Sequence[Row]) -> list[Row]:
    """The trials that have a speed."""
    return [row for row in rows if row.status in ("ok", "stopped") and row.metrics.get("images_per_s")]


def ended(rows: Sequence[Row]) -> list[Row]:
    """The trials that have ended, with a result or without."""
    return [row for row in rows if row.status not in UNRUN]


def gpu_s_per_epoch(row: Row) -> float | None:
    """What an epoch costs: GPU-seconds (slot-seconds where there is no GPU)."""
    m = row.metrics
    if "epoch_s" not in m:
        return None
    return float(m.get("gpu_s_per_epoch", m["epoch_s"] * row.scale.num_workers))
