"""What a step computes: too little at a time, or with a teacher that outweighs its student."""

from __future__ import annotations

import math

from service.doctor.evidence import Evidence, Finding, gain_pct
from service.doctor.serving import advice

FITS = 0.9
"""Share of a GPU's memory that a larger batch may take."""
MOST_TIMES = 64
"""How many times larger a batch may be proposed to be."""


def fixed_ms(e: Evidence) -> float | None:
    """What a step costs however few images it has; None: unknown.

    Of the models' work on b images in a micro-batches the part a·fixed/(a·fixed + b·further), where fixed = one - further, as
    timed on one image and on a few more. A step adds the optimizer and what lies in no phase.
    """
    if e.one_image_ms is None or e.further_image_ms is None:
        return None
    fixed, further = e.accumulate * max(0.0, e.one_image_ms - e.further_image_ms), e.rank_batch * max(0.0, e.further_image_ms)
    share = fixed / (fixed + further) if fixed else 0.0
    return share * e.compute_ms + e.typical.optimizer_ms + e.rest_ms


def launches(e: Evidence) -> Finding | None:
    """A batch so small that what a step costs anyway is much of it. On a GPU see `idle_gpu`.

    A batch k times as large pays the fixed cost once where k steps pay it k times: T'/T = 1 - (fixed/T)·(1 - 1/k). k is the least
    power of 2 that brings the fixed cost below a tenth of the work on the images.
    """
    step, fixed = e.typical, fixed_ms(e)
    if e.on_gpu:
        return idle_gpu(e)
    if fixed is None:
        return None
    images_ms = max(1e-9, e.compute_ms + step.optimizer_ms + e.rest_ms - fixed)
    times = 2
    while times < MOST_TIMES and fixed / times > 0.1 * images_ms:
        times *= 2
    return Finding(
        "launch-bound",
        f"{fixed:.1f} of a step's {step.step_ms:.1f} ms are what any step costs, and {e.rank_batch:g} images a worker are too "
        "few to pay for it",
        larger(times * e.global_batch),
        gain_pct(step.step_ms, step.step_ms - fixed * (1 - 1 / times)),
    )


def larger(global_batch: int) -> str:
    """How to train with a larger batch."""
    return f"--set data.global_batch_size={global_batch} (with --set optim.lr_scaling=linear; an epoch has fewer steps)"


def idle_gpu(e: Evidence) -> Finding | None:
    """GPUs that no kernel runs on while the step waits for nothing: they wait for the host, which launches too little at a time.

    A GPU works while the host launches what comes next, T = max(launching, kernels): only where a single image takes half as
    long as the batch is launching the longer one. T' is the kernels' time: the GPUs' busy share of T, and what T waits for.
    Micro-batches that the memory could hold as one come before a larger batch, which learns differently.
    """
    step = e.typical
    known = [gpu.util_pct for gpu in e.gpus if gpu.util_pct is not None]
    if not known or (e.one_image_ms is not None and e.accumulate * e.one_image_ms < 0.5 * e.compute_ms):
        return None
    busy_pct = sum(known) / len(known)
    waits_pct = 100 * (step.data_ms + step.h2d_ms + e.service_ms + (e.exposed_ms or 0.0)) / step.step_ms
    gain, memory, room = max(0.0, 100 - busy_pct - waits_pct), "", float(MOST_TIMES)
    if e.peak_memory_mib and e.gpu_memory_mib:
        room = FITS * e.gpu_memory_mib / e.peak_memory_mib
        memory = f"; {e.peak_memory_mib:,.0f} of {e.gpu_memory_mib:,.0f} MiB of their memory are used"
    if room < 2:
        return None
    idle = f"GPUs are busy {busy_pct:.0f}% of the time and wait for nothing but the host"
    if e.accumulate > 1:
        fewer = math.ceil(e.accumulate / room)
        cut = f"{idle}, since a batch is cut into {e.accumulate} micro-batches{memory}"
        return Finding("memory unused", cut, f"--set optim.accumulate={fewer}", gain)
    times = 2
    while times < MOST_TIMES and 2 * times <= room and times * busy_pct < 100:
        times *= 2
    few = f"{idle}: {e.rank_batch:g} images a worker are too few{memory}"
    return Finding("launch-bound", few, larger(times * e.global_batch), gain)


def teacher(e: Evidence) -> Finding | None:
    """A teacher that takes longer than all of the student's own work. Logits that are kept save it: T' = T - teacher."""
    step = e.typical
    if e.teacher_actors is not None or step.teacher_ms <= e.compute_ms - step.teacher_ms:
        return None
    cheaper = "--set precision=bf16, " if e.precision == "fp32" and e.gpus else ""
    return Finding(
        "teacher-bound",
        f"the teacher takes {step.teacher_ms:.1f} of a step's {step.step_ms:.1f} ms, more than the student's forward and "
        "backward together",
        f"{cheaper}a smaller teacher (--set teacher.model=…), or, for methods on logits, keep its answers for all epochs, trials "
        f"and runs to come (--set teacher.cache=FOLDER on a file system that all nodes share); or, {advice(e)}",
        gain_pct(step.step_ms, step.step_ms - step.teacher_ms),
    )
