"""Why a training ended: its kind, decided from the exception in the process where it was raised.

A kind follows from an exception's type. Where a library raises a bare RuntimeError or ValueError, it follows from the table of
words below; no other module here reads their messages. `tests/trainables/test_failures.py` provokes them with the installed
library or names their source, `tests/gpu/check_out_of_memory.py` provokes those of a GPU.
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
"""`user`: code, settings or data, which would fail again in the same way. `out_of_memory`: of the worker, on its GPU or CPU;
`node_out_of_memory`: of its whole node, which may have other users. `disk`: full, or read-only; `unavailable`: an object store
did not answer. `hang`: no worker went on for `scale.hang_after_s`, or one did not start;
`time_limit`: the job took longer than it may. `preempted`: the end of a node or worker was announced; `resized`: it made way
for more workers. `lost_peer`: another process of the job has ended. `unschedulable`: the cluster did not get enough nodes for
it in `scale.wait_for_nodes_s`.

Causes come first: a later kind may follow from an earlier one on another worker.
"""
ANNOUNCED = frozenset({"preempted", "resized"})
"""Kinds that are nobody's fault: they do not count as one of `scale.max_failures`."""
RETRYABLE = frozenset({"device", "hang", "worker_died", "lost_peer"}) | ANNOUNCED
"""Kinds after which training continues from the last checkpoint."""
ENVIRONMENT_KINDS = frozenset({"unschedulable", "unavailable", "disk"})
"""Kinds that are no fault of the experiment or its workers, and that may be over by the next `distill resume`."""
OUT_OF_MEMORY_KINDS = frozenset({"out_of_memory", "node_out_of_memory"})

WORDS: dict[str, Kind] = {
    "can't allocate memory": "out_of_memory",  # torch, on the CPU
    "std::bad_alloc": "out_of_memory",
    "out of memory": "out_of_memory",  # CUDA's own words, in errors of torch and of NCCL
    "unable to find an engine": "out_of_memory",  # torch, which drops each cuDNN plan whose workspace has no room
    "CU(BLAS|SOLVER)_STATUS_ALLOC_FAILED": "out_of_memory",
    "CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED": "out_of_memory",
    "CUDA allocation failed|Can't allocate [0-9]+ bytes on": "out_of_memory",  # DALI
    "CUDA Runtime failure: '#2'": "out_of_memory",  # nvImageCodec: cudaErrorMemoryAllocation
    "/gloo/transport/|Gloo connectFullMesh failed|Application timeout caused pair closure": "lost_peer",
    "CUDA error: |CUDA driver error: |cuDNN error: |cusolver error: ": "device",  # torch
    "CUDA (runtime|driver) API error ": "device",  # DALI
    "CUDA Runtime failure: '#": "device",  # nvImageCodec
}
"""Parts of the messages of libraries that raise a bare RuntimeError, as patterns; the first one counts."""
NO_HANDLE = re.compile("CU(DNN|BLAS|SOLVER)_STATUS_NOT_INITIALIZED")
"""The first call of a CUDA library creates its handle: that fails where its memory finds no room, and on a GPU that is broken."""
PLENTY_FREE = 0.05
"""The share of a GPU's memory that handles need at most."""
CUDA_MEMORY_ALLOCATION, CUDA_ASSERT = 2, 710
"""cudaErrorMemoryAllocation; cudaErrorAssert, a failed check inside a kernel such as an index out of range: the data or the code
is wrong, not the device."""
SINGLE_VALUE = "Expected more than 1 value per channel when training"
"""The message of torch's batch norm for one image whose maps have one pixel."""


@dataclass(frozen=True)
class Failure:
    """Why one worker, or all of them, ended."""

    kind: Kind
    message: str
    type: str | None = None
    """The exception's class, where the message alone does not say what is wrong."""
    rank: int | None = None
    position: str | None = None
    """The phase and the step of a hang; None where it is unknown."""

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
    """Why whoever watches over the workers ended them; `stacks` is what they were doing."""

    def __init__(self, failure: Failure, stacks: str = "") -> None:
        super().__init__(failure, stacks)
        self.failure, self.stacks = failure, stacks

    def __str__(self) -> str:
        return str(self.failure)


class WorkersFailedError(Exception):
    """A job's workers ended before they had finished. `failures`: what is known of each, at least of one.

    `stacks`: what hanging workers were doing, as text.
    """

    def __init__(self, failures: Iterable[Failure], stacks: str = "") -> None:
        self.failures, self.stacks = tuple(failures), stacks
        super().__init__(str(first_cause(self.failures)))


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others may follow from, by its kind; the first of several."""
    return min(failures, key=lambda failure: get_args(Kind).index(failure.kind))


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """The failure of the worker on `rank` that raised an exception."""
    kind = kind_of(error)
    if isinstance(error, SystemExit):
        return Failure(kind, f"code of the experiment called sys.exit({error.code!r})", None, rank)
    text = str(error).strip() or type(error).__name__
    if isinstance(error, DistillError | StageInterruptedError):
        return Failure(kind, text, None, rank)
    if isinstance(error, OSError) and kind == "disk":
        where = f"{error.filename}: " if error.filename else ""
        remedy = "fix that" if error.errno == errno.EROFS else "free space"
        return Failure(kind, f"{where}{os.strerror(error.errno or 0)}: {remedy}, then `distill resume`", None, rank)
    line = text.splitlines()[0]
    if kind == "out_of_memory" and "memory" not in line.lower():
        line += " (its memory ran out)"
    return Failure(kind, line, type(error).__name__, rank)


def kind_of(error: BaseException) -> Kind:
    """The kind of an exception; where that is `user` and it was raised from another exception, the kind of that one.

    A DistillError stays `user` whatever it was raised from, unless memory ran out.
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
        case TeacherServiceLostError() | RecorderLostError():  # a bare ConnectionError is the user's: ours are none
            return "lost_peer"
        case DataUnavailableError() | StorageUnavailableError():
            return "unavailable"
        case DistillError():
            return "user"
        case torch.OutOfMemoryError() | MemoryError() | OSError(errno=errno.ENOMEM):
            return "out_of_memory"
        case LoaderDiedError():
            return "worker_died"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS):
            return "disk"
        case torch.AcceleratorError():
            code = getattr(error, "error_code", None)  # of none that Python code has made
            return "out_of_memory" if code == CUDA_MEMORY_ALLOCATION else "user" if code == CUDA_ASSERT else "device"
        case torch.linalg.LinAlgError():  # type: ignore[attr-defined]  # a matrix with a NaN, whatever the library says
            return "user"
        case dist.DistError():
            return "out_of_memory" if "out of memory" in str(error) else "lost_peer"
        case RuntimeError():
            text = str(error)
            if NO_HANDLE.search(text) and is_gpu_full():
                return "out_of_memory"
            return next((kind for words, kind in WORDS.items() if re.search(words, text)), "user")
    return "user"


def is_gpu_full() -> bool:
    """Whether next to nothing of the memory of this process's GPU is free; False where it is broken."""
    import torch

    try:
        if not torch.cuda.is_initialized():  # as on the driver, which is not to begin to use one
            return True
        free_bytes, total_bytes = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return free_bytes <= PLENTY_FREE * total_bytes


def is_single_value(error: ValueError) -> bool:
    """Whether torch's batch norm refuses a batch with a single value of each channel."""
    return SINGLE_VALUE in str(error)
