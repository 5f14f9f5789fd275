"""Ranks of this node as processes, each on a GPU of its own over NCCL; on a CPU over Gloo."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainables.distributed.group import Group, group_arguments

ROOT = Path(__file__).parents[2]


def run_ranks(world_size: int, device: str, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """`function(group, *args)` of every rank, in their order. `function` is a module's own, and its results can be pickled.

    Raises:
        RuntimeError: a rank raised or died.
        TimeoutError: they took longer; all of them are ended.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps((function, args)))
        command = [sys.executable, "-m", "tests.gpu.ranks", name, device, str(world_size)]
        ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(world_size)]
        try:
            _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGKILL)
                rank.wait()
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[subprocess.Popen[bytes]], until: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if failed:
            raise RuntimeError(f"rank {failed[0]} ended with exit code {ranks[failed[0]].poll()}")
        if time.monotonic() > until:
            raise TimeoutError("the ranks took too long")
        time.sleep(0.05)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"exit codes of the ranks: {[rank.returncode for rank in ranks]}")


def _serve(folder: Path, kind: str, world_size: int, rank: int) -> None:
    """What a rank's process does."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(folder / "store"), world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(store=store, rank=rank, world_size=world_size, **group_arguments(backend, device))
    function, args = pickle.loads((folder / "task").read_bytes())
    result = function(Group(rank, world_size, rank, device), *args)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
