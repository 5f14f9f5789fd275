"""What a step computes: too little at a time, with a teacher that outweighs its student, or on cores that others use."""

import math
from collections.abc import Mapping
from statistics import fmean, median_low

from service.doctor.evidence import LEAST_PCT, Evidence
from service.doctor.step_model import Cause, Effect
from service.doctor.teacher_service import advice

FITS = 0.9
"""Share of a GPU's memory that a larger batch may take."""
MOST_TIMES = 64
"""How many times larger a batch may be proposed to be."""
NEARLY = 0.97
"""Of the most that a larger batch saves this part is enough: a batch no larger than that is proposed."""
GRAPHS = ("reduce-overhead", "max-autotune")
"""The values of `train.compile` with which models are launched as CUDA graphs."""
COMPILE = "--set train.compile=reduce-overhead, which launches models as CUDA graphs"
OFTEN = 0.1
"""Other programs that have less of the cores than this part are not reported."""


def most_times(e: Evidence) -> float:
    """How many times as large a batch may be: by the number of training images, and by the GPUs' memory."""
    most = min(float(MOST_TIMES), room_in_memory(e))
    if e.train_images is not None:
        most = min(most, e.train_images / e.global_batch)
    if e.out_of_memory_images is not None:
        most = min(most, e.out_of_memory_images / e.micro_batch / 2)
    return most


def launch_bound(e: Evidence) -> Cause | None:
    """A batch so small that what a step costs anyway is much of it. On a GPU see `idle_gpu`."""
    if e.on_gpu:
        return idle_gpu(e)
    saved_ms = {times: saved for times in timed_times(e) if (saved := with_larger_batch_ms(e, times)) is not None}
    if not saved_ms:
        return None
    times = least_that_saves(saved_ms)
    data_ms = e.typical.data_ms
    fixed_supply_ms = max(0.0, data_ms - (e.typical.loader_batch_ms or data_ms)) if e.in_series else 0.0
    return Cause(
        "launch-bound",
        f"{saved_ms[times]:.1f} of a step's {e.typical.step_ms:.1f} ms are not needed for the same images in a larger batch: "
        f"{e.rank_batch:g} images a worker are too few",
        larger(times * e.global_batch),
        Effect(
            work_ms=saved_ms[times] + fewer_all_reduces_ms(e, saved_ms[times], times),
            supply_ms=fixed_supply_ms * (1 - 1 / times),
            cpu_ms=e.cpu_of(saved_ms[times]),
        ),
    )


def timed_times(e: Evidence) -> list[int]:
    """How many times as large micro-batches were timed, of those that are possible."""
    found = (images // e.micro_batch for images in sorted(e.passes_ms) if images % e.micro_batch == 0)
    return [times for times in found if 2 <= times <= most_times(e)]


def least_that_saves(saved_ms: Mapping[int, float]) -> int:
    """The least batch that saves nearly as much as any."""
    most_ms = max(saved_ms.values())
    return min(times for times, saved in saved_ms.items() if saved >= NEARLY * most_ms)


def with_larger_batch_ms(e: Evidence, times: int) -> float | None:
    """What a step of a CPU has less to do for the same images in a batch so many times as large; None: unknown.

    What its passes take was timed on both batches. The optimizer takes as long for any batch, and is needed for one in `times`
    steps. So does handing out a batch, and what a step computes beyond its passes, as far as both are no more than launching the
    passes takes, or twice that under DDP, whose hooks are as many: cores and memory that others use make every image slower.
    """
    now_ms, larger_ms = e.passes_ms.get(e.micro_batch), e.passes_ms.get(times * e.micro_batch)
    if not now_ms or not larger_ms:
        return None
    step, images_ms = e.typical, e.compute_ms + e.typical.augment_ms
    passes_ms = min(images_ms, e.accumulate * now_ms)
    launching_ms = e.accumulate * (e.one_image_ms or 0.0) * (2 if e.num_workers > 1 else 1)
    rest_ms = median_low(rank.rest_ms for rank in e.ranks)
    fixed_ms = min(images_ms - passes_ms + e.handling_ms(step), launching_ms) + step.optimizer_ms + rest_ms
    return max(0.0, passes_ms - e.accumulate * larger_ms / times) + fixed_ms * (1 - 1 / times)


def larger(global_batch: int) -> str:
    """How to train with a larger batch."""
    return f"--set data.global_batch_size={global_batch} (with --set optim.lr_scaling=linear; an epoch has fewer steps)"


def gpus_busy_pct(e: Evidence) -> float | None:
    """How much of the training's time the GPUs are busy, in its last third where epochs are recorded; None: unknown."""
    uses = [gpu for epoch in e.epochs[-max(1, len(e.epochs) // 3) :] for gpu in epoch.gpus] or list(e.gpus)
    known = [gpu.util_pct for gpu in uses if gpu.util_pct is not None]
    return fmean(known) if known else None


def idle_gpu(e: Evidence) -> Cause | None:
    """GPUs that no kernel runs on while the step waits for nothing: they wait for the host.

    A GPU works while the host launches what comes next, T = max(launching, kernels). A batch k times as large is launched once
    where k were: T' = max(launching/k, kernels), the kernels' time being the GPUs' busy share of T. Where passes on larger
    batches were timed, T' is by those.

    Where a single image takes half as long as the batch, launching is the longer one: a batch cut into micro-batches that would
    fit into memory as one is fixed first, then comes a larger batch, and where none is possible torch.compile.
    Where a single image is much faster, or models are launched as CUDA graphs, something else delays the host.
    """
    busy, idle = gpus_busy_pct(e), idle_share(e)
    if busy is None or idle is None:
        return None
    computing_ms = e.work_ms - (e.exposed_ms or 0.0) - e.service_ms
    idle_ms, step_ms = idle * computing_ms, e.typical.step_ms
    waiting = f"GPUs are busy {busy:.0f}% of the time, and wait for the host for {idle_ms:.1f} of a step's {step_ms:.1f} ms"
    if e.compile in GRAPHS or (e.one_image_ms is not None and e.accumulate * e.one_image_ms < 0.5 * computing_ms):
        return host_bound(e, waiting, idle_ms)
    if e.accumulate > 1 and (in_memory := room_in_memory(e)) >= 2:
        cut = f"{waiting}, since a batch is cut into {e.accumulate} micro-batches{memory_used(e)}"
        change = f"--set optim.accumulate={math.ceil(e.accumulate / in_memory)}"
        return Cause("memory unused", cut, change, Effect(work_ms=idle_ms))
    few = f"{waiting}: {e.rank_batch:g} images a worker are too few{memory_used(e)}"
    if (room := most_times(e)) < 2:
        return Cause("launch-bound", few, fewer_launches(e), Effect(work_ms=idle_ms))
    times, saved_ms = gpu_times(e, idle, computing_ms, room)
    effect = Effect(work_ms=saved_ms + fewer_all_reduces_ms(e, saved_ms, times))
    same_batch = f"; or, with this batch, {COMPILE}" if e.pipeline_stages == 1 else ""
    return Cause("launch-bound", few, larger(times * e.global_batch) + same_batch, effect)


def host_bound(e: Evidence, waiting: str, idle_ms: float) -> Cause:
    """A host that could launch faster than it does."""
    could = f"which could launch a step in {e.accumulate * (e.one_image_ms or 0.0):.1f} ms"
    if e.compile in GRAPHS:
        could = "although models are launched as CUDA graphs"
    return Cause(
        "host-bound",
        f"{waiting}, {could}{memory_used(e)}",
        "give each worker its cores (--set scale.cpus_per_worker=…, data.loader=process: threads share Python's lock), "
        "and see what else runs on that node",
        Effect(work_ms=idle_ms),
    )


def memory_used(e: Evidence) -> str:
    """A clause on the GPUs' memory, "" where it is not recorded."""
    if not (e.peak_memory_mib and e.gpu_memory_mib):
        return ""
    return f"; {e.peak_memory_mib:,.0f} of {e.gpu_memory_mib:,.0f} MiB of their memory are used"


def fewer_launches(e: Evidence) -> str:
    """What to change where no larger batch is possible."""
    compiled = f"{COMPILE}; " if e.pipeline_stages == 1 else ""
    less = "--set precision=bf16, whose batches take half the memory; " if e.precision == "fp32" else ""
    several = e.num_workers > 1 and room_in_memory(e) >= 2
    fewer_workers = "fewer workers, each with a larger part of the batch; " if several else ""
    return f"no larger batch is possible: {compiled}{less}{fewer_workers}other runs on the same GPU at the same time"


def gpu_times(e: Evidence, idle: float, computing_ms: float, room: float) -> tuple[int, float]:
    """How many times as large a batch to propose, and what a step saves: by passes timed on larger ones, or by the idle time."""
    now_ms = e.passes_ms.get(e.micro_batch)
    if now_ms and (timed := timed_times(e)):
        saved_ms = {
            times: max(0.0, computing_ms * (1 - e.passes_ms[times * e.micro_batch] / (times * now_ms))) for times in timed
        }
        times = least_that_saves(saved_ms)
        return times, saved_ms[times]
    times = 2
    while 2 * times <= room and times * (1 - idle) < 1:
        times *= 2
    return times, min(idle * computing_ms, computing_ms * (1 - 1 / times))


def idle_share(e: Evidence) -> float | None:
    """The part of what ranks compute in which their GPUs are idle; None: unknown.

    A GPU that waits for other ranks is busy, with NCCL's kernel; one that waits for images or a teacher's service is not.
    """
    busy, step_ms = gpus_busy_pct(e), e.typical.step_ms
    if busy is None:
        return None
    computing_ms = fmean(e.computing_ms(rank) for rank in e.ranks) - e.service_ms
    kernels_ms = busy / 100 * step_ms - fmean(rank.allreduce_wait_ms or 0.0 for rank in e.ranks)
    return min(1.0, max(0.0, 1 - kernels_ms / computing_ms)) if computing_ms > 0 else 0.0


def fewer_all_reduces_ms(e: Evidence, saved_ms: float, times: float) -> float:
    """What a batch so many times as large saves of the all-reduce, where a larger batch is worth it without that."""
    worth_it = 100 * saved_ms >= LEAST_PCT * e.typical.step_ms
    return (e.exposed_ms or 0.0) * (1 - 1 / times) if worth_it else 0.0


def room_in_memory(e: Evidence) -> float:
    """How many times as large a micro-batch fits into the GPUs' memory."""
    if e.peak_memory_mib and e.gpu_memory_mib:
        return FITS * e.gpu_memory_mib / e.peak_memory_mib
    return float(MOST_TIMES)


def teacher_bound(e: Evidence) -> Cause | None:
    """A teacher that takes longer than all of the student's own work. Cached outputs save it: T' = T - teacher."""
    step = e.typical
    if e.teacher_actors is not None or step.teacher_ms <= e.compute_ms - step.teacher_ms:
        return None
    cheaper = "--set precision=bf16, " if e.precision == "fp32" and e.gpus else ""
    return Cause(
        "teacher-bound",
        f"the teacher takes {step.teacher_ms:.1f} of a step's {step.step_ms:.1f} ms, more than the student's forward and "
        "backward together",
        f"{cheaper}a smaller teacher (--set teacher.model=…), or cache its outputs for all epochs, trials "
        f"and runs to come (--set teacher.cache=FOLDER on a file system that all nodes share); or, {advice(e)}",
        Effect(work_ms=step.teacher_ms, cpu_ms=e.cpu_of(step.teacher_ms)),
    )


def busy_cores(e: Evidence) -> Cause | None:
    """Cores that other programs use while steps wait for one. Of that wait, their share of what competes for the cores.

    Where GPUs do the work a step does not wait for a core.
    """
    step_ms = e.typical.step_ms
    if not e.cores or e.others_cpu_ms < OFTEN * e.cores * step_ms:
        return None
    return Cause(
        "busy cores",
        f"every step waits {e.core_wait_ms:.1f} of its {step_ms:.1f} ms for a core, and other programs use "
        f"{100 * e.others_cpu_ms / (e.cores * step_ms):.0f}% of the cores",
        "see what else runs on that node (top), or leave it out",
        Effect(work_ms=e.core_wait_ms * e.others_cpu_ms / e.competing_cpu_ms),
    )
