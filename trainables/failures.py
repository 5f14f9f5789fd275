"""Why a training ended: its kind, decided from the exception in the process where it was raised, and the file that says so.

A kind follows from an exception's type. Where torch or a CUDA library raises a bare RuntimeError or ValueError, it follows from
the patterns below; no other module here reads their messages. `tests/trainables/test_failures.py` provokes them with the
installed library, `tests/gpu/check_out_of_memory.py` on a GPU.
"""

import errno
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from trainables.errors import (
    DataUnavailableError,
    DeviceError,
    DistillError,
    LoaderDiedError,
    StageInterruptedError,
    StorageUnavailableError,
    TeacherServiceLostError,
)
from trainables.redact import redact
from trainables.rundir import write_json

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
VERSION = 1

OUT_OF_MEMORY = re.compile(
    "out of memory|unable to find an engine|[Cc]an't allocate (memory|[0-9]+ bytes)"
    "|ALLOC(ATION|ATOR)?_FAIL|MemoryAllocation|OUT_OF_MEMORY|bad_alloc"
)
"""Of torch, CUDA's libraries, NCCL, nvJPEG and DALI. cuDNN in benchmark mode drops each plan whose workspace has no room, and
finds no engine."""
NO_HANDLE = re.compile("CU(DNN|BLAS|SOLVER)_STATUS_NOT_INITIALIZED")
"""The first call of a CUDA library creates its handle: that fails where its memory finds no room, and on a GPU that is broken."""
PLENTY_FREE = 0.05
"""Of a GPU's memory: handles need less."""
LOST_PEER = re.compile("/gloo/transport/|Gloo connectFullMesh failed|Application timeout caused pair closure")
"""Of gloo, which raises a bare RuntimeError; NCCL and the store raise a `torch.distributed.DistError`."""
DEVICE = re.compile("CUDA error: |CU[A-Z]+_(STATUS|ERROR)_|cudaError|(driver|cuDNN|runtime API) error")
DEVICE_ASSERT = "device-side assert triggered"
"""A failed check inside a kernel, such as an index out of range: the data or the code is wrong, not the device."""
SINGLE_VALUE = "Expected more than 1 value per channel when training"
"""Of torch's batch norm, for one image whose maps have one pixel."""


@dataclass(frozen=True)
class Failure:
    """Why one worker, or all of them, ended."""

    kind: Kind
    message: str
    type: str | None = None
    """The exception's class, where the message alone does not say what is wrong."""
    rank: int | None = None
    position: str | None = None
    """Of a hang: in which phase and step; None where nobody knows."""

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
        case DataUnavailableError() | StorageUnavailableError():
            return "unavailable"
        case DistillError():
            return "user"
        case torch.OutOfMemoryError() | MemoryError() | OSError(errno=errno.ENOMEM):
            return "out_of_memory"
        case TeacherServiceLostError():  # a bare ConnectionError or TimeoutError is the user's: ours are none
            return "lost_peer"
        case LoaderDiedError():
            return "worker_died"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS):
            return "disk"
        case RuntimeError():
            text = str(error)
            if OUT_OF_MEMORY.search(text) or (NO_HANDLE.search(text) and is_gpu_full()):
                return "out_of_memory"
            if isinstance(error, dist.DistError) or LOST_PEER.search(text):
                return "lost_peer"
            if DEVICE_ASSERT not in text and (isinstance(error, torch.AcceleratorError) or DEVICE.search(text)):
                return "device"
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


def write_failure(path: Path, failure: Failure) -> None:
    """Write why a worker, or a stage, ends. The file appears complete. Raises OSError: the disk cannot be written."""
    time_ms = time.time_ns() // 1_000_000
    write_json(path, {"version": VERSION, "time_ms": time_ms, **asdict(failure), "message": redact(failure.message)})


def read_failure(path: Path) -> Failure | None:
    """The failure that `write_failure` wrote; None where there is none, or one of another version."""
    found = _read(path)
    return None if found is None else found[1]


def read_failures(folder: Path) -> list[Failure]:
    """The failures in the files of a folder, in the order in which they were written."""
    found = [each for path in sorted(folder.glob("*.json")) if (each := _read(path)) is not None]
    return [failure for _, failure in sorted(found, key=lambda each: each[0])]


def _read(path: Path) -> tuple[int, Failure] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("version") != VERSION:
            return None
        return record.pop("time_ms"), Failure(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
