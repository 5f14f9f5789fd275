"""A run's log as trials and workers write it: calls of the actor that alone has the file, `service.runs.recorder.Recorder`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from trainables.errors import RecorderLostError


@dataclass(frozen=True)
class RunRecorder:
    """The actor and the run's folder; what can be sent to trials and workers."""

    actor: Any
    root: str
    attempt: int | None = None
    """That of the workers that have it, see `begin_attempt`."""

    def stage(self, folder: Path) -> str:
        """A stage's name in the log."""
        return str(folder.relative_to(self.root))

    def begin_attempt(self, folder: Path) -> "RunRecorder":
        """What workers get that begin now at a stage: those before them are refused from here on."""
        return replace(self, attempt=_get(self.actor.begin_attempt.remote(self.stage(folder))))

    def send(self, kind: str, folder: Path, **fields: Any) -> Callable[[], None]:
        """Send a worker's event of a stage, and return what waits until it is durable, or raises why it is not.

        Raises PendingCallsLimitExceeded: too many are on their way.
        """
        event = {"kind": kind, "stage": self.stage(folder), "time_ms": time.time_ns() // 1_000_000} | fields
        return partial(_get, self.actor.append.remote([event], self.attempt))

    def record(self, events: Sequence[dict[str, Any]]) -> None:
        """Write events that may come twice; returns once they are durable, also where the actor dies meanwhile."""
        _get(self.actor.record.remote(events))

    def of(self, key: str) -> list[dict[str, Any]]:
        """The events of a stage, or of a trial by its folder (`trials/003`), in order."""
        found: list[dict[str, Any]] = _get(self.actor.of.remote(key))
        return found

    def text(self, path: Path, text: str) -> None:
        """Append to a file of the run for people, soon."""
        self.actor.append_text.remote(str(path.relative_to(self.root)), text)


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise RecorderLostError from error
