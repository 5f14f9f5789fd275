"""The input of a report: a run directory, finished or not, with its log read once, as plain rows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from service.config.dotted import flatten
from service.config.schema import Experiment
from service.config.space import GLOBAL_BATCH, SCALE_AXES
from service.runs.events import Event
from service.runs.result import RunResult, TrialRow, TrialScale
from service.runs.run_directory import as_it_stands, reopen_log
from service.runs.run_log import RunLog
from service.search.points import relative_error
from trainables.redact import redact_values
from trainables.rundir import RunDir, StageDir

UNFINISHED = ("pending", "untested")
_WINDOW_MS = re.compile(rb'"train/phase/step_ms": ([0-9.e+-]+)')
_MIN_TIMES = 3  # of steps, needed to estimate their spread
_MAX_RANKS = 8
_PROGRESS = ("start", "resume", "step", "epoch", "summary")

Histories = Mapping[str, Sequence[Event]]
"""The events of each stage in order, by the stage's name: `trial 003`, `teacher`, `student`."""


@dataclass(frozen=True)
class Records:
    """A run directory as the report sees it."""

    run_dir: RunDir
    log: RunLog
    result: RunResult
    experiment: Mapping[str, Any]  # by dotted keys; secrets are redacted
    rows: Sequence[TrialRow] = ()  # the trials of a sweep; for a run, its student as the only row once it has numbers
    histories: Histories = field(default_factory=dict)

    @property
    def is_sweep(self) -> bool:
        return self.result.kind == "sweep"

    @property
    def best(self) -> TrialRow | None:
        """The winner of a sweep by its metric; for a run, its student."""
        return self.result.best if self.is_sweep else next(iter(self.rows), None)


def records_of_run(path: Path) -> Records:
    """Read the records of a run directory. Raises ExperimentError if it has no run, or a damaged one."""
    resolved, run_dir, log = reopen_log(path)
    result = as_it_stands(run_dir, log.result)
    if result.status not in (log.result.status, "interrupted"):  # it has ended in the meantime
        return records_of_run(path)
    return read_records(run_dir, log, result, resolved.experiment)


def read_records(run_dir: RunDir, log: RunLog, result: RunResult, experiment: Experiment) -> Records:
    """Return the records of a run whose log has been read, its rows `with_step_times`."""
    flat = redact_values(flatten(experiment.model_dump(mode="json")))
    if result.kind == "sweep":
        stages = {f"trial {row.id}": _student_of(row) for row in result.rows}
        result = with_step_times(result, log)
        rows = result.rows
    else:
        stages = {name: name for name in experiment.stage_names}
        scale = TrialScale.model_construct(
            num_workers=result.num_workers or 1, global_batch_size=flat[GLOBAL_BATCH], loader_workers=result.loader_workers
        )
        own = {"id": "student", "params": {}, "scale": scale, "steps_s": windows_s(log, "student")}
        students = [stage for stage in result.stages if stage.stage == "student" and stage.metrics]
        rows = [TrialRow.model_construct(**{**dict(stage), **own}) for stage in students]
    kinds = ("start", "resume", "epoch", "summary", *(() if result.kind == "sweep" else ("step",)))
    histories = {label: lines for label, stage in stages.items() if (lines := read_history(log, stage, *kinds))}
    return Records(run_dir, log, result, flat, rows, histories)


def with_step_times(result: RunResult, log: RunLog) -> RunResult:
    """Add the mean step times between their log lines to a sweep's rows without step times."""
    if result.trials is None:
        return result
    rows = [row if row.steps_s else row.model_copy(update={"steps_s": windows_s(log, _student_of(row))}) for row in result.trials]
    return result.model_copy(update={"trials": rows})


def _student_of(row: TrialRow) -> str:
    return f"trials/{row.id}/student"


def windows_s(log: RunLog, stage: str) -> list[float]:
    """Return the mean step times between a stage's log lines, except the first, which includes the warm-up."""
    found = [_WINDOW_MS.search(line.raw) for kind, line in log.raw_of(stage) if kind == "step"]
    return [float(window[1]) / 1e3 for window in found if window][1:]


def read_history(log: RunLog, stage: str, *kinds: str) -> list[Event]:
    """Return a stage's events of these kinds, with non-decreasing times: after a restart, another node's clock may be behind."""
    lines, time_ms = [], 0
    for event in log.of_stage(stage, *kinds):
        time_ms = max(time_ms, event["time_ms"])
        lines.append(event | {"time_ms": time_ms})
    return lines


def hang_lines(log: RunLog) -> list[str]:
    """Return a line per hang of a run, including measurements that a guided search repeated."""
    return [
        f"{stage} hung at {datetime.fromtimestamp(event['time_ms'] / 1e3):%Y-%m-%d %H:%M:%S}: {event['message']}"
        for stage in log.stages
        for event in log.of_stage(stage, "hang")
    ]


def teacher_lines(result: RunResult) -> list[str]:
    """Return a line with each teacher's accuracy: as measured for given weights, else at the best epoch of its training."""
    trained = [
        f"teacher {stage.model}: {stage.metrics['best_top1_pct']:.2f}% top-1, trained here"
        for stage in result.stages
        if stage.stage == "teacher" and "best_top1_pct" in stage.metrics
    ]
    given = [str(teacher) for row in (*result.stages, *result.rows) for teacher in row.teachers]
    return list(dict.fromkeys([*trained, *given]))


def running_stage_lines(records: Records) -> list[str]:
    """Return a line with the progress of each running stage, followed by a line for each of its ranks."""
    lines = []
    for stage in records.log.stages:
        kinds = [kind for kind, _ in records.log.raw_of(stage) if kind in _PROGRESS or kind == "stage_ended"]
        if not kinds or kinds[-1] in ("summary", "stage_ended") or _is_of_an_ended_measurement(records.log, stage):
            continue
        numbers = records.log.of_stage(stage, *_PROGRESS)
        speeds = [line["metrics"]["train/images_per_s"] for line in numbers if line["metrics"].get("train/images_per_s")]
        speed = f"{speeds[-1]:,.1f}" if speeds else "–"
        step = max(line["step"] for line in numbers)
        lines.append(f"{stage}: step {step}, {speed} images/s, last update {_ago(numbers[-1]['time_ms'])}")
        lines += rank_lines(StageDir(records.run_dir.root / stage))
    return lines


def _is_of_an_ended_measurement(log: RunLog, stage: str) -> bool:
    """Whether a stage is a measurement of a trial (`student`, `student-2` …) with a known outcome."""
    found = re.fullmatch(r"trials/([^/]+)/student(?:-(\d+))?(?:-init)?", stage)
    return found is not None and int(found[2] or 1) <= len(log.fold.measured(found[1]))


def rank_lines(stage: StageDir) -> list[str]:
    """Return a line for each rank by its last heartbeat, the longest without progress first; at most _MAX_RANKS of them."""
    try:
        record = json.loads(stage.heartbeats.read_bytes())
        ranks = sorted(record["ranks"], key=lambda rank: rank["age_s"], reverse=True)
        lines = [
            f"  rank {rank['rank']}: {rank['at']}, last progress {_ago(record['time_ms'] - 1e3 * rank['age_s'])}"
            for rank in ranks[:_MAX_RANKS]
        ]
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or from another version
        return []
    return lines if len(ranks) <= _MAX_RANKS else [*lines, f"  and {len(ranks) - _MAX_RANKS} ranks with later progress"]


def _ago(time_ms: float) -> str:
    """Format a unix time in milliseconds as `12 s ago`."""
    return f"{max(time.time() - time_ms / 1e3, 0.0):.0f} s ago"


def step_error(row: TrialRow) -> float | None:
    """Return the relative standard error of a trial's mean step time, or None if too few times are known."""
    return relative_error(row.steps_s) if len(row.steps_s) >= _MIN_TIMES else None


def value(row: TrialRow, key: str) -> Any:
    """Return a trial's value on an axis; for `auto` loader workers, the resolved number."""
    return row.scale.by_key.get(key, row.params.get(key))


def ordered(values: Iterable[Any]) -> list[Any]:
    """Sort distinct values: numbers by size, then all others as text, including lists and the None of a missing key."""
    found = {repr(item): item for item in values}.values()
    return sorted(found, key=lambda item: (0, item, "") if isinstance(item, int | float) else (1, 0, str(item)))


def searched_keys(rows: Iterable[TrialRow]) -> list[str]:
    """Return the three axes of every sweep and all other keys that the trials set."""
    return list(dict.fromkeys([*SCALE_AXES, *(key for row in rows for key in row.params)]))


def axes(rows: Sequence[TrialRow]) -> list[str]:
    """Return the keys in which the trials differ."""
    return [key for key in searched_keys(rows) if len({repr(value(row, key)) for row in rows}) > 1]


def ran(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trials that have a speed."""
    return [row for row in rows if row.status in ("ok", "stopped") and row.metrics.get("images_per_s")]


def by_speed(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trials that have a speed, fastest first."""
    return sorted(ran(rows), key=lambda row: row.metrics["images_per_s"], reverse=True)


def ended(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trials that have ended, with or without a result."""
    return [row for row in rows if row.status not in UNFINISHED]
