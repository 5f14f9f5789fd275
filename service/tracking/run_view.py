"""The MLflow runs that a log should have, and which MLflow a run uses. Knows nothing of the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainables.rundir import Line, RunDir, lines_after, remove_unfinished, write_json

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
DESCRIPTION = "mlflow.note.content"
KEY_TAG = "raydistill.key"
"""The log's id and the key of the run in it."""


class Item(NamedTuple):
    """A metric or file of a run, which is sent once."""

    end: int
    """End offset of its event in the log."""
    kind: Literal["metrics", "dataset", "views", "artifact", "model"]
    value: Any
    """`metrics`: (name, value, unix ms, step). `artifact`: a path. `dataset`, `views`: a mapping.

    `model`: a function that returns a checkpoint's local path, and a name in MLflow's model registry or None.
    """


@dataclass
class RunView:
    """An MLflow run according to the log so far. `parent` is the key of its parent run."""

    key: str
    """Unique within the log."""
    name: str
    parent: str | None
    began_ms: int
    params: Callable[[], Mapping[str, str]]
    tags: dict[str, str] = field(default_factory=dict)
    status: Status = "RUNNING"
    ended_ms: int = 0
    items: deque[Item] = field(default_factory=deque)
    """Unsent items, in order."""


class LogView(Protocol):
    """The MLflow runs that a log should have."""

    runs: dict[str, RunView]
    """By key, parents before their children."""

    def take(self, line: Line) -> None:
        """Apply the next line of the log."""


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
