"""A run's log as trials and workers write it: calls of the actor that alone has the file, `service.runs.recorder.Recorder`."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from trainables.errors import RecorderLostError

Text = tuple[str, str]
"""The path of a file of the run for people, relative to the run's folder, and what is appended to it."""
MAX_WAITING = 1000
"""How many events of a process, and how many of its texts, may wait for the recorder, which writes thousands a second."""
NO_ANSWER_S = 120.0
"""After so long without an answer the recorder is lost to a worker, as where its disk hangs."""


@dataclass(frozen=True)
class RunRecorder:
    """The actor and the run's folder; what can be sent to trials and workers."""

    actor: Any
    root: str
    attempt: int | None = None
    """That of the workers that have it, see `begin_attempt`."""
    no_answer_s: float = NO_ANSWER_S

    def stage(self, folder: Path) -> str:
        """A stage's name in the log."""
        return str(folder.relative_to(self.root))

    def begin_attempt(self, folder: Path) -> "RunRecorder":
        """What workers get that begin now at a stage: those before them are refused from here on."""
        return replace(self, attempt=_get(self.actor.begin_attempt.remote(self.stage(folder))))

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _outbox(self) -> "Outbox":
        return Outbox(self.record)

    def send(self, kind: str, folder: Path, **values: Any) -> Callable[[], None]:
        """Send a worker's event of a stage, and return what waits until it is durable, or raises why it is not.

        A process's events are written in their order, and none behind one that could not be written.
        It waits for room where many are on their way.
        """
        event = {"kind": kind, "stage": self.stage(folder), "time_ms": time.time_ns() // 1_000_000} | values
        return self._outbox.put(event).result

    def record(self, events: Sequence[dict[str, Any]], texts: Sequence[Text] = ()) -> None:
        """Write events and texts; returns once they are durable, also where the actor dies meanwhile.

        Raises RecorderLostError: it cannot start again; or, to a worker, it has not answered for `no_answer_s`.
        """
        _get(self.actor.append.remote(events, self.attempt, texts), None if self.attempt is None else self.no_answer_s)

    def check_attempt(self, folder: Path) -> None:
        """Raises StaleAttemptError: other workers have begun at the stage since. Raises RecorderLostError: see `record`."""
        _get(self.actor.check_attempt.remote(self.stage(folder), self.attempt), self.no_answer_s)

    def of(self, key: str) -> list[dict[str, Any]]:
        """The events of a stage, or of a trial by its folder (`trials/003`), in order."""
        found: list[dict[str, Any]] = _get(self.actor.of.remote(key))
        return found

    def text(self, path: Path, text: str) -> None:
        """Append to a file of the run for people, soon; a process's texts in their order. What cannot be written ends nothing."""
        self._outbox.put_text(str(path.relative_to(self.root)), text)

    def flush(self, timeout_s: float) -> None:
        """Wait until this process's texts are written. Raises TimeoutError, and as `record` does."""
        self._outbox.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Let another process write the log. Raises RayError: the actor does not answer."""
        ray.get(self.actor.close.remote(), timeout=timeout_s)


class Outbox:
    """A process's events and texts on their way: one call after the other, since Ray carries out an async actor's in any order.

    What comes meanwhile goes with the next call.
    """

    def __init__(self, record: Callable[[Sequence[dict[str, Any]], Sequence[Text]], None]) -> None:
        """`record`: see `RunRecorder`."""
        self._record = record
        self._events, self._texts, self._left_out = deque[dict[str, Any]](), deque[Text](), Counter[str]()
        self._room = threading.Semaphore(MAX_WAITING)
        self._pool = ThreadPoolExecutor(1, "events")
        self._failure: Exception | None = None

    def put(self, event: dict[str, Any]) -> Future[None]:
        """Send an event; waits for room."""
        self._room.acquire()
        self._events.append(event)
        return self._pool.submit(self._send)

    def put_text(self, path: str, text: str) -> None:
        """Send a text; where there is no room, what comes next says that it is left out."""
        if len(self._texts) < MAX_WAITING:
            self._texts.append((path, text))
            self._pool.submit(self._send_texts)
        else:
            self._left_out[path] += 1

    def flush(self, timeout_s: float) -> None:
        """See `RunRecorder.flush`."""
        self._pool.submit(self._record, [], []).result(timeout_s)

    def _send(self) -> None:
        events = [self._events.popleft() for _ in range(len(self._events))]
        try:
            if self._failure is not None:
                raise self._failure
            if events:
                self._record(events, ())
        except Exception as error:
            self._failure = error
            raise
        finally:
            if events:
                self._room.release(len(events))

    def _send_texts(self) -> None:
        left_out, self._left_out = self._left_out, Counter()
        texts = [self._texts.popleft() for _ in range(len(self._texts))]
        texts += [(path, f"({count} lines are left out: the log was written too slowly)\n") for path, count in left_out.items()]
        if texts:
            self._record([], texts)


def _get(reference: Any, timeout_s: float | None = None) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        problem = f"has not answered for {timeout_s:g} s: see that the run's disk works"
        raise RecorderLostError(f"the process that writes the run's log {problem}, then `distill resume`") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        problem = "has died and does not start again: see that the run's disk works"
        raise RecorderLostError(f"the process that writes the run's log {problem}, then `distill resume`") from error
