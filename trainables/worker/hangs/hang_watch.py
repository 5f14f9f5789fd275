"""A watch over a job's workers, on Ray Train's controller: it ends a job that hangs, and one that takes too long.

Ray itself notices a worker whose process does not answer after ten minutes, and one whose training thread is stuck never; its
watch over NCCL sees collectives alone, on GPUs, and needs a program that torch does not bring.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainables.failures import EndedError, Failure
from trainables.metrics.heartbeat import Position
from trainables.rundir import StageDir, write_json
from trainables.worker.hangs.hang_report import RankReport, hang_error
from trainables.worker.hangs.process_probe import ProcessState, WorkerProcess, end, inspect
from trainables.worker.hangs.progress import JobProgress
from trainables.worker.hangs.worker_probe import Collective, last_collective, position
from trainables.worker.ray_internals import WorkerGroupCallback

POLL_S = 2.0
"""As long as Ray Train's own: an answer takes a worker about half a millisecond."""
FILE_S = 5.0
"""Between two of the files that a report reads."""
ANSWER_S = 15.0
"""How long a node may take to look at its workers: a busy one is slow to start a process."""

log = logging.getLogger("raydistill")


class HangWatch(WorkerGroupCallback):  # type: ignore[misc]
    """Polls where each worker is from a thread, and lets Ray Train raise `EndedError` for all of them.

    Args:
        hang_after_s: `scale.hang_after_s`.
        limit_s: how long a job may take on its workers; None: as long as it does.
        has_service: whether the teacher is a service.
    """

    def __init__(self, hang_after_s: float | Literal["auto"], limit_s: float | None, *, has_service: bool = False) -> None:
        self._hang_after_s, self._limit_s, self._has_service = hang_after_s, limit_s, has_service
        self._error: ray.train.WorkerGroupError | None = None
        self._stopping: threading.Event | None = None  # made where the watch begins: events cannot be sent to another process

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Called by Ray Train when all workers run."""
        self._error, self._stopping = None, threading.Event()
        workers = {worker.distributed_context.world_rank: worker for worker in worker_group.get_workers()}
        arguments = (workers, self._stopping)
        threading.Thread(target=self._watch, args=arguments, name="hang watch", daemon=True).start()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by Ray Train every two seconds. Raises what the watch has found."""
        if self._error is not None:
            raise self._error

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._stop()

    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    def _watch(self, workers: dict[int, Any], stopping: threading.Event) -> None:
        progress = JobProgress(self._hang_after_s, len(workers), time.monotonic(), self._has_service)
        poller, file = PositionPoller(workers), HeartbeatFile()
        while not stopping.wait(POLL_S):
            try:
                now_s = time.monotonic()
                for rank, answer in poller.take().items():
                    progress.update(rank, answer, now_s)
                file.write(progress, now_s)
                error = self._end_reason(workers, progress, now_s)
            except Exception:  # whatever it was: without a watch a hang would last for ever
                log.exception("a look at the workers failed; the watch over them goes on")
                continue
            if error is not None and not stopping.is_set():
                self._error = ray.train.WorkerGroupError(str(error), {error.failure.rank or 0: error})
                on_nodes(workers, end, wait_s=0.0)
                return

    def _end_reason(self, workers: Mapping[int, Any], progress: JobProgress, now_s: float) -> EndedError | None:
        """Why the job has to end; None: it may go on."""
        if self._limit_s is not None and progress.age_s(now_s) > self._limit_s:
            position = next((rank.position for rank in progress.ranks if rank.position is not None), "start")
            message = f"took longer than sweep.trial_limit_s; it was in {position}"
            return EndedError(Failure("time_limit", message))
        if not progress.is_hung(now_s):
            return None
        reports = look_at(workers, progress, now_s)
        if not progress.is_extended and any(report.is_compiling_or_locked for report in reports):
            progress.is_extended = True
            return None
        return hang_error(reports, progress.longest_s(now_s))


class PositionPoller:
    """Polls where the workers are without waiting for any of them: each has one request pending at a time."""

    def __init__(self, workers: Mapping[int, Any]) -> None:
        self._workers = workers
        self._pending = {rank: worker.execute_async(position) for rank, worker in workers.items()}

    def take(self) -> dict[int, Position | None]:
        """The answers since the last call. A worker that has died has none: Ray Train sees to it."""
        found: dict[int, Position | None] = {}
        for rank, reference in list(self._pending.items()):
            try:
                found[rank] = ray.get(reference, timeout=0)
            except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorDiedError):
                continue
            except ray.exceptions.RayError as error:  # the next answer may arrive
                log.debug("rank %d could not answer: %s", rank, error)
            self._pending[rank] = self._workers[rank].execute_async(position)
        return found


class HeartbeatFile:
    """Writes where each rank is for `distill report`, in a thread of its own: the disk may be what hangs."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._due_s = 0.0

    def write(self, progress: JobProgress, now_s: float) -> None:
        """Begin to write the file, where it is due and the last one is written."""
        positions = [rank.position for rank in progress.ranks]
        folder = next((position.folder for position in positions if position is not None and position.folder), "")
        if not folder or now_s < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = now_s + FILE_S
        ranks = [
            {"rank": number, "at": str(rank.position or "no job"), "age_s": round(now_s - rank.changed_s, 1)}
            for number, rank in enumerate(progress.ranks)
        ]
        record = {"version": 1, "time_ms": time.time_ns() // 1_000_000, "ranks": ranks}
        self._thread = threading.Thread(target=_write, args=(StageDir(Path(folder)).heartbeats, record), daemon=True)
        self._thread.start()


def _write(path: Path, record: dict[str, Any]) -> None:
    try:
        write_json(path, record)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)


def look_at(workers: Mapping[int, Any], progress: JobProgress, now_s: float) -> list[RankReport]:
    """All that can be found out about ranks that do not go on; it takes `ANSWER_S` at most."""
    pending = {rank: worker.execute_async(last_collective) for rank, worker in workers.items()}
    found: dict[int, ProcessState] = {}
    for answer in on_nodes(workers, inspect, wait_s=ANSWER_S):
        found |= answer
    collectives: dict[int, Collective] = {}
    for rank, reference in pending.items():
        with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayError):
            collectives[rank] = ray.get(reference, timeout=0)
    return [
        RankReport(
            rank,
            worker.metadata.node_ip,
            progress.ranks[rank].position,
            found.get(rank),
            collectives.get(rank),
            is_answering=progress.ranks[rank].is_answering(now_s),
        )
        for rank, worker in sorted(workers.items())
    ]


def on_nodes(workers: Mapping[int, Any], work: Callable[[dict[int, WorkerProcess]], Any], wait_s: float) -> list[Any]:
    """What `work` returns for the workers of each node, on that node; of those that answer within `wait_s`.

    On this node it is a thread: to read of a process in state D, or of a GPU, may never end.
    """
    until_s = time.monotonic() + wait_s
    by_node: dict[str, dict[int, WorkerProcess]] = {}
    for rank, worker in workers.items():
        about = worker.metadata
        process = WorkerProcess(about.pid, tuple(map(str, about.gpu_ids)))
        by_node.setdefault(about.node_id, {})[rank] = process
    here = by_node.pop(ray.get_runtime_context().get_node_id(), None)
    remote = ray.remote(num_cpus=0, max_retries=0)(work)
    pending = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(processes)
        for node, processes in by_node.items()
    ]
    answers = list[Any]()
    if here is not None:
        thread = threading.Thread(target=lambda: answers.append(work(here)), name="look at this node", daemon=True)
        thread.start()
    ready = ray.wait(pending, num_returns=len(pending), timeout=wait_s)[0] if pending else []
    if here is not None:
        thread.join(max(until_s - time.monotonic(), 0.0))
    answers = answers.copy()  # what comes later is not waited for
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            answers.append(ray.get(reference))
    return answers
