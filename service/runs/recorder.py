"""The actor that writes a run's log while Ray runs, on the driver's node; see `trainables.worker.recorder` for its other end."""

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
    """Start the actor that writes the log at `path`, and puts it to a store. Where it dies, Ray starts it again: its state is
    the file.

    Raises RecorderLostError: it could not open the log.
    """
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": on_this_node()}
    actor = ray.remote(Recorder).options(**options).remote(str(path), store)
    recorder = RunRecorder(actor, str(path.parent), no_answer_s=NO_ANSWER_S + (0.0 if store is None else RETRY_S))
    try:
        recorder.record([])
    except BaseException:  # as of Ctrl-C: it would hold the log
        ray.kill(actor)
        raise
    return recorder


class Recorder:
    """The actor that writes a run's log while Ray runs. What waits together takes one write and one fsync."""

    def __init__(self, path: str, store: LogStore | None = None) -> None:
        self._log = EventLog(Path(path))
        self._segments = None if store is None else SegmentWriter(store, self._log)
        self._put_lock = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None
        self._attempt = self._log.newest_attempt
        self._waiting: list[tuple[Sequence[Event], int | None, asyncio.Future[None]]] = []
        self._texts: list[Text] = []
        self._lock = asyncio.Lock()
        """Guards the log, in the order in which calls came."""

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def append(self, events: Sequence[Event], attempt: int | None = None, texts: Sequence[Text] = ()) -> None:
        """Returns once the events are durable, in a store too where they must be, and `texts` are at the ends of their files.

        Where the actor dies, Ray calls it again: the log leaves out what it has.

        Raises Exception: as `EventLog.append` and `SegmentWriter.put` do. A text that a disk does not take is only logged.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, attempt, written))
        self._texts += texts
        async with self._lock:
            if not written.done():  # by a call before, with all that waited
                await self._write()
        written.result()
        if self._segments is not None:
            if any(each["kind"] in OUTLIVES_NODE for each in events):
                await self._put(self._segments)
            elif self._late is None:
                self._late = asyncio.create_task(self._put_late(self._segments))

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    async def begin_attempt(self, stage: str) -> int:
        """The number of the attempt that workers begin now at a stage: events of earlier ones are refused from here on."""
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
        """See `EventLog.of`: with all that came before."""
        async with self._lock:
            return await asyncio.to_thread(self._log.of, key)

    async def close(self) -> None:
        """Let another process write, once all is written that came before; whoever sends more gets OSError."""
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
        """Returns once the store has what the log has now. Raises as `SegmentWriter.put` does."""
        end = self._log.size
        async with self._put_lock:
            if segments.end < end:  # else a call before has put it
                await asyncio.to_thread(segments.put)

    async def _put_late(self, segments: SegmentWriter) -> None:
        """Put what the log gains a little later; once another driver has the run, no more."""
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
    """Append texts to files below `root`; one that cannot be written is logged."""
    of_files = defaultdict[str, list[str]](list)
    for name, text in texts:
        of_files[name].append(text)
    for name, parts in of_files.items():
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:  # a file's name may be no UTF-8
                file.write("".join(parts))
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
