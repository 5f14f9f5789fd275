"""Finds steps whose batch is too small, or whose host is too slow, to keep the device busy."""

import math

from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.step_model import Cause, Effect

MAX_MEMORY_SHARE = 0.9  # of a GPU's memory that a larger batch may take
MAX_TIMES = 64  # largest factor by which a larger batch is proposed
MIN_SHARE_OF_BEST = 0.97  # the smallest batch is proposed that saves at least this share of the best one's saving
GRAPHS = ("reduce-overhead", "max-autotune")  # values of `train.compile` that launch models as CUDA graphs
COMPILE = "--set train.compile=reduce-overhead, which launches models as CUDA graphs"


def room_in_memory(e: Evidence) -> float:
    """Return the factor by which a micro-batch can grow within the GPUs' memory."""
    return MAX_MEMORY_SHARE * e.gpu_memory_mib / e.peak_memory_mib if e.peak_memory_mib and e.gpu_memory_mib else float(MAX_TIMES)


def max_times(e: Evidence) -> float:
    """Return the factor by which the batch can grow, limited by the number of training images and the GPUs' memory."""
    by_images = e.train_images / e.global_batch if e.train_images is not None else math.inf
    by_failure = e.out_of_memory_images / e.micro_batch / 2 if e.out_of_memory_images is not None else math.inf
    return min(MAX_TIMES, room_in_memory(e), by_images, by_failure)


def launch_bound(e: Evidence) -> Cause | None:
    """Find a batch so small that fixed costs dominate the step, or a host that keeps its GPU waiting.

    A GPU works while the host launches the next kernels, so T = max(launching, kernels). A k times larger batch needs 1/k of the
    launches per image: T' = max(launching/k, kernels), with the kernels' time taken as the GPUs' busy share of T. If a single
    image takes less than half as long as the batch, or models are launched as CUDA graphs, something else delays the host.
    """
    computing_ms = e.work_ms - e.exposed_ms - e.service_ms
    idle_ms, few = e.idle_share * computing_ms, f"{e.rank_batch:g} images per worker are too few"
    if e.on_gpu:
        if e.gpus_busy_pct is None:
            return None
        waiting = f"GPUs are {e.gpus_busy_pct:.0f}% busy, and wait for the host for {idle_ms:.1f} of a step's {e.step_ms:.1f} ms"
        memory = ""
        if e.peak_memory_mib and e.gpu_memory_mib:
            memory = f"; {e.peak_memory_mib:,.0f} of {e.gpu_memory_mib:,.0f} MiB of their memory are used"
        is_graph, launch_ms = e.compile in GRAPHS, math.inf if e.one_image_ms is None else e.accumulate * e.one_image_ms
        if is_graph or launch_ms < 0.5 * computing_ms:
            why = (
                "although models are launched as CUDA graphs" if is_graph else f"which could launch a step in {launch_ms:.1f} ms"
            )
            return Cause(
                "host-bound",
                f"{waiting}, {why}{memory}",
                "give each worker its cores (--set scale.cpus_per_worker=…, data.loader=process: threads share Python's lock), "
                "and see what else runs on that node",
                Effect(work_ms=idle_ms),
            )
        if e.accumulate > 1 and (in_memory := room_in_memory(e)) >= 2:
            cut = f"{waiting}, since a batch is cut into {e.accumulate} micro-batches{memory}"
            change = f"--set optim.accumulate={math.ceil(e.accumulate / in_memory)}"
            return Cause("memory unused", cut, change, Effect(work_ms=idle_ms))
        few = f"{waiting}: {few}{memory}"
    compiled = f"{COMPILE}; " if e.on_gpu and e.pipeline_stages == 1 else ""
    if not (saved_ms := saved_by_times_ms(e, computing_ms, idle_ms)):
        bf16 = "--set precision=bf16, whose batches take half the memory; " if e.precision == "fp32" else ""
        change = f"no larger batch is possible: {compiled}{bf16}or other runs on the same GPU at the same time"
        return Cause("launch-bound", few, change, Effect(work_ms=idle_ms)) if e.on_gpu else None
    times = min(times for times, saved in saved_ms.items() if saved >= MIN_SHARE_OF_BEST * max(saved_ms.values()))
    if not e.on_gpu:
        few = f"the same images in a larger batch take {saved_ms[times]:.1f} of a step's {e.step_ms:.1f} ms less: {few}"
    is_worth_it = 100 * saved_ms[times] >= MIN_GAIN_PCT * e.step_ms
    fewer_ms = e.exposed_ms * (1 - 1 / times) if is_worth_it else 0.0  # of the all-reduce
    change = f"--set data.global_batch_size={times * e.global_batch} (with optim.lr_scaling=linear; fewer steps per epoch)"
    change += f"; or, with this batch, {compiled.removesuffix('; ')}" if compiled else ""
    return Cause("launch-bound", few, change, Effect(work_ms=saved_ms[times] + fewer_ms))


def saved_by_times_ms(e: Evidence, computing_ms: float, idle_ms: float) -> dict[int, float]:
    """Return what a step saves per factor of the batch, from passes timed on larger batches, or from the GPUs' idle time.

    A larger batch still needs only one optimizer step, and the time outside all phases only once.
    """
    possible, now_ms = max_times(e), e.passes_ms.get(e.micro_batch)
    found = [images // e.micro_batch for images in e.passes_ms if not images % e.micro_batch]
    if now_ms and (timed := [times for times in sorted(found) if 2 <= times <= possible]):
        passes_ms = min(e.compute_ms + e.typical.augment_ms, e.accumulate * now_ms)
        fixed_ms = e.typical.optimizer_ms + min(rank.rest_ms for rank in e.ranks)
        faster = {times: max(0.0, 1 - e.passes_ms[times * e.micro_batch] / (times * now_ms)) for times in timed}
        return {times: passes_ms * faster[times] + fixed_ms * (1 - 1 / times) for times in timed}
    powers = [2**power for power in range(1, MAX_TIMES.bit_length()) if 2**power <= possible] if e.on_gpu else []
    return {times: min(idle_ms, computing_ms * (1 - 1 / times)) for times in powers}
