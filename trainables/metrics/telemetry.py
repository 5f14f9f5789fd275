"""Hardware telemetry during training: a thread samples this node's GPUs, CPU, memory and disk.

Run one per node. Numbers that the hardware, driver or container does not provide are left out. Nothing here raises into the
training thread.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import psutil
import pynvml

MIB = 2**20

log = logging.getLogger("raydistill")

THROTTLE_REASONS: dict[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's clocks event (formerly throttle) reasons, named after its nvmlClocksEventReasons constants."""

SLOWING_REASONS = 0x008 | 0x020 | 0x040 | 0x080
"""Bits for slowdowns by heat or the power supply. They exclude the power cap, which GPUs under load normally run at."""

Handle = object
"""NVML's opaque pointer to one device."""

GPU_FIELDS: dict[str, Callable[[Handle], float]] = {
    "util_pct": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_mib": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / MIB,
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "sm_clock_limit_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
    "throttle_reasons": lambda gpu: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
}
_WITHOUT_MAX = ("throttled_pct", "sm_clock_limit_mhz", "cpu_cores")
"""Fields whose maximum is not useful."""
_UNIT = re.compile("(_mib_per_s|_pct|_mib|_c|_w|_mhz|)$")
"""The unit at the end of a field's name, which stays last: `gpu0/util_pct` → `gpu0/util_max_pct`."""


def decode_throttle(bitmask: int) -> list[str]:
    """Return the names of the reasons set in an NVML bitmask, lowest bit first; unknown bits as `0x…`."""
    bits = [1 << index for index in range(bitmask.bit_length()) if bitmask >> index & 1]
    return [THROTTLE_REASONS.get(bit, f"{bit:#x}") for bit in bits]


def visible_gpus(visible: str | None, count: int) -> list[int | str]:
    """Return which of `count` GPUs `CUDA_VISIBLE_DEVICES` (None: unset) selects: NVML indices or UUIDs, in CUDA's order.

    As in CUDA, the list ends at the first entry that is not a device. Indices are in PCI order, which is CUDA's order if all
    GPUs of a node are the same model.
    """
    if visible is None:
        return list(range(count))
    chosen: list[int | str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            chosen.append(entry)
        elif entry.isdecimal() and int(entry) < count:
            chosen.append(int(entry))
        else:
            break
    return chosen


def open_gpus() -> list[Handle]:
    """Return NVML handles of the GPUs that this process may use, `cuda:0` first; [] without an NVIDIA driver."""
    try:
        pynvml.nvmlInit()
        return [
            pynvml.nvmlDeviceGetHandleByUUID(gpu) if isinstance(gpu, str) else pynvml.nvmlDeviceGetHandleByIndex(gpu)
            for gpu in visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return []


def read_gpus(gpus: list[Handle]) -> Iterator[tuple[str, float]]:
    """Yield `gpu0/util_pct`, … for each GPU, except fields that it does not support (such as MIG slices and vGPUs)."""
    for index, gpu in enumerate(gpus):
        for field, read in GPU_FIELDS.items():
            try:
                value = float(read(gpu))
            except pynvml.NVMLError:
                continue
            yield f"gpu{index}/{field}", value
            if field == "throttle_reasons":
                yield f"gpu{index}/throttled_pct", 100.0 if int(value) & SLOWING_REASONS else 0.0


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Node:
    """CPU, memory, disk and swap of the whole node, with rates since the last read."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._swaps = psutil.swap_memory().total > 0
        self._before, self._read_at = self._counters_mib(), time.perf_counter()

    def _counters_mib(self) -> dict[str, float]:
        """Return the MiB read so far from disks and, if the node has any, from swap."""
        disk = psutil.disk_io_counters()
        values = {} if disk is None else {"disk_read": disk.read_bytes / MIB}
        return values | ({"swap_in": psutil.swap_memory().sin / MIB} if self._swaps else {})

    def read(self) -> Iterator[tuple[str, float]]:
        memory = psutil.virtual_memory()
        yield "cpu_pct", psutil.cpu_percent()
        yield "cpu_cores", float(usable_cores())
        yield "memory_mib", (memory.total - memory.available) / MIB
        before, before_at = self._before, self._read_at
        self._before, self._read_at = self._counters_mib(), time.perf_counter()
        for name, mib in self._before.items():
            if name in before:  # counters jump back if a disk is unplugged
                yield f"{name}_mib_per_s", max(0.0, mib - before[name]) / (self._read_at - before_at)


class _Window:
    """Mean and maximum of each field since the last snapshot; throttle reasons are OR-ed."""

    def __init__(self) -> None:
        self._sum_count_max_bits: dict[str, tuple[float, int, float, int]] = {}

    def add(self, sample: Mapping[str, float]) -> None:
        for name, value in sample.items():
            total, count, peak, bits = self._sum_count_max_bits.get(name, (0.0, 0, value, 0))
            self._sum_count_max_bits[name] = total + value, count + 1, max(peak, value), bits | int(value)

    def summary(self) -> dict[str, float]:
        values = dict[str, float]()
        for name, (total, count, peak, bits) in self._sum_count_max_bits.items():
            is_bits = name.endswith("/throttle_reasons")
            values[name] = float(bits) if is_bits else total / count
            if not is_bits and not name.endswith(_WITHOUT_MAX):
                values[_UNIT.sub(r"_max\1", name, count=1)] = peak
        return values


class Telemetry:
    """A context in which a daemon thread samples this node every `every_s` seconds. It can still be read afterwards.

    `gpuN` is `cuda:N` of this process, so only GPUs of this job are covered. CPU, memory, disk and swap are those of the whole
    node; disk reads exclude network file systems.
    """

    def __init__(self, every_s: float):
        self._every_s = every_s
        self._gpus: list[Handle] = []
        self._window, self._whole = _Window(), _Window()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        """Begin sampling; the first sample comes after `every_s`."""
        self._gpus = open_gpus()
        self._thread.start()
        return self

    def snapshot(self, whole: bool = False) -> dict[str, float]:
        """Return the mean and maximum of each number since the last snapshot (`whole`: since the start), and `gpus`, their count.

        Names: `gpu0/util_pct` and `gpu0/util_max_pct`; likewise `gpu0/memory_mib`, `gpu0/temperature_c`, `gpu0/power_w`,
        `gpu0/sm_clock_mhz`, `gpu0/memory_clock_mhz`, `cpu_pct`, `cpu_cores` (usable by this process),
        `memory_mib`, `disk_read_mib_per_s`, and `swap_in_mib_per_s` if there is swap. `gpu0/throttle_reasons` has every bit that
        was set in any sample (see `decode_throttle`), `gpu0/throttled_pct` is the percentage of samples with one of
        `SLOWING_REASONS`, and `gpu0/sm_clock_limit_mhz` is the GPU's limit. Without a new sample there is only `gpus`.
        """
        with self._lock:
            window = self._whole if whole else self._window
            self._window = self._window if whole else _Window()
        return {"gpus": float(len(self._gpus)), **window.summary()}

    def __exit__(self, *_: object) -> None:
        """Stop the thread after a last sample, so that even the shortest run has one."""
        self._stopping.set()
        self._thread.join(timeout=5)  # a hung driver must not delay the end of training; the thread is a daemon

    def _run(self) -> None:
        # A failure ends only telemetry, not the run. psutil raises many kinds of errors.
        try:
            node = _Node()
            stopping = False
            while not stopping:
                stopping = self._stopping.wait(self._every_s)
                sample = dict(node.read()) | dict(read_gpus(self._gpus))
                with self._lock:
                    self._window.add(sample)
                    self._whole.add(sample)
        except Exception as error:
            log.warning("telemetry stopped: %s: %s", type(error).__name__, error)
