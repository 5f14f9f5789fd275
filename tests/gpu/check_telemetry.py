"""9: what NVML says of the GPU while it trains, and what asking costs."""

import statistics
import time

import torch

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.timing import seconds_of
from tests.gpu.work import R34_R18, Stepper, device_batch, first_device, job_config, open_job, sized
from trainables.metrics.telemetry import GPU_FIELDS, Telemetry, open_gpus, read_gpus


def sampled(settings: Settings) -> Measured:
    """Fields of a GPU, milliseconds a sample, and its use while batch 256 trains."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    batch, seconds = (8, 0.3) if settings.small else (256, 12.0)
    gpus = open_gpus()
    costs_ms = []
    for _ in range(20):
        began = time.perf_counter()
        found = dict(read_gpus(gpus))
        costs_ms.append(1e3 * (time.perf_counter() - began))
    telemetry = Telemetry(every_s=seconds / 12)
    with open_job(job_config(settings, pair, batch, "bf16"), device) as job:
        step = Stepper(job, device_batch(pair, batch, device))
        seconds_of(step, 2 if settings.small else 5, device)
        with telemetry:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                seconds_of(step, 5, device)
    use = telemetry.snapshot(whole=True)
    return {
        "fields": sum(f"gpu0/{field}" in found for field in GPU_FIELDS),
        "ms a sample": statistics.median(costs_ms),
        "util_pct": use.get("gpu0/util_pct", 0.0),
        "power_w": use.get("gpu0/power_w", 0.0),
        "gpus": use["gpus"],
        "gpus of torch": torch.cuda.device_count() if device.type == "cuda" else 0,
        "cpu_pct": use["cpu_pct"],
    }


CHECK = Check(
    9,
    "Telemetry",
    (
        Piece(
            "9-telemetry",
            sampled,
            (
                Expected("fields", f"all {len(GPU_FIELDS)} fields of a GPU", len(GPU_FIELDS), len(GPU_FIELDS)),
                Expected("ms a sample", "milliseconds a sample: below 20", high=20, estimate=True),
                Expected("util_pct", "use at batch 256 ≥ 95 %", low=95),
                Expected("cpu_pct", "use of the node's CPU: recorded"),
            ),
            2,
        ),
    ),
)
