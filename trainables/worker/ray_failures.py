"""Worker failures: typed where they are raised, and read from Ray Train's exceptions on the driver."""

import contextlib
from collections.abc import Iterator

import ray
import ray.train

from trainables.errors import INTERRUPTIONS
from trainables.failures import EndedError, Failure, Kind, failure_of, first_cause
from trainables.worker.ray_internals import NCCLHangError, RayTrainError, WorkerHealthCheckFailedError


@contextlib.contextmanager
def failures_typed(rank: int) -> Iterator[None]:
    """Convert an exception that leaves this context to an `EndedError` with the failure's kind, which survives pickling.

    An `EndedError` from a nested context passes unchanged.
    """
    try:
        yield
    except EndedError:
        raise
    except (Exception, SystemExit) as error:
        # An exception of Ray's own means that an actor is gone, or that other workers did not call the same report.
        failures = [ray_failure(error, rank, "lost_peer")]
        if isinstance(error.__context__, EndedError):  # closing raised `error` after it
            failures.insert(0, error.__context__.failure)
        raise EndedError(first_cause(failures)) from error


def failures_in(error: Exception) -> list[Failure]:
    """Return the failure of each worker that raised or died, or the one that ended the job before its workers ran."""
    if isinstance(error, ray.train.ControllerError):
        return [ray_failure(error.controller_failure, None, "worker_died")]
    workers = getattr(error, "worker_failures", None) or {None: error}
    return [ray_failure(failure, rank, "worker_died") for rank, failure in workers.items()]


def ray_failure(error: BaseException, rank: int | None, ray_kind: Kind) -> Failure:
    """Return the failure for `error` as `failure_of` does; Ray's own exceptions get the kind `ray_kind`."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, EndedError):
        return error.failure
    if isinstance(error, NCCLHangError):  # from Ray's NCCL watchdog, if enabled
        return Failure("hang", str(error).strip().splitlines()[-1])
    if isinstance(error, ray.train.PreemptionError) or (isinstance(error, ray.exceptions.RayActorError) and error.preempted):
        return Failure("preempted", INTERRUPTIONS["preempted"], None, rank)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return Failure("node_out_of_memory", "the node ran out of memory: Ray killed a worker to save it")
    if isinstance(error, ray.exceptions.RayError | RayTrainError):
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return Failure(ray_kind, first_line, type(error).__name__, rank)
    return failure_of(error, rank)
