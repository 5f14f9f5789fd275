"""What another process on the node can find out about stuck workers: state, stacks, GPUs. It also ends them."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import psutil

from trainables.metrics.telemetry import open_gpus, read_gpus
from trainables.stacks import StacksRequest

_STACKS_WAIT_S, _POLL_S = 2.0, 0.05
LOADER_MODULE = "trainables.data.loader.loader_server"
"""What a loader process runs, by its command line."""
STATES = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_ZOMBIE: "has died",
}


@dataclass(frozen=True)
class WorkerProcess:
    """A worker on this node."""

    pid: int
    gpus: tuple[str, ...] = ()
    """Their numbers or UUIDs."""


@dataclass(frozen=True)
class ProcessState:
    """What was found."""

    state: str = ""
    """What is wrong with the process as a whole; empty: nothing."""
    waits_for_disk: bool = False
    """Whether a thread of it or of its children is in state D all the time: a disk or a network file system does not answer."""
    stopped_child: str = ""
    """Such as `its loader process is stopped (SIGSTOP)`; empty: none is."""
    stacks: str = ""
    loader_stacks: str = ""
    """Those of its loader process."""
    gpus: str = ""


def inspect(processes: Mapping[int, WorkerProcess]) -> dict[int, ProcessState]:
    """The state of the workers of this node, by rank. It takes as long as the slowest of them writes its stacks, at most 2 s."""
    families = {rank: _family(process.pid) for rank, process in processes.items()}
    asleep = {rank: _in_disk_sleep(family) for rank, family in families.items()}
    requests = {pid: _request_stacks(pid) for family in families.values() for pid in (family[0], *_loaders(family[1:]))}
    until_s = time.monotonic() + _STACKS_WAIT_S
    time.sleep(_POLL_S)
    while any(request is not None and request.grows() for request in requests.values()) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    stacks = {pid: request.text() if request is not None else "" for pid, request in requests.items()}
    return {
        rank: ProcessState(
            _state(process.pid),
            bool(asleep[rank] & _in_disk_sleep(families[rank])),
            _stopped_child(families[rank][1:]),
            stacks[process.pid],
            "".join(stacks.get(child, "") for child in families[rank][1:]),
            _gpus(process.gpus),
        )
        for rank, process in processes.items()
    }


def end(processes: Mapping[int, WorkerProcess]) -> None:
    """Kill those of the workers that cannot end when Ray asks them to."""
    for process in processes.values():
        if _state(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _request_stacks(pid: int) -> StacksRequest | None:
    """None: the process has died, or writes none."""
    try:
        return StacksRequest(pid)
    except (OSError, LookupError):
        return None


def _state(pid: int) -> str:
    try:
        return STATES.get(psutil.Process(pid).status(), "")
    except psutil.NoSuchProcess:
        return STATES[psutil.STATUS_ZOMBIE]


def _family(pid: int) -> list[int]:
    """A process and its children, among them its loader process."""
    with contextlib.suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children())]
    return [pid]


def _stopped_child(pids: Sequence[int]) -> str:
    """The first of the children that is stopped, see `ProcessState`."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has ended
            child = psutil.Process(pid)
            if (status := child.status()) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return f"its {'loader' if _is_loader(child) else 'child'} process {STATES[status]}"
    return ""


def _loaders(pids: Sequence[int]) -> list[int]:
    """Those of the children that are a loader process."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has ended
            if _is_loader(psutil.Process(pid)):
                found.append(pid)
    return found


def _is_loader(child: psutil.Process) -> bool:
    return any(LOADER_MODULE in argument for argument in child.cmdline())


def _in_disk_sleep(pids: Sequence[int]) -> set[str]:
    """The threads of some processes that are in state D."""
    threads = set[str]()
    for path in chain.from_iterable(Path(f"/proc/{pid}/task").glob("*/stat") for pid in pids):
        with contextlib.suppress(OSError):  # it has ended
            # The third field, behind a name in brackets that may have any characters.
            if path.read_text().rpartition(")")[2].split()[0] == "D":
                threads.add(path.parent.name)
    return threads


def _gpus(ids: tuple[str, ...]) -> str:
    """`GPU 3: 100 % busy, 20480 MiB`, of each GPU."""
    handles = open_gpus(",".join(ids)) if ids else []
    values = dict(read_gpus(handles))
    names = (f"GPU {name}: {values.get(f'gpu{index}/util_pct', float('nan')):.0f} % busy, " for index, name in enumerate(ids))
    memory = (f"{values.get(f'gpu{index}/memory_mib', float('nan')):.0f} MiB" for index in range(len(handles)))
    return "; ".join(name + mib for name, mib in zip(names, memory, strict=False))
