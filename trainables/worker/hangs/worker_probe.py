"""What a worker reports about itself to `hang_watch`, in the process's other threads while its training thread may be stuck."""

import contextlib
import json
from collections.abc import Iterator

import psutil

from trainables.metrics.heartbeat import Heartbeat, Position
from trainables.stacks import write_stacks_on_signal

_MOVED_BYTES = 2**20
_current: Heartbeat | None = None
_bytes_at_beat = 0


@contextlib.contextmanager
def watched(folder: str = "") -> Iterator[Heartbeat]:
    """A context in which this worker is watched: the heartbeat of the job that runs in it. `folder`: see `Position`."""
    global _current
    write_stacks_on_signal()
    _current = Heartbeat(folder)
    try:
        yield _current
    finally:
        _current = None


def position() -> Position | None:
    """Where the worker is. Called by Ray in its main thread; None where no job runs."""
    heartbeat = _current
    if heartbeat is not None and heartbeat.position().activity == "start":
        _beat_if_bytes_moved(heartbeat)
    return None if heartbeat is None else heartbeat.position()


def _beat_if_bytes_moved(heartbeat: Heartbeat) -> None:
    """Before a job's loop begins, reading and writing is progress: a data set may be copied to the node for hours."""
    global _bytes_at_beat
    if not hasattr(psutil.Process, "io_counters"):  # macOS counts none
        return
    with contextlib.suppress(psutil.Error, OSError):  # a node may not let a process read its counters
        counters = psutil.Process().io_counters()
        num_bytes = counters.read_chars + counters.write_chars
        if num_bytes - _bytes_at_beat > _MOVED_BYTES:
            _bytes_at_beat = num_bytes
            heartbeat.beat()


def last_collective() -> tuple[int, str] | None:
    """The number and the name of the last collective that this rank has begun in the group of all ranks.

    From torch's flight recorder, which is on by default; None where it has nothing.
    """
    from torch import distributed as dist  # here, since others import this module's names alone
    from torch._C import _distributed_c10d as c10d

    nccl = dist.get_backend() == "nccl"
    dump = c10d._dump_nccl_trace_json if nccl else c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    entries = json.loads(dump(True, False)).get("entries", [])
    of_all = [entry for entry in entries if entry["process_group"][1] == "default_pg" and not entry["is_p2p"]]
    return max(((entry["collective_seq_id"], entry["profiling_name"]) for entry in of_all), default=None)
