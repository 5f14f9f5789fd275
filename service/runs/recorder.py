"""The actor that writes a run's log while Ray runs, on the driver's node; see `trainables.worker.recorder` for its other end."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import ray

from service.runs.event_log import EventLog
from service.runs.events import Event, event
from trainables.worker.ray_nodes import on_this_node
from trainables.worker.recorder import RunRecorder

log = logging.getLogger("raydistill")

MAX_PENDING_CALLS = 1000


def start_recorder(path: Path) -> RunRecorder:
    """Start the actor that writes the log at `path`. Where it dies, Ray starts it again: its state is the file.

    Raises RayActorError: it could not open the log.
    """
    options = {"num_cpus": 0, "max_restarts": -1, "max_pending_calls": MAX_PENDING_CALLS, "scheduling_strategy": on_this_node()}
    actor = ray.remote(Recorder).options(**options).remote(str(path))
    ray.get(actor.flush.remote())
    return RunRecorder(actor, str(path.parent))


class Recorder:
    """The actor that writes a run's log while Ray runs. What waits together takes one write and one fsync."""

    def __init__(self, path: str) -> None:
        self._log = EventLog(Path(path))
        self._attempt = self._log.newest_attempt
        self._waiting: list[tuple[Sequence[Event], int | None, asyncio.Future[None]]] = []
        self._texts: dict[Path, list[str]] = {}
        self._writing: asyncio.Task[None] | None = None

    async def append(self, events: Sequence[Event], attempt: int | None = None) -> None:
        """Returns once the events are durable. Raises StaleAttemptError, OSError: see `EventLog`."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, attempt, written))
        self._write_soon()
        await written

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def record(self, events: Sequence[Event]) -> None:
        """As `append`, for events that may come twice: where the actor dies, Ray calls it again."""
        await self.append(events)

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def begin_attempt(self, stage: str) -> int:
        """The number of the attempt that workers begin now at a stage: events of earlier ones are refused from here on."""
        self._attempt += 1
        number = self._attempt
        await self.append([event("attempt", stage, attempt=number)])
        return number

    async def append_text(self, path: str, text: str) -> None:
        """Append to a file of the run for people, soon. A disk that does not take it ends nothing."""
        self._texts.setdefault(self._log.path.parent / path, []).append(text)
        self._write_soon()

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def of(self, key: str) -> list[Event]:
        """See `EventLog.of`."""
        return self._log.of(key)

    async def flush(self) -> None:
        """Returns once all is written that came before."""
        while self._writing is not None:
            await self._writing

    def _write_soon(self) -> None:
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        while self._waiting or self._texts:
            waiting, self._waiting = self._waiting, []
            texts, self._texts = self._texts, {}
            await asyncio.to_thread(write_texts, texts)
            try:
                refusals = await asyncio.to_thread(self._log.append_each, [(events, attempt) for events, attempt, _ in waiting])
            except Exception as error:
                refusals = [error] * len(waiting)
            for refusal, (_, _, written) in zip(refusals, waiting, strict=True):
                if refusal is None:
                    written.set_result(None)
                else:
                    written.set_exception(refusal)
        self._writing = None


def write_texts(texts: dict[Path, list[str]]) -> None:
    """Append texts to files; one that cannot be written is logged."""
    for path, parts in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write("".join(parts))
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
