"""The causes of lost time: one row per cause, with its condition, what a step saves without it, and its texts.

Gains follow from the effects, see `step_model`. Causes that need more than a row are functions, see `RULES`.
"""

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from service.doctor import launches, over_time, straggler
from service.doctor.evidence import MIN_GAIN_PCT, Evidence
from service.doctor.step_model import Cause, Effect, Finding, late_ms, ranked, slowest_part_ms

BUSY_PCT = 85.0
"""If a node's cores are busier than this, it has none for more threads."""
MAX_THREADS, MAX_PREFETCH = 32, 16
MAX_SLOWDOWN = 1.02
"""The fewest loader threads are proposed whose step takes at most this many times as long as the fastest."""


class Row(NamedTuple):
    """A cause, defined by functions of the evidence."""

    name: str
    applies: Callable[[Evidence], bool]
    effect: Callable[[Evidence], Effect]
    sentence: Callable[[Evidence], str]
    change: Callable[[Evidence], str]

    def cause(self, e: Evidence) -> Cause | None:
        return Cause(self.name, self.sentence(e), self.change(e), self.effect(e)) if self.applies(e) else None


def findings(e: Evidence) -> list[Finding]:
    """Return the findings of a run, largest gain first."""
    e = over_time.as_in_last_third(e)
    return ranked(e, causes(e))


def causes(e: Evidence) -> list[Cause]:
    """Return all causes that apply, whatever their gain."""
    return [cause for rule in (*(row.cause for row in ROWS), *RULES) if (cause := rule(e)) is not None]


# Images


def prefetch_threads(e: Evidence) -> int:
    """Return the fewest loader threads whose step is nearly as fast as with the best number."""
    took_ms = {threads: slowest_part_ms(e, Effect(threads=threads)) for threads in range(1, MAX_THREADS + 1)}
    return min(threads for threads, ms in took_ms.items() if ms <= MAX_SLOWDOWN * min(took_ms.values()))


def supplied(e: Evidence, image_ms: float) -> Effect:
    """Return the effect of loader threads that take `image_ms` less per image. Waits for late batches shrink in proportion."""
    share, batch_ms = image_ms / e.loader.image_ms, e.typical.loader_batch_ms
    loading_ms = e.supply_ms if batch_ms is None else min(e.supply_ms, batch_ms)  # without threads, supply is more than loading
    return Effect(supply_ms=share * loading_ms, beyond_ms=share * late_ms(e))


def is_loading(e: Evidence) -> bool:
    """Whether the loader threads' time is recorded, and explains the wait for images."""
    return e.loader.is_recorded and not e.is_late


def wait_text(e: Evidence) -> str:
    """Say how long a step waits for images, or if it does not, how long the loader takes for a batch."""
    if e.waits_for_data:
        return f"{e.data_wait_ms:.1f} of a step's {e.step_ms:.1f} ms wait for images"
    return f"a batch takes the loader {e.supply_ms:.1f} of a step's {e.step_ms:.1f} ms"


def thread_text(e: Evidence, ms: float, what: str) -> str:
    return f"{wait_text(e)}: a loader thread takes {e.loader.image_ms:.2f} ms per image, {ms:.2f} of it {what}"


def more_threads(e: Evidence, max_threads: int = MAX_THREADS) -> str:
    """Propose enough loader workers that a step does not wait."""
    threads = min(max_threads, math.ceil(max(1, e.loader_workers) * e.step_ms / max(e.work_ms, 1e-9)))
    return f"--set data.loader_workers={max(threads, e.loader_workers + 1)}"


def faster_decoding(e: Evidence) -> str:
    """Propose more threads if there are cores for them, and cheaper images."""
    cheaper = "cheaper images (distill pack --max-side or --raw)"
    max_threads = int(e.cores / e.num_workers) if e.cores else MAX_THREADS  # decoding threads need a core each
    crowded = e.cores_busy_pct >= BUSY_PCT or e.loader.core_wait_ms > e.loader.cpu_ms or max_threads <= e.loader_workers
    return f"{cheaper}: cores are {e.cores_busy_pct:.0f}% busy" if crowded else f"{more_threads(e, max_threads)}, or {cheaper}"


def decoding(e: Evidence) -> str:
    waits_ms = e.loader.core_wait_ms
    waits = f", {waits_ms:.2f} waiting for a free core" if waits_ms > 0.1 * e.loader.image_ms else ""
    return thread_text(e, e.loader.decode_ms, f"decoding{waits}")


def swapping(e: Evidence) -> str:
    waits = f" (a loader thread {e.loader.blocked_ms:.2f} ms per image)" if e.loader.is_recorded else ""
    return f"{wait_text(e)}{waits} while the node reads {e.swap_mib_per_s:.0f} MiB/s from swap space: its memory is full"


def more_prefetch(e: Evidence) -> str:
    ahead = min(MAX_PREFETCH, 4 * e.prefetch_batches)
    prefetch = f"--set data.prefetch_batches={ahead}, and " if ahead > e.prefetch_batches else ""
    return f"{prefetch}see what else uses the disk, the network and the cores at such times"


def supply_is_all(e: Evidence) -> Effect:
    return Effect(supply_ms=e.supply_ms, beyond_ms=late_ms(e))


# Ranks, pipeline stages, teacher


def uneven_ms(e: Evidence) -> float:
    """Return how long even the rank that waits least waits for others, or 0 if that is within the noise."""
    known = [(rank.waits_for_ranks_ms, rank.allreduce_wait_error_ms or 0.0) for rank in e.ranks]
    waits_ms, error_ms = min(((ms, error_ms) for ms, error_ms in known if ms is not None), default=(0.0, 0.0))
    return waits_ms if waits_ms >= straggler.MIN_STANDARD_ERRORS * error_ms else 0.0


def fewer_all_reduces(e: Evidence) -> str:
    larger = f"--set data.global_batch_size={2 * e.global_batch} for fewer of them, " if launches.max_times(e) >= 2 else ""
    return f"{larger}fewer nodes, or a faster network (NCCL_DEBUG=INFO says which one is used)"


def bubble_ms(e: Evidence) -> float:
    """Return how long every stage waits: (p - 1)·W/m for m micro-batches of work W in p stages (Huang et al. 2019, GPipe)."""
    return min(rank.bubble_ms + rank.receive_ms for rank in e.ranks)


def by_stage_ms(e: Evidence) -> list[float]:
    """Return each pipeline stage's computing time per step."""
    return [fmean(map(e.computing_ms, e.ranks[stage :: e.pipeline_stages])) for stage in range(e.pipeline_stages)]


def uneven_stages(e: Evidence) -> str:
    own_ms = by_stage_ms(e)
    return f"stage {own_ms.index(max(own_ms))} computes {max(own_ms):.1f} ms of a step, the mean stage {fmean(own_ms):.1f}"


def cheaper_teacher(e: Evidence) -> str:
    bf16 = "--set precision=bf16, " if e.precision == "fp32" and e.gpus else ""
    cache = "--set teacher.cache=FOLDER (shared by all nodes), which keeps its outputs for all epochs, trials and later runs"
    rest_ms = e.step_ms - e.typical.teacher_ms
    actors = enough_actors(e.num_workers * e.typical.teacher_ms, rest_ms)
    service = f"for several students side by side (sweep.max_concurrent), --set teacher.service={actors}, which computes it once"
    return f"{bf16}a smaller teacher (--set teacher.model=…), or {cache}; or, {service} for all of them"


def enough_actors(teacher_ms: float, rest_ms: float) -> int:
    """Return the fewest actors that compute a step's requests within the rest of the step."""
    return max(1, math.ceil(teacher_ms / max(rest_ms, 1e-9) - 1e-9))


def actors_for_no_wait(e: Evidence) -> int:
    """Return how many actors avoid waits. The present m are always busy, so a step's requests take m·T of actor time."""
    return enough_actors((e.teacher_actors or 1) * e.step_ms, e.step_ms - e.service_ms)


def without_service_wait(e: Evidence) -> Effect:
    served_ms = (e.teacher_actors or 1) * e.step_ms / actors_for_no_wait(e)
    return Effect(work_ms=e.step_ms - max(e.step_ms - e.service_ms, served_ms))


def more_actors(e: Evidence) -> str:
    cache = "or, where images repeat or runs follow, --set teacher.cache=FOLDER instead"
    return f"--set teacher.service={actors_for_no_wait(e)}; {cache}"


# Between steps


def evaluate_every(e: Evidence) -> int:
    """Return the factor by which evaluations must be rarer to take at most 5% of an epoch, within the run's epochs."""
    every = max(2, math.ceil(e.eval_s / (MIN_GAIN_PCT / 100 * e.epoch_steps_s)))
    return every if e.num_epochs is None else min(every, max(1, e.num_epochs // e.evaluate_every))


def evaluation_forward_s(e: Evidence) -> float:
    """Return the time of the student's forward on the validation images."""
    return e.val_images / e.num_workers * e.typical.student_ms / e.rank_batch / 1e3


def evaluating(e: Evidence) -> str:
    forward = f"the student's forward on them takes {evaluation_forward_s(e):.1f} s"
    return f"evaluating {e.val_images:,.0f} images takes {e.eval_s:.1f} s, an epoch's steps {e.epoch_steps_s:.1f} s; {forward}"


def fewer_evaluations(e: Evidence) -> str:
    faster = f", or load its images faster: --set data.loader_workers={2 * max(1, e.loader_workers)}, or distill pack"
    is_loading_slow = evaluation_forward_s(e) <= 0.5 * e.eval_s
    return f"--set train.evaluate_every={evaluate_every(e) * e.evaluate_every}{faster if is_loading_slow else ''}"


def outside(e: Evidence, seconds: float) -> Effect:
    """Return the effect of saving this many seconds of the run outside its steps."""
    return Effect(outside_ms=e.step_ms * seconds / e.clock.train_s)


ROWS = (
    Row(
        "no prefetch",
        lambda e: not e.loader_workers and e.typical.data_ms > 0,
        lambda e: Effect(threads=prefetch_threads(e)),
        lambda e: f"each step first loads its own images for {e.typical.data_ms:.1f} of its {e.step_ms:.1f} ms",
        lambda e: f"--set data.loader_workers={prefetch_threads(e)}",
    ),
    Row(
        "storage-bound",
        lambda e: is_loading(e) and not e.swaps,
        lambda e: supplied(e, e.loader.storage_ms),
        lambda e: thread_text(e, e.loader.storage_ms, "waiting for the disk or the network"),
        lambda e: f"distill pack, --set data.stage=ram, or read more at a time: {more_threads(e)}",
    ),
    Row("decode-bound", is_loading, lambda e: supplied(e, e.loader.decode_ms), decoding, faster_decoding),
    Row(
        "GIL-bound",
        lambda e: is_loading(e) and not e.swaps,
        lambda e: supplied(e, e.loader.lock_ms),
        lambda e: thread_text(e, e.loader.lock_ms, "waiting for Python's lock (GIL), which a worker's threads share"),
        lambda e: "fewer loader workers, less Python per image (distill pack --raw), or more workers where cores are free",
    ),
    Row(
        "swapping",
        lambda e: e.swaps,
        lambda e: supplied(e, e.loader.blocked_ms) if e.loader.is_recorded else supply_is_all(e),
        swapping,
        lambda e: "free memory: fewer data.loader_workers, data.stage=none, or other programs there (free -h)",
    ),
    Row(
        "late batches",
        lambda e: e.is_late,
        lambda e: Effect(beyond_ms=late_ms(e)),
        lambda e: f"{wait_text(e)}, though the loader needs {e.supply_ms:.1f} ms for a batch on average: some come late",
        more_prefetch,
    ),
    Row(
        "data-bound",
        lambda e: not e.loader.is_recorded and e.loader_workers > 0 and not e.is_late and not e.swaps,
        supply_is_all,
        lambda e: f"{wait_text(e)}; {'no record shows' if e.has_ended else 'the end of the run will show'} what the loader does",
        lambda e: f"run distill doctor {'on a new run' if e.has_ended else 'then'} (a short one: --set train.max_steps=100)",
    ),
    Row(
        "copy-bound",
        lambda e: True,
        lambda e: Effect(copy_ms=e.copy_ms) if e.on_gpu else Effect(work_ms=e.typical.h2d_ms),
        lambda e: (
            f"{e.typical.h2d_ms:.1f} of a step's {e.step_ms:.1f} ms wait for "
            f"{'images that the GPU decodes' if e.decodes_on_device else 'the copy of the batch to the device'}"
        ),
        lambda e: (
            "--set data.decoder=auto, which decodes on the CPU, or distill pack --raw"
            if e.decodes_on_device
            else "check the GPU's PCIe link (nvidia-smi -q -d PCIE) and who else copies there, or lower data.image_size"
        ),
    ),
    Row(
        "uneven ranks",
        lambda e: uneven_ms(e) > 0,
        lambda e: Effect(beyond_ms=uneven_ms(e)),
        lambda e: f"ranks are late in turn: each waits at least {uneven_ms(e):.1f} of a step's {e.step_ms:.1f} ms for others",
        lambda e: (
            "leave each worker its cores (--set scale.cpus_per_worker=…, fewer data.loader_workers); see how phase/data_ms varies"
        ),
    ),
    Row(
        "all-reduce-bound",
        lambda e: bool(e.exposed_ms),
        lambda e: Effect(work_ms=e.exposed_ms or 0.0),
        lambda e: f"on every rank {e.exposed_ms:.1f} of a step's {e.step_ms:.1f} ms wait for the gradients' all-reduce",
        fewer_all_reduces,
    ),
    Row(
        "pipeline bubble",
        lambda e: e.pipeline_stages > 1 and e.micro_batch > 1,
        lambda e: Effect(beyond_ms=bubble_ms(e) / 2),
        lambda e: f"every pipeline stage waits for others, at least {bubble_ms(e):.1f} of a step's {e.step_ms:.1f} ms",
        lambda e: f"more and smaller micro-batches: --set scale.micro_batches={2 * e.micro_batches}; or fewer stages",
    ),
    Row(
        "uneven pipeline stages",
        lambda e: e.pipeline_stages > 1 and not e.num_workers % e.pipeline_stages,
        lambda e: Effect(work_ms=max(by_stage_ms(e)) - fmean(by_stage_ms(e))),
        uneven_stages,
        lambda e: "cut the model elsewhere (scale.cut; `distill split` shows where)",
    ),
    Row(
        "teacher-bound",
        lambda e: e.teacher_actors is None and e.typical.teacher_ms > e.compute_ms - e.typical.teacher_ms,
        lambda e: Effect(work_ms=e.typical.teacher_ms),
        lambda e: f"the teacher takes {e.typical.teacher_ms:.1f} of a step's {e.step_ms:.1f} ms, more than the student's passes",
        cheaper_teacher,
    ),
    Row(
        "service-bound",
        lambda e: e.service_ms > 0,
        without_service_wait,
        lambda e: f"a step waits {e.service_ms:.1f} of its {e.step_ms:.1f} ms for the teacher's service",
        more_actors,
    ),
    Row(
        "evaluation",
        lambda e: e.eval_s > 0 and bool(e.steps_per_epoch),
        lambda e: Effect(outside_ms=e.step_ms * e.eval_s / e.epoch_steps_s * (1 - 1 / evaluate_every(e))),
        evaluating,
        fewer_evaluations,
    ),
    Row(
        "checkpoints",
        lambda e: e.clock.train_s > 0,
        lambda e: outside(e, e.clock.checkpoint_s),
        lambda e: f"checkpoints take {e.clock.checkpoint_s:.1f} of {e.clock.wall_s:.1f} s",
        lambda e: "--set train.checkpoint_every to more steps, where an epoch has several, or a runs' folder on a faster disk",
    ),
    Row(
        "between epochs",
        lambda e: e.clock.train_s > 0,
        lambda e: outside(e, e.clock.other_s),
        lambda e: f"reports and checks between epochs take {e.clock.other_s:.1f} of {e.clock.wall_s:.1f} s",
        lambda e: "more steps per epoch (a smaller batch), or fewer workers: each epoch costs a start and an end",
    ),
)
RULES = (straggler.straggler, launches.launch_bound, over_time.thermal_throttling, over_time.slowdown)
