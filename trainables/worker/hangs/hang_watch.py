"""A watch over a job's workers, on Ray Train's controller: it ends a job that hangs, and one that takes too long.

Ray itself notices a worker whose process does not answer after ten minutes, and one whose training thread is stuck never; its
watch over NCCL sees collectives alone, on GPUs, and needs a program that torch does not bring.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainables.failures import EndedError, Failure
from trainables.rundir import StageDir, write_json
from trainables.stacks import kill, report_processes
from trainables.worker.hangs.hang_report import RankReport, hang_error
from trainables.worker.hangs.progress import JobProgress
from trainables.worker.hangs.worker_probe import last_collective, position
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
        progress = JobProgress(self._hang_after_s, len(workers), time.monotonic(), self._has_service)
        for target, arguments in ((self._watch, (workers, progress)), (_write_heartbeats, (progress,))):
            threading.Thread(target=target, args=(*arguments, self._stopping), name="hang watch", daemon=True).start()

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

    def _watch(self, workers: Mapping[int, Any], progress: JobProgress, stopping: threading.Event) -> None:
        pending = {rank: worker.execute_async(position) for rank, worker in workers.items()}
        while not stopping.wait(POLL_S):
            try:
                update(progress, workers, pending)
                error = self._end_reason(workers, progress)
            except Exception:  # whatever it was: without a watch a hang would last for ever
                log.exception("a look at the workers failed; the watch over them goes on")
                continue
            if error is not None and not stopping.is_set():
                self._error = ray.train.WorkerGroupError(str(error), {error.failure.rank or 0: error})
                on_nodes(workers, kill, 0.0)  # Ray cannot end a process that is stopped
                return

    def _end_reason(self, workers: Mapping[int, Any], progress: JobProgress) -> EndedError | None:
        """Why the job has to end; None: it may go on."""
        now_s = time.monotonic()
        oldest = max((rank.position for rank in progress.ranks if rank.position), key=lambda each: each.age_s, default=None)
        if self._limit_s is not None and oldest is not None and oldest.age_s > self._limit_s:
            return EndedError(Failure("time_limit", f"took longer than sweep.trial_limit_s; it was in {oldest}"))
        if not progress.is_hung(now_s):
            return None
        reports = report_ranks(workers, progress, now_s)
        if not progress.is_compiling_or_locked and any(report.is_compiling_or_locked for report in reports):
            progress.is_compiling_or_locked = True
            return None
        return hang_error(reports, progress.quiet_s(now_s))


def update(progress: JobProgress, workers: Mapping[int, Any], pending: dict[int, Any]) -> None:
    """Take the answers that have arrived, and ask those workers again: each has one request pending at a time."""
    for rank, worker in workers.items():
        try:
            progress.update(rank, ray.get(pending[rank], timeout=0), time.monotonic())
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError as error:  # the next answer may arrive; Ray Train sees to a worker that has died
            log.debug("rank %d could not answer: %s", rank, error)
        pending[rank] = worker.execute_async(position)


def _write_heartbeats(progress: JobProgress, stopping: threading.Event) -> None:
    """Write where each rank is for `distill report`, in a thread of its own: the disk may be what hangs."""
    while not stopping.wait(FILE_S):
        now_s, ranks = time.monotonic(), list(progress.ranks)
        folder = next((rank.position.folder for rank in ranks if rank.position is not None and rank.position.folder), "")
        if not folder:
            continue
        lines = [
            {"rank": number, "at": str(rank.position or "no job"), "age_s": round(now_s - rank.changed_s, 1)}
            for number, rank in enumerate(ranks)
        ]
        path = StageDir(Path(folder)).heartbeats
        try:
            write_json(path, {"version": 1, "time_ms": time.time_ns() // 1_000_000, "ranks": lines})
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error)


def report_ranks(workers: Mapping[int, Any], progress: JobProgress, now_s: float) -> list[RankReport]:
    """All that can be found out about ranks that do not go on; it takes a bit more than `ANSWER_S` at most."""
    asked = {rank: worker.execute_async(last_collective) for rank, worker in workers.items()}
    processes = on_nodes(workers, report_processes, ANSWER_S)
    collectives = _answers(asked.values(), 0.0)
    return [
        RankReport(
            rank,
            worker.metadata.node_ip,
            progress.ranks[rank].position,
            processes.get(worker.metadata.node_id, {}).get(worker.metadata.pid),
            collectives.get(asked[rank]),
            is_answering=progress.ranks[rank].is_answering(now_s),
        )
        for rank, worker in sorted(workers.items())
    ]


def on_nodes(workers: Mapping[int, Any], work: Callable[[Iterable[int]], Any], wait_s: float) -> dict[str, Any]:
    """Node → what `work` returns there for the processes of its workers; of other nodes than this, those that answer in time."""
    pids: dict[str, list[int]] = {}
    for worker in workers.values():
        pids.setdefault(worker.metadata.node_id, []).append(worker.metadata.pid)
    here = pids.pop(this_node := ray.get_runtime_context().get_node_id(), None)
    remote = ray.remote(num_cpus=0, max_retries=0)(work)
    asked = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(found)
        for node, found in pids.items()
    }
    found = {} if here is None else {this_node: work(here)}
    answers = _answers(asked.values(), wait_s)
    return found | {node: answers[reference] for node, reference in asked.items() if reference in answers}


def _answers(references: Iterable[Any], wait_s: float) -> dict[Any, Any]:
    """The results that arrive within `wait_s`."""
    answers, asked = dict[Any, Any](), list(references)
    for reference in ray.wait(asked, num_returns=len(asked), timeout=wait_s)[0] if asked else []:
        try:
            answers[reference] = ray.get(reference)
        except ray.exceptions.RayError as error:
            log.debug("a look at a worker failed: %s", error)
    return answers
