"""Which CPUs are near a GPU: those of its NUMA node, whose memory it reads without a detour over another socket."""

import functools
import logging
import os
from collections.abc import Set
from pathlib import Path

import torch

log = logging.getLogger("raydistill")


def cpus_near(pci_address: str, allowed: Set[int], least: int, sysfs: Path = Path("/sys")) -> set[int] | None:
    """Those of the `allowed` CPUs that are on the NUMA node of the GPU at `pci_address`, such as `0000:9b:00.0`.

    None where all CPUs are equally near, where the system does not say which are, and where fewer than `least` of them are
    allowed: a few near CPUs would be slower than enough far ones.
    """
    try:
        near = _cpu_list((sysfs / "bus/pci/devices" / pci_address / "local_cpulist").read_text()) & allowed
    except (OSError, ValueError):
        return None
    return near if least <= len(near) < len(allowed) else None


def run_near(device: torch.device, num_cpus: int) -> None:
    """Let this thread, and all that it starts, run on the CPUs near a GPU, where `num_cpus` of these are allowed.

    So are the loader's threads or its process, and the memory that they and this thread touch first: that of the batches.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    properties = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))  # stubs lack them
    address = f"{domain:04x}:{bus:02x}:{number:02x}.0"
    allowed = _allowed_at_first()
    near = cpus_near(address, allowed, num_cpus)
    os.sched_setaffinity(0, near or allowed)
    if near:
        log.info("on the %d of %d CPUs that are near GPU %s", len(near), len(allowed), address)


@functools.cache
def _allowed_at_first() -> frozenset[int]:
    """The CPUs of a thread of this process before any was moved; an earlier stage may have needed fewer than the next one."""
    return frozenset(os.sched_getaffinity(0))


def _cpu_list(text: str) -> set[int]:
    """Linux's notation: `0-3,8-11`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
