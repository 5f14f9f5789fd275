import threading
import time
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from trainables.metrics import telemetry
from trainables.metrics.telemetry import GPU_FIELDS, Telemetry, decode_throttle, read_gpus, visible_gpus

NODE = {"cpu_pct", "cpu_cores", "memory_mib", "disk_read_mib_per_s"} | (
    {"swap_in_mib_per_s"} if psutil.swap_memory().total else set()
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def wait_for_sample(sampler: Telemetry) -> dict[str, float]:
    while "cpu_pct" not in (found := sampler.snapshot()):
        time.sleep(0.01)
    return found


def test_throttle_bits_have_names_and_unknown_ones_show_their_value() -> None:
    assert decode_throttle(0) == []
    assert decode_throttle(0x1 | 0x4 | 0x40) == ["gpu_idle", "sw_power_cap", "hw_thermal_slowdown"]
    assert decode_throttle(0x8 | 1 << 40) == ["hw_slowdown", "0x10000000000"]


def test_the_names_of_throttle_bits_are_nvmls_own() -> None:
    for name, bit in vars(pynvml).items():
        if name.startswith("nvmlClocksEventReason") and isinstance(bit, int) and bit.bit_count() == 1:
            own = name.removeprefix("nvmlClocksEventReason").lower()
            # UserDefinedClocks is an old name of the same bit.
            assert decode_throttle(bit)[0].replace("_", "") == own or own == "userdefinedclocks"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,9,2", [1]),
        ("-1", []),
        ("GPU-5ad1, MIG-77", ["GPU-5ad1", "MIG-77"]),
    ],
)
def test_the_gpus_of_this_process_are_those_that_cuda_shows_it(visible: str | None, expected: list[int | str]) -> None:
    assert visible_gpus(visible, count=4) == expected


def test_a_node_without_an_nvidia_driver_is_sampled_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Telemetry(every_s=0.05) as sampler:
        found = wait_for_sample(sampler)
    assert found["gpus"] == 0
    assert not [name for name in found if name.startswith("gpu") and name != "gpus"]
    assert 0 <= found["cpu_pct"] <= 100
    assert 0 < found["memory_mib"] <= found["memory_max_mib"] <= psutil.virtual_memory().total / 2**20


def test_a_snapshot_has_mean_and_maximum_since_the_last_one_and_every_throttle_bit() -> None:
    sampler = Telemetry(every_s=60)
    for util, bits in ((20, 0x4), (60, 0x1), (40, 0x4)):
        sampler._window.add({"gpu0/util_pct": util, "gpu0/throttle_reasons": bits, "disk_read_mib_per_s": util})
    assert sampler.snapshot() == {
        "gpus": 0,
        "gpu0/util_pct": 40,
        "gpu0/util_max_pct": 60,
        "gpu0/throttle_reasons": 0x5,
        "disk_read_mib_per_s": 40,
        "disk_read_max_mib_per_s": 60,
    }
    assert sampler.snapshot() == {"gpus": 0}


def test_a_field_that_a_device_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(gpu: object) -> float:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for field in GPU_FIELDS:
        monkeypatch.setitem(GPU_FIELDS, field, unsupported if field in ("util_pct", "power_w") else lambda gpu: 7)
    found = dict(read_gpus(["a MIG slice"]))
    assert set(found) == {f"gpu0/{field}" for field in (*GPU_FIELDS, "throttled_pct")} - {"gpu0/util_pct", "gpu0/power_w"}


def test_a_run_shorter_than_the_interval_still_has_a_sample() -> None:
    with Telemetry(every_s=3600) as sampler:
        pass
    assert sampler.snapshot()["memory_mib"] > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_failing_sampler_says_so_once_and_leaves_the_run_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise FileNotFoundError("/proc/diskstats")

    monkeypatch.setattr(psutil, "disk_io_counters", broken)
    with Telemetry(every_s=0.01) as sampler:
        pass
    assert "gpus" in sampler.snapshot()
    assert caplog.messages == ["telemetry stopped: FileNotFoundError: /proc/diskstats"]


def test_a_node_without_disk_counters_gives_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    with Telemetry(every_s=0.01) as sampler:
        found = wait_for_sample(sampler)
    assert "memory_mib" in found
    assert "disk_read_mib_per_s" not in found


def test_disk_reads_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = psutil.disk_io_counters()
    if counters is None:
        pytest.skip("this system counts no disk reads")
    read_bytes = counters.read_bytes

    def grown() -> object:
        nonlocal read_bytes
        read_bytes += 2**20
        return counters._replace(read_bytes=read_bytes)

    monkeypatch.setattr(psutil, "disk_io_counters", grown)
    with Telemetry(every_s=0.1) as sampler:
        found = wait_for_sample(sampler)
    assert 1 < found["disk_read_mib_per_s"] <= 10


def test_what_comes_back_from_swap_space_is_a_rate_and_absent_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = psutil.swap_memory()
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(total=0))
    assert "swap_in_mib_per_s" not in dict(telemetry._Node().read())
    read = iter((0, 50 * 2**20))
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap._replace(total=2**30, sin=next(read, 50 * 2**20)))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    now_s = iter((100.0, 100.5))
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    node = telemetry._Node()
    node._before = {"swap_in": 0.0}
    assert dict(node.read())["swap_in_mib_per_s"] == 100


def test_the_share_of_the_time_in_which_heat_or_power_supply_lowered_a_clock_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cap (0x4) is the usual state of a GPU that works."""
    sampler = Telemetry(every_s=60)
    for bits in (0x4, 0x24, 0x0, 0x80):
        for field in GPU_FIELDS:
            monkeypatch.setitem(GPU_FIELDS, field, lambda gpu, bits=bits: bits)
        sampler._window.add(dict(read_gpus(["a GPU"])))
    found = sampler.snapshot()
    assert found["gpu0/throttled_pct"] == 50
    assert found["gpu0/throttle_reasons"] == 0xA4
    assert "gpu0/throttled_max_pct" not in found


def test_sampling_costs_under_a_hundredth_of_a_core() -> None:
    node = telemetry._Node()
    costs_s = []
    for _ in range(20):
        begin = time.thread_time()
        _ = dict(node.read()) | dict(read_gpus([]))
        costs_s.append(time.thread_time() - begin)
    assert sorted(costs_s)[10] < 0.01 * 1.0  # at the default interval of a second


@pytest.mark.gpu
@needs_gpu
def test_every_visible_gpu_is_sampled() -> None:
    with Telemetry(every_s=0.1) as sampler:
        block = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
        found = wait_for_sample(sampler)
    assert found["gpus"] == torch.cuda.device_count()
    assert found["gpu0/memory_max_mib"] >= block.numel() / 2**20
    assert 0 <= found["gpu0/util_pct"] <= 100
