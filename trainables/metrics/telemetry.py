"""Telemetry of the hardware during a training: a thread that samples this node's GPUs, CPU, memory and disk.

Run one per node. A number that the hardware, its driver or a container does not give is left out; nothing here raises
into the training.
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
"""Bits of NVML's clocks event (formerly throttle) reasons, in the names of its nvmlClocksEventReasons constants."""

SLOWING_REASONS = 0x008 | 0x020 | 0x040 | 0x080
"""Those by which heat or the power supply lowers a clock. A power cap is not one of them: GPUs under load run at theirs."""

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
"""Fields whose maximum is no use."""
_UNIT = re.compile("(_mib_per_s|_pct|_mib|_c|_w|_mhz|)$")
"""The unit in a field's name; it stays last: `gpu0/util_pct` → `gpu0/util_max_pct`."""


def decode_throttle(bitmask: int) -> list[str]:
    """Names of the reasons set in an NVML bitmask, lowest bit first; a bit without a name is given as `0x…`."""
    bits = [1 << index for index in range(bitmask.bit_length()) if bitmask >> index & 1]
    return [THROTTLE_REASONS.get(bit, f"{bit:#x}") for bit in bits]


def visible_gpus(visible: str | None, count: int) -> list[int | str]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` (None: unset) leaves of `count`: NVML indices or UUIDs, in CUDA's order.

    As CUDA does, the list ends at the first entry that names no device. Indices are taken in PCI order, which is CUDA's own
    where all GPUs of a node are of one kind.
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
    """NVML handles of the GPUs that this process may use, `cuda:0` first; [] where there is no NVIDIA driver."""
    try:
        pynvml.nvmlInit()
        return [
            pynvml.nvmlDeviceGetHandleByUUID(gpu) if isinstance(gpu, str) else pynvml.nvmlDeviceGetHandleByIndex(gpu)
            for gpu in visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return []


def read_gpus(gpus: list[Handle]) -> Iterator[tuple[str, float]]:
    """`gpu0/util_pct`, … of each GPU, without the fields that it does not support (as MIG slices and vGPUs do not)."""
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
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Node:
    """CPU, memory, disk and swap space of the whole node; rates are over the time since the last read."""

    def __init__(self) -> None:
        psutil.cpu_percent()
        self._swaps = psutil.swap_memory().total > 0
        self._before, self._read_at = self._counters_mib(), time.perf_counter()

    def _counters_mib(self) -> dict[str, float]:
        """MiB read so far: from disks, and from swap space where the node has any."""
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
            if name in before:  # counters jump back where a disk is unplugged
                yield f"{name}_mib_per_s", max(0.0, mib - before[name]) / (self._read_at - before_at)


class _Window:
    """Mean and maximum of every field since the last snapshot; throttle reasons are or-ed."""

    def __init__(self) -> None:
        self._sum_count_max_bits: dict[str, tuple[float, int, float, int]] = {}

    def add(self, sample: Mapping[str, float]) -> None:
        for name, value in sample.items():
            total, count, most, bits = self._sum_count_max_bits.get(name, (0.0, 0, value, 0))
            self._sum_count_max_bits[name] = total + value, count + 1, max(most, value), bits | int(value)

    def summary(self) -> dict[str, float]:
        values = dict[str, float]()
        for name, (total, count, most, bits) in self._sum_count_max_bits.items():
            is_bits = name.endswith("/throttle_reasons")
            values[name] = float(bits) if is_bits else total / count
            if not is_bits and not name.endswith(_WITHOUT_MAX):
                values[_UNIT.sub(r"_max\1", name, count=1)] = most
        return values


class Telemetry:
    """A context in which a daemon thread samples this node every `every_s` seconds; it can be read afterwards, too.

    `gpuN` is `cuda:N` of this process: of a node's GPUs, those of this job. CPU, memory and disk are the whole
    node's (local disks; a network file system's reads are not among them), and so is what comes back from swap space.
    """

    def __init__(self, every_s: float):
        self._every_s = every_s
        self._gpus: list[Handle] = []
        self._window, self._whole = _Window(), _Window()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        """Begin to sample; the first sample is there after `every_s`."""
        self._gpus = open_gpus()
        self._thread.start()
        return self

    def snapshot(self, whole: bool = False) -> dict[str, float]:
        """Mean and maximum of each number since the last snapshot (`whole`: since the first), and the number of GPUs as `gpus`.

        Names: `gpu0/util_pct` and `gpu0/util_max_pct`; likewise `gpu0/memory_mib`, `gpu0/temperature_c`, `gpu0/power_w`,
        `gpu0/sm_clock_mhz`, `gpu0/memory_clock_mhz`, `cpu_pct`, `cpu_cores` (that this process may use),
        `memory_mib`, `disk_read_mib_per_s`, and `swap_in_mib_per_s` where there is swap space. `gpu0/throttle_reasons` has every
        bit that was set in any sample (see `decode_throttle`), `gpu0/throttled_pct` the share of samples with one of
        `SLOWING_REASONS`; `gpu0/sm_clock_limit_mhz` is the GPU's limit. Only `gpus` where no sample was taken since.
        """
        with self._lock:
            window = self._whole if whole else self._window
            self._window = self._window if whole else _Window()
        return {"gpus": float(len(self._gpus)), **window.summary()}

    def __exit__(self, *_: object) -> None:
        """End the thread after one last sample, so that even the shortest run has one."""
        self._stopping.set()
        self._thread.join(timeout=5)  # a driver that hangs must not delay the training's end: the thread is a daemon

    def _run(self) -> None:
        # A thread that fails ends alone: the run goes on, without telemetry. psutil raises errors of many kinds.
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
