"""Records as a run on GPUs writes them, of a GPU that gets hot: an epoch's 175 s become 199 s at 80 °C."""

from typing import Any

from service.config.experiment import load
from service.doctor.read_run import Recording, evidence_of
from trainables.metrics.phases import PHASES

STEPS = 1000
SHARES = dict(zip(PHASES, (0.01, 0.0, 0.01, 0.28, 0.25, 0.42, 0.03), strict=True))
SW_THERMAL_SLOWDOWN = 0x20


def hot_gpu(throttled: bool) -> Recording:
    """A run of 8 epochs on one GPU, which keeps its clock or loses it to heat from the third epoch on."""
    lines: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "epoch": 0, "metrics": {"steps_per_epoch": STEPS, "num_workers": 1}}
    ]
    rng_pct = (0.3, -0.2, 0.1, 0.4, -0.3, 0.2, -0.1, 0.0)  # what epochs differ by anyway
    sum_ms = 0.0
    for epoch, noise_pct in enumerate(rng_pct, start=1):
        hot = min(1.0, max(0.0, (epoch - 2) / 4)) if throttled else 0.0
        step_ms = (175 + 24 * hot) * (1 + noise_pct / 100) * 1e3 / STEPS
        sum_ms += step_ms
        for part in range(1, 6):
            step = {f"train/{name}": ms for name, ms in phases(step_ms).items()}
            lines.append(
                {"kind": "step", "step": (epoch - 1) * STEPS + part * STEPS // 5, "epoch": epoch - 1 + part / 5, "metrics": step}
            )
        gpu = {
            "util_pct": 98.0,
            "temperature_c": 66 + 14 * hot,
            "sm_clock_mhz": 1410 * 175 / (175 + 24 * hot),
            "throttle_reasons": float(SW_THERMAL_SLOWDOWN if hot else 0),
            "power_w": 380.0,
        }
        telemetry = {f"node0/gpu0/{name}": value for name, value in gpu.items()}
        measured = {f"epoch/{name}": value for name, value in (telemetry | {"eval_s": 6.0, "node0/cpu_pct": 40.0}).items()}
        evaluated = {"val/num_images": 50_000.0}
        lines.append({"kind": "epoch", "step": epoch * STEPS, "epoch": float(epoch), "metrics": measured | evaluated})
    summary = phases(sum_ms / len(rng_pct)) | telemetry | {"one_image_ms": 4.0}
    experiment = load("imagenet_r34_r18", ["data.global_batch_size=256", "teacher.weights=IMAGENET1K_V1"]).experiment
    return Recording("the student", evidence_of(experiment, summary, lines, 16))


def phases(step_ms: float) -> dict[str, float]:
    return {f"phase/{phase}_ms": share * step_ms for phase, share in SHARES.items()} | {"phase/step_ms": step_ms}
