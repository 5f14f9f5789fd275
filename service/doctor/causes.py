"""The causes of lost time: under which condition each applies, its evidence in words, what to change, and what a step saves.

Gains follow from the effects, see `step_model`.
"""

import math
from collections.abc import Iterator
from statistics import fmean

from service.doctor import launches, over_time, straggler
from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.step_model import Cause, Effect, Finding, late_ms, ranked, slowest_part_ms

BUSY_PCT = 85.0  # a node whose cores are busier has none for more threads
MAX_THREADS, MAX_PREFETCH = 32, 16
MAX_SLOWDOWN = 1.02  # the fewest loader threads are proposed whose step is slower than the fastest by at most this factor


def findings(e: Evidence) -> list[Finding]:
    """Return the findings of a run, largest gain first."""
    e = over_time.as_in_last_third(e)
    return ranked(e, causes(e))


def causes(e: Evidence) -> list[Cause]:
    """Return all causes that apply, whatever their gain."""
    computing = [cause for cause in (straggler.straggler(e), launches.launch_bound(e)) if cause is not None]
    return [*loading(e), *waiting(e), *between_steps(e), *computing, *over_time.slower_over_time(e)]


def loading(e: Evidence) -> Iterator[Cause]:
    """Yield what delays the images of a step."""
    loader, step = e.loader, f"of a step's {e.step_ms:.1f} ms"
    supply = Effect(supply_ms=e.supply_ms, beyond_ms=late_ms(e))
    if e.waits_for_data:
        wait = f"{e.data_wait_ms:.1f} {step} wait for images"
    else:
        wait = f"a batch takes the loader {e.supply_ms:.1f} {step}"
    is_loading = loader.is_recorded and not e.is_late  # the threads' time explains the wait
    thread = f"{wait}: a loader thread takes {loader.image_ms:.2f} ms per image"
    if not e.loader_workers and e.typical.data_ms > 0:
        threads = prefetch_threads(e)
        yield Cause(
            "no prefetch",
            f"each step first loads its own images for {e.typical.data_ms:.1f} of its {e.step_ms:.1f} ms",
            f"--set data.loader_workers={threads}",
            Effect(threads=threads),
        )
    if is_loading and not e.swaps:
        yield Cause(
            "storage-bound",
            f"{thread}, {loader.storage_ms:.2f} of it waiting for the disk or the network",
            f"distill pack, --set data.stage=ram, or read more at a time: {more_threads(e, MAX_THREADS)}",
            supplied(e, loader.storage_ms),
        )
    if is_loading:
        waits_ms, cheaper = loader.core_wait_ms, "cheaper images (distill pack --max-side or --raw)"
        max_threads = int(e.cores / e.num_workers) if e.cores else MAX_THREADS  # decoding threads need a core each
        is_crowded = e.cores_busy_pct >= BUSY_PCT or waits_ms > loader.cpu_ms or max_threads <= e.loader_workers
        waits = f", {waits_ms:.2f} waiting for a free core" if waits_ms > 0.1 * loader.image_ms else ""
        yield Cause(
            "decode-bound",
            f"{thread}, {loader.decode_ms:.2f} of it decoding{waits}",
            f"{cheaper}: cores are {e.cores_busy_pct:.0f}% busy"
            if is_crowded
            else f"{more_threads(e, max_threads)}, or {cheaper}",
            supplied(e, loader.decode_ms),
        )
    if is_loading and not e.swaps:
        yield Cause(
            "GIL-bound",
            f"{thread}, {loader.lock_ms:.2f} of it waiting for Python's lock (GIL), which a worker's threads share",
            "fewer loader workers, less Python per image (distill pack --raw), or more workers where cores are free",
            supplied(e, loader.lock_ms),
        )
    if e.swaps:
        blocked = f" (a loader thread {loader.blocked_ms:.2f} ms per image)" if loader.is_recorded else ""
        yield Cause(
            "swapping",
            f"{wait}{blocked} while the node reads {e.swap_mib_per_s:.0f} MiB/s from swap space: its memory is full",
            "free memory: fewer data.loader_workers, data.stage=none, or other programs there (free -h)",
            supplied(e, loader.blocked_ms) if loader.is_recorded else supply,
        )
    if e.is_late:
        ahead = min(MAX_PREFETCH, 4 * e.prefetch_batches)
        prefetch = f"--set data.prefetch_batches={ahead}, and " if ahead > e.prefetch_batches else ""
        yield Cause(
            "late batches",
            f"{wait}, though the loader needs {e.supply_ms:.1f} ms for a batch on average: some come late",
            f"{prefetch}see what else uses the disk, the network and the cores at such times",
            Effect(beyond_ms=late_ms(e)),
        )
    if not loader.is_recorded and e.loader_workers > 0 and not e.is_late and not e.swaps:
        yield Cause(
            "data-bound",
            f"{wait}; what the loader does is recorded at the end of a run",
            "run distill doctor then, or on a short run (--set train.max_steps=100)",
            supply,
        )
    on_device = e.decodes_on_device
    yield Cause(
        "copy-bound",
        f"{e.typical.h2d_ms:.1f} {step} wait for "
        f"{'images that the GPU decodes' if on_device else 'the copy of the batch to the device'}",
        "--set data.decoder=auto, which decodes on the CPU, or distill pack --raw"
        if on_device
        else "check the GPU's PCIe link (nvidia-smi -q -d PCIE) and who else copies there, or lower data.image_size",
        Effect(copy_ms=e.copy_ms) if e.on_gpu else Effect(work_ms=e.typical.h2d_ms),
    )


def prefetch_threads(e: Evidence) -> int:
    """Return the fewest loader threads whose step is nearly as fast as with the best number."""
    took_ms = {threads: slowest_part_ms(e, Effect(threads=threads)) for threads in range(1, MAX_THREADS + 1)}
    return min(threads for threads, ms in took_ms.items() if ms <= MAX_SLOWDOWN * min(took_ms.values()))


def supplied(e: Evidence, image_ms: float) -> Effect:
    """Return the effect of loader threads that take `image_ms` less per image. Waits for late batches shrink in proportion."""
    share, batch_ms = image_ms / e.loader.image_ms, e.typical.loader_batch_ms
    loading_ms = e.supply_ms if batch_ms is None else min(e.supply_ms, batch_ms)  # without threads, supply is more than loading
    return Effect(supply_ms=share * loading_ms, beyond_ms=share * late_ms(e))


def more_threads(e: Evidence, max_threads: int) -> str:
    """Propose enough loader workers that a step does not wait."""
    threads = min(max_threads, math.ceil(max(1, e.loader_workers) * e.step_ms / max(e.work_ms, 1e-9)))
    return f"--set data.loader_workers={max(threads, e.loader_workers + 1)}"


def waiting(e: Evidence) -> Iterator[Cause]:
    """Yield what a step waits for once it has its images: other ranks, pipeline stages, the teacher."""
    step, step_ms = f"of a step's {e.step_ms:.1f} ms", e.step_ms
    least_ms, error_ms = min((rank.waits_for_ranks_ms, rank.allreduce_wait_error_ms) for rank in e.ranks)
    if least_ms > 0 and least_ms >= straggler.MIN_STANDARD_ERRORS * error_ms:
        yield Cause(
            "uneven ranks",
            f"ranks are late in turn: each waits at least {least_ms:.1f} {step} for others",
            "leave each worker its cores (--set scale.cpus_per_worker=…, fewer data.loader_workers); see how phase/data_ms "
            "varies",
            Effect(beyond_ms=least_ms),
        )
    if e.exposed_ms:
        is_possible = launches.max_times(e) >= 2
        larger = f"--set data.global_batch_size={2 * e.global_batch} for fewer of them, " if is_possible else ""
        yield Cause(
            "all-reduce-bound",
            f"on every rank {e.exposed_ms:.1f} {step} wait for the gradients' all-reduce",
            f"{larger}fewer nodes, or a faster network (NCCL_DEBUG=INFO says which one is used)",
            Effect(work_ms=e.exposed_ms),
        )
    if e.pipeline_stages > 1 and e.micro_batch > 1:
        # (p - 1)·W/m for m micro-batches of work W in p stages (Huang et al. 2019, GPipe): twice as many halve it
        bubble_ms = min(rank.bubble_ms + rank.receive_ms for rank in e.ranks)
        yield Cause(
            "pipeline bubble",
            f"every pipeline stage waits for others, at least {bubble_ms:.1f} {step}",
            f"more and smaller micro-batches: --set scale.micro_batches={2 * e.micro_batches}; or fewer stages",
            Effect(beyond_ms=bubble_ms / 2),
        )
    if e.pipeline_stages > 1 and not e.num_workers % e.pipeline_stages:
        own_ms = [fmean(map(e.computing_ms, e.ranks[stage :: e.pipeline_stages])) for stage in range(e.pipeline_stages)]
        most_ms, mean_ms = max(own_ms), fmean(own_ms)
        yield Cause(
            "uneven pipeline stages",
            f"stage {own_ms.index(most_ms)} computes {most_ms:.1f} ms of a step, the mean stage {mean_ms:.1f}",
            "cut the model elsewhere (scale.cut; `distill split` shows where)",
            Effect(work_ms=most_ms - mean_ms),
        )
    teacher_ms = e.typical.teacher_ms
    if e.teacher_actors is None and teacher_ms > e.compute_ms - teacher_ms:
        actors = enough_actors(e.num_workers * teacher_ms, step_ms - teacher_ms)
        bf16 = "--set precision=bf16, " if e.precision == "fp32" and e.gpus else ""
        yield Cause(
            "teacher-bound",
            f"the teacher takes {teacher_ms:.1f} {step}, more than the student's passes",
            f"{bf16}a smaller teacher (--set teacher.model=…), or --set teacher.cache=FOLDER (shared by all nodes), which keeps "
            "its outputs for all epochs, trials and later runs; or, for several students side by side (sweep.max_concurrent), "
            f"--set teacher.service={actors}, which computes it once for all of them",
            Effect(work_ms=teacher_ms),
        )
    if e.service_ms > 0:
        busy_ms = (e.teacher_actors or 1) * step_ms  # of actors that always compute
        actors = enough_actors(busy_ms, step_ms - e.service_ms)
        yield Cause(
            "service-bound",
            f"a step waits {e.service_ms:.1f} of its {step_ms:.1f} ms for the teacher's service",
            f"--set teacher.service={actors}; or, where images repeat or runs follow, --set teacher.cache=FOLDER instead",
            Effect(work_ms=step_ms - max(step_ms - e.service_ms, busy_ms / actors)),
        )


def enough_actors(teacher_ms: float, rest_ms: float) -> int:
    """Return the fewest actors that compute a step's requests within the rest of the step."""
    return max(1, math.ceil(teacher_ms / max(rest_ms, 1e-9) - 1e-9))


def between_steps(e: Evidence) -> Iterator[Cause]:
    """Yield what takes time between steps."""
    if e.eval_s > 0 and e.steps_per_epoch:
        steps_s = e.steps_per_epoch * e.step_ms / 1e3
        # at most 5% of an epoch, within the run's epochs
        every = max(2, math.ceil(e.eval_s / (MIN_GAIN_PCT / 100 * steps_s)))
        if e.num_epochs is not None:
            every = min(every, max(1, e.num_epochs // e.evaluate_every))
        forward_s = e.val_images / e.num_workers * e.typical.student_ms / e.rank_batch / 1e3
        faster = f", or load its images faster: --set data.loader_workers={2 * max(1, e.loader_workers)}, or distill pack"
        yield Cause(
            "evaluation",
            f"evaluating {e.val_images:,.0f} images takes {e.eval_s:.1f} s, an epoch's steps {steps_s:.1f} s; "
            f"the student's forward on them takes {forward_s:.1f} s",
            f"--set train.evaluate_every={every * e.evaluate_every}{faster if forward_s <= 0.5 * e.eval_s else ''}",
            Effect(outside_ms=e.step_ms * e.eval_s / steps_s * (1 - 1 / every)),
        )
    clock = e.clock
    if clock.train_s > 0:
        yield Cause(
            "checkpoints",
            f"checkpoints take {clock.checkpoint_s:.1f} of {clock.wall_s:.1f} s",
            "--set train.checkpoint_every to more steps, where an epoch has several, or a runs' folder on a faster disk",
            Effect(outside_ms=e.step_ms * clock.checkpoint_s / clock.train_s),
        )
        yield Cause(
            "between epochs",
            f"reports and checks between epochs take {clock.other_s:.1f} of {clock.wall_s:.1f} s",
            "more steps per epoch (a smaller batch), or fewer workers: each epoch costs a start and an end",
            Effect(outside_ms=e.step_ms * clock.other_s / clock.train_s),
        )
