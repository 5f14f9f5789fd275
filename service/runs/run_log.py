"""A run as its `events.jsonl` tells it: what all readers of a run begin from."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.runs.event_log import log_lines
from service.runs.events import Event, head, parsed
from service.runs.measurements import combined
from service.runs.outcome import Outcome
from service.runs.result import RunResult, TrialRow, first_mistake, parse_result
from trainables.errors import ExperimentError
from trainables.rundir import Line, RunDir

_OF_ROW = {"steps_s", "ended_s", "measurements"}
"""Parts of an outcome that the row of a stage does not have."""


class ResultFold:
    """What `result.json` holds, as the events so far make it."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        """Fields of `RunResult`, as JSON has them, but for those below."""
        self.rows: dict[str, dict[str, Any]] = {}
        """Rows of a sweep's trials, as JSON has them."""
        self._stages: dict[str, dict[str, Any]] = {}
        self._measured: dict[str, list[Outcome]] = {}
        self._notices: list[str] = []
        self._seconds = 0.0
        self._began_ms = self._last_ms = 0
        self._result: RunResult | None = None

    def take(self, event: Event) -> None:
        """The next event of the log."""
        kind, time_ms = event["kind"], event["time_ms"]
        if kind != "session_begun":
            self.take_time(time_ms)
        if "stage" not in event or kind in ("stage_ended", "discarded"):
            self._result = None
        if kind == "result":
            self._change(event["changes"])
        elif kind == "notice":
            self._notices.append(event["text"])
        elif kind == "session_begun":
            # The last event of a session whose driver was killed may be a worker's, whose clock is another one.
            self._seconds = self.seconds(min(self._last_ms, time_ms))
            self._began_ms = self._last_ms = time_ms
            self.fields |= {"status": "running", "reason": ""}
        elif kind == "session_ended":
            self._seconds, self._began_ms = self.seconds(time_ms), 0
            self.fields |= {"status": event["status"], "reason": event["reason"]}
        elif kind == "stage_ended" and "/" not in event["stage"]:
            self._end_stage(event)
        elif kind == "trial_ended":
            self._end_trial(event["trial"], Outcome.model_validate_json(json.dumps(event["outcome"])))
        elif kind == "discarded":
            self._measured.pop(event.get("trial", ""), None)
            self._stages.pop(event.get("stage", ""), None)

    def take_time(self, time_ms: int) -> None:
        """When an event was recorded; it was in the session that began last."""
        self._last_ms = max(self._last_ms, time_ms)

    def seconds(self, now_ms: int) -> float:
        """What the sessions took until now."""
        return self._seconds + (max(now_ms - self._began_ms, 0) / 1e3 if self._began_ms else 0.0)

    def _change(self, changes: dict[str, Any]) -> None:
        for row in changes.get("trials") or ():
            self.rows[row["id"]] = row
        self.fields |= {name: value for name, value in changes.items() if name != "trials"}
        if "trials" in changes:
            self.fields["trials"] = ()

    def _end_stage(self, event: Event) -> None:
        before = self._stages.get(event["stage"])
        if before and before["status"] == event["outcome"]["status"] == "ok":  # it was complete: its times stand
            return
        outcome = {name: value for name, value in event["outcome"].items() if name not in _OF_ROW}
        about = {name: event.get(name) for name in ("stage", "model", "checkpoint")}
        self._stages.pop(event["stage"], None)
        self._stages[event["stage"]] = {**about, **outcome}

    def _end_trial(self, trial: str, outcome: Outcome) -> None:
        self._measured.setdefault(trial, []).append(outcome)
        if (row := self.rows.get(trial)) is not None:
            about = {name: value for name, value in row.items() if name not in Outcome.model_fields}
            self.rows[trial] = about | as_json(combined(self._measured[trial]))

    def outcome_of(self, trial: str) -> Outcome | None:
        """How a trial has ended, by all of its measurements; None: it has not."""
        measured = self._measured.get(trial)
        return combined(measured) if measured else None

    def measured(self, trial: str) -> Sequence[Outcome]:
        return self._measured.get(trial, ())

    def result(self, path: Path) -> RunResult:
        """The result. Raises ExperimentError: the log at `path` has none, or one that is damaged; names the field."""
        if self._result is None:
            rows = {"stages": self._stages.values(), "notices": self._notices, "trials": self.rows.values()}
            fields = self.fields | {name: list(each) for name, each in rows.items() if each}
            if self._began_ms or self._seconds:
                fields["seconds"] = self.seconds(self._last_ms)
            self._result = parse_result(json.dumps(fields), path)
        return self._result


def as_json(part: Outcome | TrialRow) -> dict[str, Any]:
    """A part of a result as events have it: without what is as it is by default."""
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True, warnings=False) | {"status": part.status}


class RunLog:
    """The whole log of a run, read once. A stage's events are parsed when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ExperimentError: the log is of another format."""
        self.path, self.fold, self.end = path, ResultFold(), 0
        self._lines: dict[str, list[Line]] = {}
        for line in log_lines(path):
            self.end = line.end
            kind, stage, time_ms = head(line.raw)
            if stage and kind != "discarded":
                self._lines.setdefault(stage, []).append(line)
                if kind != "stage_ended":
                    self.fold.take_time(time_ms)
                    continue
            if (event := parsed(line, path)) is not None:
                try:
                    self.fold.take(event)
                except (KeyError, TypeError, ValueError) as error:
                    problem = f"its line that ends at byte {line.end}: {event['kind']}.{_mistake(error)}"
                    raise ExperimentError(f"{path} is damaged: {problem}: put back a copy, or begin another run") from error
                if kind == "discarded":
                    self._lines.pop(stage, None)

    @property
    def result(self) -> RunResult:
        """The run as its events tell it. Raises ExperimentError: see `ResultFold.result`."""
        return self.fold.result(self.path)

    @property
    def stages(self) -> list[str]:
        """Those that have begun, in order."""
        return list(self._lines)

    def raw_of(self, stage: str) -> Iterable[tuple[str, Line]]:
        """Kind and line of each event of a stage."""
        return [(head(line.raw)[0], line) for line in self._lines.get(stage, ())]

    def of_stage(self, stage: str, *kinds: str) -> list[Event]:
        """A stage's events in order, of these kinds or of all."""
        lines = [line for kind, line in self.raw_of(stage) if not kinds or kind in kinds]
        return [event for line in lines if (event := parsed(line, self.path)) is not None]

    def is_complete(self, stage: str) -> bool:
        """Whether a stage has been trained to its end."""
        return any(kind == "summary" for kind, _ in self.raw_of(stage))


def _mistake(error: Exception) -> str:
    """What is wrong with an event that cannot be taken up: the field, and what it should be."""
    if isinstance(error, ValidationError):
        return f"outcome.{first_mistake(error)}"
    return f"{error.args[0]}: missing" if isinstance(error, KeyError) else "trials: must be a list of rows"


def checkpoint_names(events: Iterable[Event]) -> dict[str, str]:
    """The names of a stage's newest checkpoints, by its events: of `best` and `last`, as far as it has them."""
    names = [name for event in events if event["kind"] == "checkpoint" for name in event["names"]]
    return {checkpoint_kind(name): name for name in names}


def checkpoint_kind(name: str) -> str:
    """`best` or `last`, by the name of a checkpoint's file: in an object store it goes on."""
    return Path(name).stem.partition("-")[0]


def read_log(run_dir: RunDir) -> RunLog:
    """The log of a run. Raises ExperimentError: it has none, or one of another format."""
    if not run_dir.events.exists():
        raise ExperimentError(f"{run_dir.root} has no events.jsonl: another version wrote it, or it is no run; begin another run")
    return RunLog(run_dir.events)
