"""How many bytes can still be written to a node's disk or memory, also in a container."""

import contextlib
import os
from pathlib import Path

import psutil

RAM = "/dev/shm"
_MEMORY_SHARE = 0.9  # of the free memory; the rest is for the job itself


def free_bytes(folder: Path) -> int:
    """Return how much can still be written below `folder`; in RAM, at most what the machine or container has free."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if str(folder).startswith(RAM):
        free = min(free, int(_MEMORY_SHARE * min(psutil.virtual_memory().available, _container_bytes())))
    return free


def _container_bytes(memberships: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the memory that this process may still use under its control group and the parents (cgroup v1 or v2).

    In a container, the path may be that on the host while only the container's own group is visible, as the root.
    """
    free = float("inf")
    with contextlib.suppress(OSError):
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, limit, used, reclaimable = root, "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                reclaimable = "total_inactive_file"
            else:
                continue
            own = top.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
            for group in (own, *own.parents[: len(own.parts) - len(top.parts)]):
                free = min(free, _group_bytes(group, limit, used, reclaimable))
    return free


def _group_bytes(group: Path, limit: str, used: str, reclaimable: str) -> float:
    """Return what a control group may still use, read from files of these names; reclaimable memory counts as free."""
    try:
        if (limit_bytes := (group / limit).read_text().strip()) == "max":
            return float("inf")
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit_bytes) - int((group / used).read_text()) + int(counts[reclaimable])
    except (OSError, KeyError, ValueError):
        return float("inf")


def format_bytes(num_bytes: float) -> str:
    """Format a size for messages: three digits and a binary unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
