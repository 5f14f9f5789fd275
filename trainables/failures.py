"""Why a training ended: its kind, decided from the exception in the process where it was raised, and `error.json`, which says it.

A kind follows from an exception's type. Where a library raises a bare RuntimeError, the phrases below are all that is relied
on; no message is read anywhere else.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from trainables.errors import DeviceError, DistillError, TeacherServiceLostError
from trainables.rundir import write_json

Kind = Literal["user", "out_of_memory", "disk", "device", "worker_died", "lost_peer"]
"""`user`: code, settings or data, which would fail again in the same way. `lost_peer`: another process of the job has ended.

In the order of causes: what comes later may follow from what comes before, on another worker.
"""
RETRYABLE = frozenset({"device", "worker_died", "lost_peer"})
"""What beginning again from the last checkpoint may mend."""
VERSION = 1
NODE_OUT_OF_MEMORY = "the node ran out of memory: Ray killed a worker to save it"

OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA ran out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    # cuDNN in benchmark mode drops each plan whose workspace finds no room, and is left with none
    "FIND was unable to find an engine",
    "GET was unable to find an engine",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
    "HOST_ALLOCATION_FAILED",
    # the first call of a library makes its handle, which needs memory too
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL
    "NVJPEG_STATUS_ALLOCATOR_FAIL",
    # DALI
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "std::bad_alloc",
)
DALI_OUT_OF_MEMORY = re.compile(r"Can't allocate \d+ bytes on (device|host)")
LOST_PEER = ("/gloo/transport/", "Gloo connectFullMesh failed", "Application timeout caused pair closure")
DEVICE = (
    "CUDA error: ",
    "CUDA driver error: ",
    "cuDNN error: ",
    "CUDNN_STATUS_",
    "CUBLAS_STATUS_",
    "CUSOLVER_STATUS_",
    "CUDA runtime API error",
    "CUDA driver API error",
    "cudaError",
    "CUDA_ERROR_",
)
DEVICE_ASSERT = "device-side assert triggered"
"""An index out of range, or another check inside a kernel: the data or the code is wrong, not the device."""


@dataclass(frozen=True)
class Failure:
    """One worker's end, or that of all."""

    kind: Kind
    message: str
    type: str | None = None
    """The exception's class, where the message alone does not say what is wrong."""
    rank: int | None = None

    def __str__(self) -> str:
        if self.kind == "worker_died":
            return f"a worker died: {self.message}"
        whose = f"rank {self.rank}: " if self.rank is not None and (self.type or self.kind == "out_of_memory") else ""
        return whose + (f"{self.type}: " if self.type and self.kind != "out_of_memory" else "") + self.message


class WorkersFailedError(Exception):
    """A job's workers ended before their work did. `failures` is what is known of each, at least of one."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__(str(first_cause(self.failures)))


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from; of several as strong the first."""
    return min(failures, key=lambda failure: get_args(Kind).index(failure.kind))


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """What an exception means for the job of the worker that raised it."""
    kind = kind_of(error)
    if isinstance(error, SystemExit):
        return Failure(kind, f"code of the experiment called sys.exit({error.code!r})", None, rank)
    text = str(error).strip() or type(error).__name__
    if isinstance(error, DistillError):
        return Failure(kind, text, None, rank)
    if isinstance(error, OSError) and kind == "disk":
        where = f"{error.filename}: " if error.filename else ""
        then = "mend that" if error.errno == errno.EROFS else "free space"
        return Failure(kind, f"{where}{os.strerror(error.errno or 0)}: {then}, then `distill resume`", None, rank)
    line = text.splitlines()[0]
    if kind == "out_of_memory" and "memory" not in line.lower():
        line += " (its memory ran out)"
    return Failure(kind, line, type(error).__name__, rank)


def kind_of(error: BaseException) -> Kind:
    """The kind of an exception, or, where it was raised from another whose kind says more, of that one."""
    kind = _own_kind(error)
    if kind != "user" or error.__cause__ is None:
        return kind
    behind = kind_of(error.__cause__)
    # An error with a line of its own has weighed what it was raised from. How much memory there is depends on the machine.
    return behind if behind == "out_of_memory" or not isinstance(error, DistillError) else kind


def _own_kind(error: BaseException) -> Kind:
    import torch
    from torch import distributed as dist

    match error:
        case DeviceError():
            return "device"
        case DistillError():
            return "user"
        case torch.OutOfMemoryError() | MemoryError():
            return "out_of_memory"
        case TeacherServiceLostError():  # a bare ConnectionError or TimeoutError is the user's: nothing of ours lets one out
            return "lost_peer"
        case OSError(errno=errno.ENOMEM):
            return "out_of_memory"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS):
            return "disk"
        case RuntimeError():
            text = str(error)
            if any(phrase in text for phrase in OUT_OF_MEMORY) or DALI_OUT_OF_MEMORY.search(text):
                return "out_of_memory"
            if isinstance(error, dist.DistError) or any(phrase in text for phrase in LOST_PEER):
                return "lost_peer"
            if DEVICE_ASSERT in text:
                return "user"
            if isinstance(error, torch.AcceleratorError) or any(phrase in text for phrase in DEVICE):
                return "device"
    return "user"


def write_failure(path: Path, failure: Failure) -> None:
    """Note why the job stops: of several workers the cause, see `first_cause`. The note is whole once it has its name.

    Raises:
        OSError: the disk cannot be written.
    """
    record = {"version": VERSION, **asdict(failure)}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_json(beside, record)
        try:
            os.link(beside, path)
        except OSError:  # another worker's note is there, or the file system has no links
            before = read_failure(path)
            if before is None or first_cause([before, failure]) is not before:
                os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_failure(path: Path) -> Failure | None:
    """What a worker has noted; None where none did, or in a form of another version."""
    try:
        record = json.loads(path.read_text())
        if record.pop("version") != VERSION:
            return None
        return Failure(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
