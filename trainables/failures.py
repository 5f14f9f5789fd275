"""Classify why training ended, from the exception and in the process that raised it.

The kind follows from the exception's type, or for a library's bare RuntimeError or ValueError from the table of messages below;
no other module reads those. `tests/trainables/test_failures.py` provokes each message with the installed library or names its
source, and `tests/gpu/check_out_of_memory.py` provokes those of a GPU.
"""

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from trainables.errors import (
    DataUnavailableError,
    DeviceError,
    DistillError,
    EvaluatorDiedError,
    LoaderDiedError,
    RecorderLostError,
    StageInterruptedError,
    StorageUnavailableError,
    TeacherServiceLostError,
)

Kind = Literal[
    "user",
    "out_of_memory",
    "node_out_of_memory",
    "disk",
    "unavailable",
    "device",
    "hang",
    "time_limit",
    "preempted",
    "resized",
    "worker_died",
    "lost_peer",
    "unschedulable",
]
"""Kinds of failure; causes come before the kinds that they may cause on other workers.

- `user`: code, settings or data that would fail again in the same way.
- `out_of_memory`: of the worker, on its GPU or CPU; `node_out_of_memory`: of its whole node, maybe due to other users.
- `disk`: full or read-only; `unavailable`: an object store did not answer.
- `hang`: no worker made progress for `scale.hang_after_s`, or one did not start; `time_limit`: the job took too long.
- `preempted`: the end of a node or worker was announced; `resized`: the stage restarts with more workers.
- `lost_peer`: another process of the job ended.
- `unschedulable`: the cluster did not get enough nodes within `scale.wait_for_nodes_s`.
"""
ANNOUNCED = frozenset({"preempted", "resized"})
"""Kinds that are not failures and do not count toward `scale.max_failures`."""
RETRYABLE = frozenset({"device", "hang", "worker_died", "lost_peer"}) | ANNOUNCED
"""Kinds after which training continues from the last checkpoint."""
ENVIRONMENT_KINDS = frozenset({"unschedulable", "unavailable", "disk"})
"""Kinds not caused by the experiment or its workers; they may be over by the next `distill resume`."""
OUT_OF_MEMORY_KINDS = frozenset({"out_of_memory", "node_out_of_memory"})

MESSAGE_KINDS: dict[str, Kind] = {
    "can't allocate memory": "out_of_memory",  # torch, on the CPU
    "std::bad_alloc": "out_of_memory",
    "out of memory": "out_of_memory",  # CUDA, in errors of torch and of NCCL
    "unable to find an engine": "out_of_memory",  # torch, after dropping each cuDNN plan whose workspace does not fit
    "CU(BLAS|SOLVER)_STATUS_ALLOC_FAILED": "out_of_memory",
    "CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED": "out_of_memory",
    "CUDA Runtime failure: '#2'": "out_of_memory",  # nvImageCodec: cudaErrorMemoryAllocation
    "/gloo/transport/|Gloo connectFullMesh failed|Application timeout caused pair closure": "lost_peer",
    "CUDA error: |CUDA driver error: |cuDNN error: |cusolver error: ": "device",  # torch
    "CUDA Runtime failure: '#": "device",  # nvImageCodec
}
"""Patterns in messages of bare RuntimeErrors; the first match determines the kind."""
NO_HANDLE = re.compile("CU(DNN|BLAS|SOLVER)_STATUS_NOT_INITIALIZED")
"""A CUDA library could not create its handle at its first call: the GPU's memory is full, or the GPU is broken."""
MAX_HANDLE_FRACTION = 0.05
"""Upper bound of the fraction of a GPU's memory that library handles need."""
CUDA_MEMORY_ALLOCATION, CUDA_ASSERT = 2, 710
"""cudaErrorMemoryAllocation; cudaErrorAssert, a failed check inside a kernel such as an index out of range: the data or the code
is wrong, not the device."""
SINGLE_VALUE = "Expected more than 1 value per channel when training"
"""torch's batch norm message for one image with 1×1 maps."""


@dataclass(frozen=True)
class Failure:
    """Why one worker, or all of them, ended."""

    kind: Kind
    message: str
    type: str | None = None
    """The exception's class, if the message alone does not explain the failure."""
    rank: int | None = None
    position: str | None = None
    """The phase and step of a hang; None if unknown."""

    def __str__(self) -> str:
        if self.kind == "worker_died":
            return f"a worker died: {self.message}"
        parts = [self.message]
        if self.type and self.kind != "out_of_memory":
            parts.insert(0, self.type)
        if self.rank is not None and (self.type or self.kind == "out_of_memory"):
            parts.insert(0, f"rank {self.rank}")
        return ": ".join(parts)


class EndedError(Exception):
    """A worker's failure with its kind, which survives pickling; `stacks` has the workers' stacks at a hang."""

    def __init__(self, failure: Failure, stacks: str = "") -> None:
        super().__init__(failure, stacks)
        self.failure, self.stacks = failure, stacks

    def __str__(self) -> str:
        return str(self.failure)


class WorkersFailedError(Exception):
    """A job's workers ended before they finished. `failures` has at least one worker's; `stacks` is text about hanging ones."""

    def __init__(self, failures: Iterable[Failure], stacks: str = "") -> None:
        self.failures, self.stacks = tuple(failures), stacks
        super().__init__(str(first_cause(self.failures)))


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that may have caused the others, by the order of `Kind`; the first of equals."""
    return min(failures, key=lambda failure: get_args(Kind).index(failure.kind))


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """Return the failure of the worker on `rank` that raised `error`."""
    kind = kind_of(error)
    if isinstance(error, SystemExit):
        return Failure(kind, f"the experiment's code called sys.exit({error.code!r})", None, rank)
    text = str(error).strip() or type(error).__name__
    if isinstance(error, DistillError | StageInterruptedError):
        return Failure(kind, text, None, rank)
    if isinstance(error, OSError) and kind == "disk":
        where = f"{error.filename}: " if error.filename else ""
        remedy = "make it writable" if error.errno == errno.EROFS else "free space"
        return Failure(kind, f"{where}{os.strerror(error.errno or 0)}: {remedy}, then run `distill resume`", None, rank)
    if isinstance(error, ValueError) and is_single_value(error):
        remedy = "set data.last_batch=drop, another data.global_batch_size or optim.accumulate"
        return Failure(kind, f"a worker got a batch of one image, which batch norm cannot normalize: {remedy}", None, rank)
    line = text.splitlines()[0]
    if kind == "out_of_memory" and "memory" not in line.lower():
        line += " (its memory ran out)"
    return Failure(kind, line, type(error).__name__, rank)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of an exception, or that of its `__cause__` if its own is `user`.

    A DistillError stays `user` unless its cause is out of memory.
    """
    kind = _kind_of_type(error)
    if kind != "user" or error.__cause__ is None:
        return kind
    cause = kind_of(error.__cause__)
    return cause if cause == "out_of_memory" or not isinstance(error, DistillError) else kind


def _kind_of_type(error: BaseException) -> Kind:
    import torch
    from torch import distributed as dist

    match error:
        case StageInterruptedError():
            return error.reason
        case DeviceError():
            return "device"
        case TeacherServiceLostError() | RecorderLostError():  # ours never raise a bare ConnectionError, so that is the user's
            return "lost_peer"
        case DataUnavailableError() | StorageUnavailableError():
            return "unavailable"
        case DistillError():
            return "user"
        case torch.OutOfMemoryError() | MemoryError() | OSError(errno=errno.ENOMEM):
            return "out_of_memory"
        case LoaderDiedError() | EvaluatorDiedError():
            return "worker_died"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS):
            return "disk"
        case torch.AcceleratorError():
            code = getattr(error, "error_code", None)  # missing in errors created by Python code
            return "out_of_memory" if code == CUDA_MEMORY_ALLOCATION else "user" if code == CUDA_ASSERT else "device"
        case torch.linalg.LinAlgError():  # type: ignore[attr-defined]  # a NaN in the matrix, whatever the message says
            return "user"
        case dist.DistError():
            return "out_of_memory" if "out of memory" in str(error) else "lost_peer"
        case RuntimeError():
            text = str(error)
            if NO_HANDLE.search(text) and is_gpu_full():
                return "out_of_memory"
            return next((kind for pattern, kind in MESSAGE_KINDS.items() if re.search(pattern, text)), "user")
    return "user"


def is_gpu_full() -> bool:
    """Whether this process's GPU has almost no free memory; False if the GPU is broken."""
    import torch

    try:
        if not torch.cuda.is_initialized():  # for example on the driver, which must not start to use a GPU
            return True
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return free_bytes <= MAX_HANDLE_FRACTION * total_bytes


def is_single_value(error: ValueError) -> bool:
    """Whether torch's batch norm rejected a batch with a single value per channel."""
    return SINGLE_VALUE in str(error)
