"""What MLflow is to have of a run or a trial, and where a run's MLflow is. Nothing here knows the store."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainables.rundir import RunDir, lines_after, remove_unfinished, write_json

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
DESCRIPTION = "mlflow.note.content"
KEY_TAG = "raydistill.key"
"""The log's id and the key of the run in it."""


class RefusedError(Exception):
    """The store will never take this."""


class Item(NamedTuple):
    """A part of a run that is sent once: its metrics and files."""

    end: int
    """Offset behind the event in the log that it comes from."""
    kind: Literal["metrics", "dataset", "views", "artifact", "model"]
    value: Any
    """`metrics`: (name, value, unix ms, step). `artifact`, `model`: a path. `dataset`, `views`: a mapping."""


@dataclass
class RunView:
    """A run of MLflow as the log has it so far. `key` names it within the log, `parent` is the key of the run above it."""

    key: str
    name: str
    parent: str | None
    began_ms: int
    params: Callable[[], Mapping[str, str]]
    tags: dict[str, str] = field(default_factory=dict)
    status: Status = "RUNNING"
    ended_ms: int = 0
    items: deque[Item] = field(default_factory=deque)
    """What is not sent yet, in order."""
    changed: int = 0
    """Offset behind the last event about this run."""
    mark: str = ""
    """By which that event is found again in the log, see `LogView.offset_of`."""


class LogView(Protocol):
    """What MLflow is to have of a run's log, read bit by bit."""

    id: str
    """Identifies the log: it distinguishes its runs in MLflow from those of every other log."""
    end: int
    """Offset up to which the log was read."""
    runs: dict[str, RunView]
    """By key, parents before their children."""

    @property
    def registered_model(self) -> str | None:
        """The name in MLflow's model registry under which the run's model goes; None: it is not registered."""

    def read(self) -> bool:
        """Take up the next part of the log; False: there is none. Raises OSError."""

    def offset_of(self, mark: str) -> int:
        """Offset behind an event that MLflow has; 0 where the log does not have that event there.

        Of a run in an object store MLflow may have what was lost with a driver's node before the store had it.
        """

    def checkpoint(self, path: Path) -> Path:
        """A checkpoint of the run, brought here where it is elsewhere. Raises StorageError."""


OpenView = Callable[[RunDir], LogView]
"""Begins to read a run's log."""


class SyncState(BaseModel):
    """`.mlflow.json` of a run: where its MLflow is, and whether that has all of the log. How much it has, MLflow is asked for."""

    model_config = ConfigDict(extra="ignore")

    uri: str
    experiment: str
    position: int = 0
    """Size of the log when all of it was sent."""
    experiment_id: str = ""
    views: list[str] = Field(default_factory=list)
    """Keys of the saved views that MLflow has: the table, the charts."""

    @classmethod
    def read(cls, run_dir: RunDir) -> SyncState | None:
        """The state of a run; None where it has none, or a damaged one. Raises OSError."""
        try:
            return cls.model_validate_json(state_path(run_dir).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    @classmethod
    def of(cls, run_dir: RunDir, uri: str, experiment: str) -> SyncState:
        """The state of a run whose MLflow is at `uri`. Raises OSError."""
        state = cls.read(run_dir)
        if state is None or (state.uri, state.experiment) != (uri, experiment):
            return cls(uri=uri, experiment=experiment)
        return state

    def write(self, run_dir: RunDir) -> None:
        """Replace the file, under the run's lock of MLflow. Raises OSError."""
        remove_unfinished(state_path(run_dir))
        write_json(state_path(run_dir), self.model_dump())

    def is_sent(self, run_dir: RunDir) -> bool:
        """Whether MLflow has all of the log. Raises OSError."""
        return not lines_after(run_dir.events, self.position)


def state_path(run_dir: RunDir) -> Path:
    return run_dir.root / ".mlflow.json"


def lock_path(run_dir: RunDir) -> Path:
    return run_dir.root / ".mlflow.lock"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names; values as text: strings as they are, everything else as JSON."""
    out: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return out
