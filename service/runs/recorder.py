"""The actor on the driver's node that writes a run's log while Ray runs. Its client is `trainables.worker.recorder`."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import ray

from service.runs.event_log import EventLog
from service.runs.events import OUTLIVES_NODE, Event, event
from service.runs.stored.driver_lease import LeaseLostError
from service.runs.stored.segments import PUT_LOG_EVERY_S, LogStore, SegmentWriter
from trainables.object_store.store import RETRY_S
from trainables.worker.ray_nodes import on_this_node
from trainables.worker.recorder import NO_ANSWER_S, RunRecorder, Text

log = logging.getLogger("raydistill")


def start_recorder(path: Path, store: LogStore | None = None) -> RunRecorder:
    """Start the actor that writes the log at `path` and uploads it to `store`. If it dies, Ray restarts it from the file.

    Raises RecorderLostError: it could not open the log.
    """
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": on_this_node()}
    actor = ray.remote(Recorder).options(**options).remote(str(path), store)
    recorder = RunRecorder(actor, str(path.parent), no_answer_s=NO_ANSWER_S + (0.0 if store is None else RETRY_S))
    try:
        recorder.record([])
    except BaseException:  # including Ctrl-C: the actor would keep the log locked
        ray.kill(actor)
        raise
    return recorder


class Recorder:
    """The actor that writes a run's log. Concurrent calls share one write and one fsync."""

    def __init__(self, path: str, store: LogStore | None = None) -> None:
        self._log = EventLog(Path(path))
        self._segments = None if store is None else SegmentWriter(store, self._log)
        self._put_lock = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None
        self._attempt = self._log.newest_attempt
        self._waiting: list[tuple[Sequence[Event], int | None, asyncio.Future[None]]] = []
        self._texts: list[Text] = []
        self._lock = asyncio.Lock()
        """Guards the log; calls get it in the order in which they came."""

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def append(self, events: Sequence[Event], attempt: int | None = None, texts: Sequence[Text] = ()) -> None:
        """Write events, and append `texts` to their files. Returns once the events are durable, also in the store if required.

        If the actor dies, Ray repeats the call; the log skips events that it has.

        Raises what `EventLog.append` and `SegmentWriter.put` raise. A text that cannot be written is only logged.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, attempt, written))
        self._texts += texts
        async with self._lock:
            if not written.done():  # else an earlier call has written these events with its own
                await self._write()
        written.result()
        if self._segments is not None:
            if any(each["kind"] in OUTLIVES_NODE for each in events):
                await self._put(self._segments)
            elif self._late is None:
                self._late = asyncio.create_task(self._put_late(self._segments))

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def begin_attempt(self, stage: str) -> int:
        """Return the number of a new attempt at a stage. Events of earlier attempts are refused from now on."""
        self._attempt += 1
        number = self._attempt
        await self.append([event("attempt", stage, attempt=number)])
        return number

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def check_attempt(self, stage: str, attempt: int) -> None:
        """See `EventLog.check_attempt`."""
        async with self._lock:
            await asyncio.to_thread(self._log.check_attempt, stage, attempt)

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def of(self, key: str) -> list[Event]:
        """See `EventLog.of`. Includes the events of all earlier calls."""
        async with self._lock:
            return await asyncio.to_thread(self._log.of, key)

    async def close(self) -> None:
        """Release the log once all earlier calls are written. Later calls raise OSError."""
        async with self._lock:
            if self._late is not None:
                self._late.cancel()
            self._log.close()

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        texts, self._texts = self._texts, []
        await asyncio.to_thread(write_texts, self._log.path.parent, texts)
        try:
            refusals = await asyncio.to_thread(self._log.append_each, [(events, attempt) for events, attempt, _ in waiting])
        except Exception as error:
            refusals = [error] * len(waiting)
        for refusal, (_, _, written) in zip(refusals, waiting, strict=True):
            if refusal is None:
                written.set_result(None)
            else:
                written.set_exception(refusal)

    async def _put(self, segments: SegmentWriter) -> None:
        """Upload the log as it is now. Raises what `SegmentWriter.put` raises."""
        end = self._log.size
        async with self._put_lock:
            if segments.end < end:  # else an earlier call has uploaded it
                await asyncio.to_thread(segments.put)

    async def _put_late(self, segments: SegmentWriter) -> None:
        """Upload new events after a delay, until the store has all or another driver has taken over the run."""
        while segments.end < self._log.size:
            await asyncio.sleep(PUT_LOG_EVERY_S)
            try:
                await self._put(segments)
            except LeaseLostError as error:
                log.warning("%s", error)
                return
            except Exception as error:
                log.warning("%s; still trying", error)
        self._late = None


def write_texts(root: Path, texts: Sequence[Text]) -> None:
    """Append texts to files below `root`. Write errors are logged."""
    parts_by_file = defaultdict[str, list[str]](list)
    for name, text in texts:
        parts_by_file[name].append(text)
    for name, parts in parts_by_file.items():
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:  # file names may not be UTF-8
                file.write("".join(parts))
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
