"""What a step computes: too little at a time, or with a teacher that outweighs its student."""

from __future__ import annotations

import math

from service.doctor.evidence import Evidence, Finding, gain_pct

FITS = 0.9
"""Share of a GPU's memory that a larger batch may take."""
MOST_TIMES = 64
"""How many times larger a batch may be proposed to be."""


def fixed_ms(e: Evidence) -> tuple[float, float] | None:
    """What a micro-batch costs however few images it has, and what a whole step does; None: unknown.

    From the models' work on b images in a micro-batches and on a single one: work = a·fixed + b·image, one = fixed + image. A
    step adds the optimizer and what lies in no phase.
    """
    if e.one_image_ms is None:
        return None
    b, a, step = e.rank_batch, e.accumulate, e.typical
    image_ms = max(0.0, e.compute_ms - a * e.one_image_ms) / (b - a) if b > a else 0.0
    micro_ms = min(max(0.0, e.one_image_ms - image_ms), e.compute_ms / a)
    return micro_ms, a * micro_ms + step.optimizer_ms + e.rest_ms


def launches(e: Evidence) -> Finding | None:
    """A batch so small that what a step costs anyway is much of it.

    A batch k times as large pays the fixed cost once where k steps pay it k times: T'/T = 1 - (fixed/T)·(1 - 1/k). k is the least
    power of 2 that brings the fixed cost below a tenth of the work on the images, or what fits into the GPU's memory.
    """
    step, fixed = e.typical, fixed_ms(e)
    if fixed is None:
        return idle_gpu(e)
    images_ms = max(1e-9, e.compute_ms - e.accumulate * fixed[0])
    times = 2
    while times < MOST_TIMES and fixed[1] / times > 0.1 * images_ms:
        times *= 2
    while times > 1 and e.peak_memory_mib and e.gpu_memory_mib and e.peak_memory_mib * times > FITS * e.gpu_memory_mib:
        times //= 2
    if times == 1:
        return None
    memory = ""
    if e.peak_memory_mib and e.gpu_memory_mib:
        memory = f"; {e.peak_memory_mib:,.0f} of {e.gpu_memory_mib:,.0f} MiB of the GPU's memory are used"
    return Finding(
        "launch-bound",
        f"{fixed[1]:.1f} of a step's {step.step_ms:.1f} ms are what any step costs, and {e.rank_batch:g} images a worker "
        f"are too few to pay for it{memory}",
        f"--set data.global_batch_size={times * e.global_batch} (with --set optim.lr_scaling=linear; steps get fewer)",
        gain_pct(step.step_ms, step.step_ms - fixed[1] * (1 - 1 / times)),
    )


def idle_gpu(e: Evidence) -> Finding | None:
    """Without the fixed cost: a GPU that no kernel ran on while the step waited for nothing. At most its idle share is gained."""
    step = e.typical
    known = [gpu.util_pct for gpu in e.gpus if gpu.util_pct is not None]
    if not known:
        return None
    busy_pct = sum(known) / len(known)
    waits_pct = 100 * (step.data_ms + step.h2d_ms + (e.exposed_ms or 0.0)) / step.step_ms
    return Finding(
        "launch-bound",
        f"GPUs are busy {busy_pct:.0f}% of the time and wait for nothing: {e.rank_batch:g} images a worker are too few",
        f"--set data.global_batch_size={2 * e.global_batch}",
        max(0.0, 100 - busy_pct - waits_pct),
    )


def micro_batches(e: Evidence) -> Finding | None:
    """Micro-batches where the GPU's memory would hold larger ones: of a, a' remain, and T' = T - (a - a')·fixed."""
    fixed, step = fixed_ms(e), e.typical
    if e.accumulate == 1 or fixed is None or not e.peak_memory_mib or not e.gpu_memory_mib:
        return None
    fewer = max(1, math.ceil(e.accumulate * e.peak_memory_mib / (FITS * e.gpu_memory_mib)))
    if fewer >= e.accumulate:
        return None
    return Finding(
        "memory unused",
        f"a batch is cut into {e.accumulate} micro-batches, yet only {e.peak_memory_mib:,.0f} of "
        f"{e.gpu_memory_mib:,.0f} MiB of the GPU's memory are used",
        f"--set optim.accumulate={fewer}",
        gain_pct(step.step_ms, step.step_ms - (e.accumulate - fewer) * fixed[0]),
    )


def teacher(e: Evidence) -> Finding | None:
    """A teacher that takes longer than all of the student's own work. Logits that were kept would save it: T' = T - teacher."""
    step = e.typical
    if step.teacher_ms <= e.compute_ms - step.teacher_ms:
        return None
    cheaper = "--set precision=bf16, " if e.precision == "fp32" and e.gpus else ""
    return Finding(
        "teacher-bound",
        f"the teacher takes {step.teacher_ms:.1f} of a step's {step.step_ms:.1f} ms, more than the student's forward and "
        "backward together",
        f"{cheaper}a smaller teacher (--set teacher.model=…), or logits computed once; raydistill keeps none yet",
        gain_pct(step.step_ms, step.step_ms - step.teacher_ms),
    )
