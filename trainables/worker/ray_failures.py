"""Failures of workers: each written by the worker that fails, and read from Ray Train's exceptions on the driver."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
import ray.train

from trainables.distributed.group import Group
from trainables.errors import INTERRUPTIONS, StorageError
from trainables.failures import EndedError, Failure, Kind, failure_of, first_cause, read_failure, write_failure
from trainables.rundir import StageDir
from trainables.worker.ray_internals import NCCLHangError, RayTrainError, WorkerHealthCheckFailedError

log = logging.getLogger("raydistill")


@contextlib.contextmanager
def failure_recorded(stage: StageDir, group: Group, publish: Callable[[Path], None] = lambda path: None) -> Iterator[None]:
    """A context that writes the exception which leaves it to this rank's file in the stage's `errors/`, and has it published.

    Where one inside of it has written a cause already, that stays.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        # An exception of Ray's own means that an actor is gone, or that other workers did not call the same report.
        failure, path = ray_failure(error, group.rank, "lost_peer"), stage.error_of(group.rank)
        before = read_failure(path)
        try:
            if before is None or first_cause([before, failure]) is not before:
                write_failure(path, failure)
                publish(path)
        except (OSError, StorageError) as problem:  # a full disk, or no store: the exception itself still reaches the driver
            log.warning("%s cannot be written: %s", path, problem)
        raise


def failures_in(error: Exception) -> list[Failure]:
    """The failure of each worker that raised or died, or the one that ended the job before its workers ran."""
    if isinstance(error, ray.train.ControllerError):
        return [ray_failure(error.controller_failure, None, "worker_died")]
    workers = getattr(error, "worker_failures", None) or {None: error}
    return [ray_failure(failure, rank, "worker_died") for rank, failure in workers.items()]


def ray_failure(error: BaseException, rank: int | None, ray_kind: Kind) -> Failure:
    """See `failure_of`; an exception of Ray's own is of the kind `ray_kind`."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, EndedError):
        return error.failure
    if isinstance(error, NCCLHangError):  # of Ray's own watch over NCCL, where that is on
        return Failure("hang", str(error).strip().splitlines()[-1])
    if isinstance(error, ray.train.PreemptionError) or (isinstance(error, ray.exceptions.RayActorError) and error.preempted):
        return Failure("preempted", INTERRUPTIONS["preempted"], None, rank)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return Failure("node_out_of_memory", "the node ran out of memory: Ray killed a worker to save it")
    if isinstance(error, ray.exceptions.RayError | RayTrainError):
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return Failure(ray_kind, first_line, type(error).__name__, rank)
    return failure_of(error, rank)
