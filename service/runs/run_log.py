"""Reads a run's `events.jsonl`, which all readers of a run start from."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.runs.event_log import log_lines
from service.runs.events import Event, head, parsed
from service.runs.outcome import Outcome, ResultPart, combined
from service.runs.result import RunResult, first_mistake, parse_result
from trainables.errors import ExperimentError
from trainables.rundir import Line, RunDir

_NOT_IN_STAGE_ROW = {"steps_s", "ended_s", "measurements"}
"""Fields of an outcome that a stage's row does not have."""


class _TrialId(ResultPart):
    id: str


class _Changes(ResultPart):
    """What folding needs of a `result` event's changes. The rest is checked when the result is read."""

    trials: list[_TrialId] | None = None


class ResultFold:
    """Folds events into the content of `result.json`."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        """JSON fields of `RunResult` except those below."""
        self.rows: dict[str, dict[str, Any]] = {}
        """JSON rows of a sweep's trials, by id."""
        self._stages: dict[str, dict[str, Any]] = {}
        self._measured: dict[str, list[Outcome]] = {}
        self._notices: list[str] = []
        self._seconds = 0.0
        self._began_ms = self._last_ms = 0
        self._result: RunResult | None = None

    def take(self, event: Event) -> None:
        """Apply the next event of the log. Raises ValidationError: a field of its changes or outcome is damaged."""
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
            # If the last session's driver was killed, its last event may have come from a worker with another clock.
            self._seconds = self.seconds(min(self._last_ms, time_ms))
            self._began_ms = self._last_ms = time_ms
            self.fields |= {"status": "running", "reason": ""}
        elif kind == "session_ended":
            self._seconds, self._began_ms = self.seconds(time_ms), 0
            self.fields |= {"status": event["status"], "reason": event["reason"]}
        elif kind == "stage_ended" and "/" not in event["stage"]:
            self._end_stage(event)
        elif kind == "trial_ended":
            self._end_trial(event["trial"], _outcome(event))
        elif kind == "discarded":
            self._measured.pop(event.get("trial", ""), None)
            self._stages.pop(event.get("stage", ""), None)

    def take_time(self, time_ms: int) -> None:
        """Apply only the time of an event of the current session."""
        self._last_ms = max(self._last_ms, time_ms)

    def seconds(self, now_ms: int) -> float:
        """Total run time of all sessions up to now."""
        return self._seconds + (max(now_ms - self._began_ms, 0) / 1e3 if self._began_ms else 0.0)

    def _change(self, changes: dict[str, Any]) -> None:
        _Changes.model_validate(changes)
        for row in changes.get("trials") or ():
            self.rows[row["id"]] = row
        self.fields |= {name: value for name, value in changes.items() if name != "trials"}
        if "trials" in changes:
            self.fields["trials"] = ()

    def _end_stage(self, event: Event) -> None:
        before = self._stages.get(event["stage"])
        status = _outcome(event).status
        if before and before["status"] == status == "ok":  # it was complete already: keep its times
            return
        outcome = {name: value for name, value in event["outcome"].items() if name not in _NOT_IN_STAGE_ROW}
        about = {name: event.get(name) for name in ("stage", "model", "checkpoint")}
        self._stages.pop(event["stage"], None)
        self._stages[event["stage"]] = {**about, **outcome}

    def _end_trial(self, trial: str, outcome: Outcome) -> None:
        self._measured.setdefault(trial, []).append(outcome)
        if (row := self.rows.get(trial)) is not None:
            about = {name: value for name, value in row.items() if name not in Outcome.model_fields}
            self.rows[trial] = about | as_json(combined(self._measured[trial]))

    def outcome_of(self, trial: str) -> Outcome | None:
        """Return a trial's outcome over all of its measurements, or None if it has not ended."""
        measured = self._measured.get(trial)
        return combined(measured) if measured else None

    def measured(self, trial: str) -> Sequence[Outcome]:
        return self._measured.get(trial, ())

    def result(self, path: Path) -> RunResult:
        """Return the typed result. Raises ExperimentError: the log at `path` has none, or a field is damaged."""
        if self._result is None:
            rows = {"stages": self._stages.values(), "notices": self._notices, "trials": self.rows.values()}
            fields = self.fields | {name: list(each) for name, each in rows.items() if each}
            if self._began_ms or self._seconds:
                fields["seconds"] = self.seconds(self._last_ms)
            self._result = parse_result(json.dumps(fields), path)
        return self._result


def as_json(part: ResultPart) -> dict[str, Any]:
    """Serialize a part of a result for an event, without fields that have their default values."""
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True, warnings=False)


class RunLog:
    """The whole log of a run, read once. The events of a stage are parsed on demand."""

    def __init__(self, path: Path) -> None:
        """Raises ExperimentError: the log is damaged, or has another format."""
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
                except ValidationError as error:
                    part = "outcome." if "outcome" in event else ""
                    problem = f"the line that ends at byte {line.end}: {event['kind']}.{part}{first_mistake(error)}"
                    raise ExperimentError(f"{path} is damaged: {problem}: restore a copy, or start a new run") from error
                if kind == "discarded":
                    self._lines.pop(stage, None)

    @property
    def result(self) -> RunResult:
        """The result according to the log. Raises ExperimentError: see `ResultFold.result`."""
        return self.fold.result(self.path)

    @property
    def stages(self) -> list[str]:
        """Names of the stages that have begun, in order."""
        return list(self._lines)

    def raw_of(self, stage: str) -> Iterable[tuple[str, Line]]:
        """The kind and line of each event of a stage."""
        return [(head(line.raw)[0], line) for line in self._lines.get(stage, ())]

    def of_stage(self, stage: str, *kinds: str) -> list[Event]:
        """Return a stage's events of these kinds, or all of them, in order."""
        lines = [line for kind, line in self.raw_of(stage) if not kinds or kind in kinds]
        return [event for line in lines if (event := parsed(line, self.path)) is not None]

    def is_complete(self, stage: str) -> bool:
        """Whether a stage has been trained to its end."""
        return any(kind == "summary" for kind, _ in self.raw_of(stage))


def _outcome(event: Event) -> Outcome:
    return Outcome.model_validate_json(json.dumps(event["outcome"]))


def checkpoint_names(events: Iterable[Event]) -> dict[str, str]:
    """Return the file names of a stage's newest `best` and `last` checkpoints, if it has them, by kind."""
    names = [name for event in events if event["kind"] == "checkpoint" for name in event["names"]]
    return {checkpoint_kind(name): name for name in names}


def checkpoint_kind(name: str) -> str:
    """Return `best` or `last` from a checkpoint's file name, which has a suffix in an object store."""
    return Path(name).stem.partition("-")[0]


def read_log(run_dir: RunDir) -> RunLog:
    """Read the log of a run. Raises ExperimentError: it has none, or one that cannot be read."""
    if not run_dir.events.exists():
        raise ExperimentError(
            f"{run_dir.root} has no events.jsonl: it is not a run, or another version wrote it; start a new run"
        )
    return RunLog(run_dir.events)
