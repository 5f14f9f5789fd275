"""Watch a job's workers from Ray Train's controller, and end a job that hangs or takes too long.

Ray notices a worker process that does not answer only after ten minutes, and a stuck training thread never. Its NCCL watchdog
sees only collectives on GPUs, and needs a program that torch does not include.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainables.failures import EndedError, Failure
from trainables.metrics.heartbeat import Position, position
from trainables.rundir import StageDir, write_json
from trainables.stacks import kill, report_processes
from trainables.worker.hangs.hang_report import Rank, hang_error, limit_s, quiet_s
from trainables.worker.ray_internals import WorkerGroupCallback

POLL_S = 2.0
"""Ray Train's own interval; an answer takes a worker about half a millisecond."""
FILE_S = 5.0
"""Interval between two heartbeat files for reports."""
ANSWER_S = 15.0
"""Time limit for a node to report its workers' stacks; a busy node starts processes slowly."""

log = logging.getLogger("raydistill")


class HangWatch(WorkerGroupCallback):  # type: ignore[misc]
    """Polls each worker's position in a thread, and makes Ray Train raise `EndedError` if the job has to end.

    Args:
        hang_after_s: `scale.hang_after_s`.
        limit_s: Maximum duration of a job on its workers; None for no limit.
        has_service: Whether the teacher is a service.
    """

    def __init__(self, hang_after_s: float | Literal["auto"], limit_s: float | None, *, has_service: bool = False) -> None:
        self._hang_after_s, self._limit_s, self._has_service = hang_after_s, limit_s, has_service
        self._ranks: Sequence[Rank] | None = None
        """The watched ranks; a thread ends once they are no longer the ones that it watches."""
        self._takes_long = False
        self._error: ray.train.WorkerGroupError | None = None

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Called by Ray Train once all workers are running."""
        workers = sorted(worker_group.get_workers(), key=lambda worker: worker.distributed_context.world_rank)
        ranks = [Rank(number, worker.metadata.node_ip, Position()) for number, worker in enumerate(workers)]
        self._ranks, self._takes_long, self._error = ranks, False, None
        for target, arguments in ((self._watch, (ranks, workers)), (self._write_heartbeats, (ranks,))):
            threading.Thread(target=target, args=arguments, name="hang watch", daemon=True).start()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by Ray Train every two seconds. Raises the error that the watch has found."""
        if self._error is not None:
            raise self._error

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._ranks = None

    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        self._ranks = None

    def _is_watched(self, ranks: Sequence[Rank], after_s: float) -> bool:
        time.sleep(after_s)
        return self._ranks is ranks

    def _watch(self, ranks: Sequence[Rank], workers: Sequence[Any]) -> None:
        requests, polled_s = dict[int, Any](), time.monotonic()
        while self._is_watched(ranks, POLL_S):
            before_s, polled_s = polled_s, time.monotonic()
            try:
                poll(ranks, workers, requests, polled_s - before_s)
                error = self._end_reason(ranks, workers)
            except Exception:  # of any kind: without the watch a hang would last forever
                log.exception("polling the workers failed; the hang watch continues")
                continue
            if error is not None and self._ranks is ranks:
                self._error = ray.train.WorkerGroupError(str(error), {error.failure.rank or 0: error})
                on_nodes(workers, kill, 0.0)  # Ray cannot end a stopped process
                return

    def _end_reason(self, ranks: Sequence[Rank], workers: Sequence[Any]) -> EndedError | None:
        """Return why the job has to end, or None."""
        oldest = max((rank.position for rank in ranks if rank.position), key=lambda each: each.age_s, default=None)
        if self._limit_s is not None and oldest is not None and oldest.age_s > self._limit_s:
            return EndedError(Failure("time_limit", f"took longer than sweep.trial_limit_s; it was in {oldest}"))
        if quiet_s(ranks) <= limit_s(ranks, self._hang_after_s, has_service=self._has_service):
            self._takes_long = False
            return None
        if self._takes_long and quiet_s(ranks) <= limit_s(ranks, self._hang_after_s, takes_long=True):
            return None
        requests = {number: worker.execute_async(last_collective) for number, worker in enumerate(workers)}
        processes = on_nodes(workers, report_processes, ANSWER_S)
        collectives = answers(requests, 0.0)
        for rank, worker in zip(ranks, workers, strict=True):
            rank.process = processes.get(worker.metadata.node_id, {}).get(worker.metadata.pid)
            rank.collective = collectives.get(rank.rank)
        if not self._takes_long and any(rank.is_compiling_or_locked for rank in ranks):
            self._takes_long = True
            return None
        return hang_error(ranks)

    def _write_heartbeats(self, ranks: Sequence[Rank]) -> None:
        """Write each rank's position for `distill report`, in a separate thread, as the disk may be what hangs."""
        while self._is_watched(ranks, FILE_S):
            if folder := max((rank.position.folder for rank in ranks if rank.position is not None), default=""):
                lines = [{"rank": rank.rank, "at": rank.where, "age_s": round(rank.quiet_s, 1)} for rank in ranks]
                path = StageDir(Path(folder)).heartbeats
                try:
                    write_json(path, {"version": 1, "time_ms": time.time_ns() // 1_000_000, "ranks": lines})
                except OSError as error:
                    log.warning("%s cannot be written: %s", path, error)


def poll(ranks: Sequence[Rank], workers: Sequence[Any], requests: dict[int, Any], passed_s: float) -> None:
    """Collect the workers' answers since the last poll, `passed_s` ago, and send new requests.

    `requests` maps a rank to its pending request; there is at most one per worker.
    """
    for rank in ranks:
        rank.silent_s += passed_s
    for number, answer in answers(requests, 0.0).items():
        ranks[number].position, ranks[number].silent_s = answer, 0.0
    requests |= {number: worker.execute_async(position) for number, worker in enumerate(workers) if number not in requests}


def on_nodes(workers: Iterable[Any], work: Callable[[Iterable[int]], Any], wait_s: float) -> dict[str, Any]:
    """Run `work` on each node with its workers' PIDs. Returns results by node, without remote nodes that are late."""
    pids: dict[str, list[int]] = {}
    for worker in workers:
        pids.setdefault(worker.metadata.node_id, []).append(worker.metadata.pid)
    here = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, max_retries=0)(work)
    requests = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(found)
        for node, found in pids.items()
        if node != here
    }
    return {here: work(pids.get(here, []))} | answers(requests, wait_s)


def answers(requests: dict[Any, Any], wait_s: float) -> dict[Any, Any]:
    """Return the results that arrive within `wait_s`, by key; removes finished and failed requests from `requests`."""
    found, references = dict[Any, Any](), list(requests.values())
    arrived = set(ray.wait(references, num_returns=len(references), timeout=wait_s)[0]) if references else set()
    for key in [key for key, reference in requests.items() if reference in arrived]:
        try:
            found[key] = ray.get(requests.pop(key))
        except ray.exceptions.RayError as error:  # the next poll requests it again; Ray Train handles dead workers
            log.debug("a request to %s failed: %s", key, error)
    return found


def last_collective() -> tuple[int, str] | None:
    """In a worker, return the number and name of the last collective that it began in the group of all ranks.

    Read from torch's flight recorder, which is on by default. None if it is empty, or with pipeline stages, whose ranks mostly
    wait in smaller groups.
    """
    from torch import distributed as dist  # here, as the controller needs no torch
    from torch._C import _distributed_c10d as c10d

    nccl = dist.get_backend() == "nccl"
    dump = c10d._dump_nccl_trace_json if nccl else c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    entries = json.loads(dump(True, False)).get("entries", [])
    of_all = [entry for entry in entries if entry["process_group"][1] == "default_pg" and not entry["is_p2p"]]
    if any(entry["process_group"][1].startswith("mesh") for entry in entries):
        return None
    return max(((entry["collective_seq_id"], entry["profiling_name"]) for entry in of_all), default=None)
