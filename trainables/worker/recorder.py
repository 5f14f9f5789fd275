"""A run's log as trials and workers write it: calls of the actor that alone has the file, `service.runs.recorder.Recorder`."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
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

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _outbox(self) -> "_Outbox":
        return _Outbox(self.actor, self.attempt)

    def send(self, kind: str, folder: Path, **values: Any) -> Callable[[], None]:
        """Send a worker's event of a stage, and return what waits until it is durable, or raises why it is not.

        A process's events are written in their order, and none behind one that could not be written.
        """
        event = {"kind": kind, "stage": self.stage(folder), "time_ms": time.time_ns() // 1_000_000} | values
        return self._outbox.put(event).result

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


class _Outbox:
    """A process's events on their way: one call after the other, since Ray carries out an async actor's calls in any order.

    What comes meanwhile goes with the next call.
    """

    def __init__(self, actor: Any, attempt: int | None) -> None:
        self._actor, self._attempt = actor, attempt
        self._waiting = deque[dict[str, Any]]()
        self._pool = ThreadPoolExecutor(1, "events")
        self._failure: Exception | None = None

    def put(self, event: dict[str, Any]) -> Future[None]:
        self._waiting.append(event)
        return self._pool.submit(self._send)

    def _send(self) -> None:
        if self._failure is not None:
            raise self._failure
        events = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            if events:
                _get(self._actor.append.remote(events, self._attempt))
        except Exception as error:
            self._failure = error
            raise


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise RecorderLostError from error
