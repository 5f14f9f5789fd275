"""The MLflow runs that a log should have, and which MLflow a run uses. Knows nothing of the store."""

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
    """The store rejects this, and always will."""


class Item(NamedTuple):
    """A metric or file of a run, which is sent once."""

    end: int
    """End offset of its event in the log."""
    kind: Literal["metrics", "dataset", "views", "artifact", "model"]
    value: Any
    """`metrics`: (name, value, unix ms, step). `artifact`, `model`: a path. `dataset`, `views`: a mapping."""


@dataclass
class RunView:
    """An MLflow run according to the log so far. `key` is unique within the log; `parent` is the parent run's key."""

    key: str
    name: str
    parent: str | None
    began_ms: int
    params: Callable[[], Mapping[str, str]]
    tags: dict[str, str] = field(default_factory=dict)
    status: Status = "RUNNING"
    ended_ms: int = 0
    items: deque[Item] = field(default_factory=deque)
    """Unsent items, in order."""
    changed: int = 0
    """End offset of the last event about this run."""
    mark: str = ""
    """Identifies that event in the log, see `LogView.offset_of`."""


class LogView(Protocol):
    """The MLflow runs that a log should have. The log is read in parts."""

    id: str
    """Identifies the log, and so its runs in MLflow."""
    end: int
    """Offset up to which the log was read."""
    runs: dict[str, RunView]
    """By key, parents before their children."""

    @property
    def registered_model(self) -> str | None:
        """The name for the run's model in MLflow's model registry, or None if it is not registered."""

    def read(self) -> bool:
        """Read the next part of the log. Returns whether there was one. Raises OSError."""

    def offset_of(self, mark: str) -> int:
        """Return the end offset of an event that MLflow has, or 0 if the log does not have that event there.

        MLflow may have events that a run in an object store has lost with the driver's node.
        """

    def checkpoint(self, path: Path) -> Path:
        """Return the local path of a checkpoint, downloading it if needed. Raises StorageError."""


OpenView = Callable[[RunDir], LogView]
"""Creates the view of a run's log."""


class SyncState(BaseModel):
    """`.mlflow.json` of a run: where its MLflow is, and whether MLflow has the whole log (how much it has, MLflow knows)."""

    model_config = ConfigDict(extra="ignore")

    uri: str
    experiment: str
    position: int = 0
    """Size of the log when all of it was sent."""
    experiment_id: str = ""
    views: list[str] = Field(default_factory=list)
    """Keys of the saved views in MLflow: table, charts."""

    @classmethod
    def read(cls, run_dir: RunDir) -> SyncState | None:
        """Read a run's state; None if it is missing or damaged. Raises OSError."""
        try:
            return cls.model_validate_json(state_path(run_dir).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    @classmethod
    def of(cls, run_dir: RunDir, uri: str, experiment: str) -> SyncState:
        """Return a run's state, or a new one if the run was sent to another MLflow before. Raises OSError."""
        state = cls.read(run_dir)
        if state is None or (state.uri, state.experiment) != (uri, experiment):
            return cls(uri=uri, experiment=experiment)
        return state

    def write(self, run_dir: RunDir) -> None:
        """Replace the file. The caller holds the lock at `lock_path`. Raises OSError."""
        remove_unfinished(state_path(run_dir))
        write_json(state_path(run_dir), self.model_dump())

    def is_sent(self, run_dir: RunDir) -> bool:
        """Whether MLflow has the whole log. Raises OSError."""
        return not lines_after(run_dir.events, self.position)


def state_path(run_dir: RunDir) -> Path:
    return run_dir.root / ".mlflow.json"


def lock_path(run_dir: RunDir) -> Path:
    return run_dir.root / ".mlflow.lock"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted names. Values that are not strings become JSON."""
    out: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return out
