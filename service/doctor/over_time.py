"""What shows between epochs alone: clocks that fall as GPUs get hot, and evaluations."""

from __future__ import annotations

from service.doctor.evidence import Evidence, Finding, GpuUse, gain_pct

HOT = 0x008 | 0x020 | 0x040
"""NVML's reasons for lower clocks that heat brings: hw_slowdown, sw_thermal_slowdown, hw_thermal_slowdown."""
HOT_C = 75.0
FALL = 0.98
"""Clocks below this part of what they were have fallen."""


def thermal_drift(e: Evidence) -> Finding | None:
    """Epochs that take longer than the fastest one, while a hot GPU's clock fell: T' is the fastest's step, T the last's."""
    if len(e.epochs) < 2:
        return None
    fastest, last = min(e.epochs, key=lambda epoch: epoch.step_ms), e.epochs[-1]
    before = {gpu.name: gpu for gpu in fastest.gpus}
    fallen = [(before[gpu.name], gpu) for gpu in last.gpus if gpu.name in before and fell(before[gpu.name], gpu)]
    if not fallen:
        return None
    cool, hot = min(fallen, key=lambda pair: (pair[1].clock_mhz or 0) / (pair[0].clock_mhz or 1))
    heat = f" at {hot.temperature_c:.0f} °C" if hot.temperature_c else ""
    steps = e.steps_per_epoch or 1
    return Finding(
        "thermal drift",
        f"an epoch's steps grew from {fastest.step_ms * steps / 1e3:.1f} to {last.step_ms * steps / 1e3:.1f} s while the "
        f"clock of {hot.name} fell from {cool.clock_mhz:,.0f} to {hot.clock_mhz:,.0f} MHz{heat}",
        "cool that GPU (fans, air, power limit), or leave it out of the cluster",
        gain_pct(last.step_ms, fastest.step_ms),
    )


def fell(before: GpuUse, after: GpuUse) -> bool:
    """Whether a GPU's clock is lower than before, and the GPU hot."""
    hot = bool(after.throttle_reasons & HOT) or (after.temperature_c or 0) >= HOT_C
    return hot and before.clock_mhz is not None and after.clock_mhz is not None and after.clock_mhz < FALL * before.clock_mhz


def evaluation(e: Evidence) -> Finding | None:
    """Evaluations that take longer than the student's forward on their images, as training measured it.

    Of an epoch of steps·T + eval, the evaluation could take images/workers · student/b.
    """
    if not e.epochs or not e.steps_per_epoch:
        return None
    step = e.typical
    eval_s = sum(epoch.eval_s for epoch in e.epochs) / len(e.epochs)
    could_s = e.val_images / e.num_workers * step.student_ms / e.rank_batch / 1e3
    epoch_s = e.steps_per_epoch * step.step_ms / 1e3 + eval_s
    return Finding(
        "evaluation",
        f"evaluating {e.val_images:,.0f} images takes {eval_s:.1f} s of an epoch's {epoch_s:.1f} s; the student's forward on "
        f"them takes {could_s:.1f} s, the rest is loading",
        f"--set data.loader_workers={2 * max(1, e.loader_workers)}, or pack the images (distill pack --max-side)",
        gain_pct(epoch_s, epoch_s - (eval_s - could_s)),
    )
