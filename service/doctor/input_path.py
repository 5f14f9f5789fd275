"""What a step waits for before it computes: images that are read, decoded and copied."""

import math
from dataclasses import replace

from service.doctor.evidence import Evidence
from service.doctor.step_model import Cause, Effect, late_ms, slowest_part_ms

BUSY_PCT = 85.0
"""A node's cores above this leave no room for more threads."""
MOST_THREADS = 32
SWAPS_MIB_PER_S = 1.0
"""Memory that comes back from swap space faster than this is memory that the training uses."""
MOST_PREFETCH = 16
NEARLY = 1.02
"""Of the least time of a step so much more is as good, with fewer threads."""


def no_prefetch(e: Evidence) -> Cause | None:
    """`data.loader_workers: 0`: nothing is loaded while the step computes.

    n threads load a batch while the step computes, see `with_threads_ms`; n is the least with which a step is nearly as fast as
    with any number on these cores.
    """
    step = e.typical
    if e.loader_workers or not step.data_ms:
        return None
    took_ms = {threads: slowest_part_ms(e, Effect(threads=threads)) for threads in range(1, MOST_THREADS + 1)}
    threads = min(number for number, ms in took_ms.items() if ms <= NEARLY * min(took_ms.values()))
    return Cause(
        "no prefetch",
        f"data.loader_workers is 0: each step first loads its own images for {step.data_ms:.1f} of its "
        f"{step.step_ms:.1f} ms, while the models stand still",
        f"--set data.loader_workers={threads}",
        Effect(threads=threads),
    )


def supplied(e: Evidence, image_ms: float) -> Effect:
    """What a batch of the loader is sooner without so much of a thread's time for an image.

    Threads have b·image/threads less to do. Of what a step waits for batches that are late all the same, that share goes too.
    """
    if e.loader is None or not e.loader.image_ms:
        return Effect()
    share, batch_ms = image_ms / e.loader.image_ms, e.typical.loader_batch_ms
    loading_ms = e.supply_ms if batch_ms is None else min(e.supply_ms, batch_ms)  # without threads a step hands out batches, too
    return Effect(supply_ms=share * loading_ms, late_ms=share * late_ms(e))


def wait_text(e: Evidence) -> str:
    """How much of a step the wait is; of a loader that is faster, how near it is to being the slower one."""
    step = e.typical
    if e.waits_for_data:
        return f"{e.data_wait_ms:.1f} of a step's {step.step_ms:.1f} ms wait for images"
    return f"a batch takes the loader {e.supply_ms:.1f} of a step's {step.step_ms:.1f} ms"


def more_threads(e: Evidence, most: int = MOST_THREADS) -> str:
    """The loader workers with which the step would not wait."""
    threads = min(most, math.ceil(max(1, e.loader_workers) * e.typical.step_ms / max(e.work_ms, 1e-9)))
    return f"--set data.loader_workers={max(threads, e.loader_workers + 1)}"


def swaps(e: Evidence) -> bool:
    """Whether a node's memory is too small for what runs on it."""
    return swap_mib_per_s(e) > SWAPS_MIB_PER_S


def swap_mib_per_s(e: Evidence) -> float:
    """What the node that swaps most reads back."""
    return max((node.swap_in_mib_per_s or 0.0 for node in e.nodes), default=0.0)


def cores_busy_pct(e: Evidence) -> float:
    """Of the busiest node's cores."""
    return max((node.cpu_pct for node in e.nodes if node.cpu_pct is not None), default=0.0)


def storage_bound(e: Evidence) -> Cause | None:
    """Loader threads wait inside their source without computing: for a disk or a network. Not where memory is swapped."""
    if e.loader is None or e.is_late or swaps(e):
        return None
    waits_ms = e.loader.storage_ms
    return Cause(
        "storage-bound",
        f"{wait_text(e)} from the disk or the network: a loader thread takes {e.loader.image_ms:.2f} ms an image, "
        f"{waits_ms:.2f} of it waiting for storage",
        "bring the images nearer (distill pack; --set data.stage=ram or data.cache=memory), or read more at a time: "
        f"{more_threads(e)}",
        supplied(e, waits_ms),
    )


def decode_bound(e: Evidence) -> Cause | None:
    """Loader threads compute, or wait for a core to do so."""
    if e.loader is None or e.is_late:
        return None
    cores_ms = e.loader.core_wait_ms
    waits = f", {cores_ms:.2f} of it waiting for a free core" if cores_ms > 0.1 * e.loader.image_ms else ""
    cheaper = "cheaper images (distill pack --max-side or --raw)"
    most = int(e.cores / e.num_workers) if e.cores else MOST_THREADS  # threads that compute need a core each
    crowded = cores_busy_pct(e) >= BUSY_PCT or cores_ms > e.loader.cpu_ms or most <= e.loader_workers
    change = f"{cheaper}: cores are busy {cores_busy_pct(e):.0f}%" if crowded else f"{more_threads(e, most)}, or {cheaper}"
    return Cause(
        "decode-bound",
        f"{wait_text(e)} to be decoded: a loader thread takes {e.loader.image_ms:.2f} ms an image, "
        f"{e.loader.decode_ms:.2f} of it decoding{waits}",
        change,
        replace(supplied(e, e.loader.decode_ms), cpu_ms=e.loader_cpu_ms),
    )


def gil_bound(e: Evidence) -> Cause | None:
    """Loader threads wait outside their source while cores are free: only one thread of a process runs Python at a time."""
    if e.loader is None or e.is_late or swaps(e):
        return None
    return Cause(
        "GIL-bound",
        f"{wait_text(e)}: a loader thread takes {e.loader.image_ms:.2f} ms an image, {e.loader.lock_ms:.2f} of it waiting for "
        "Python's lock (GIL), which the threads of a worker share",
        "not more loader workers but fewer, or less Python an image (distill pack --raw: pixels of the final size are read many "
        "at a time where data.augment is none); each worker has a lock of its own: --set scale.num_workers="
        f"{2 * e.num_workers} where cores are free",
        supplied(e, e.loader.lock_ms),
    )


def swapping(e: Evidence) -> Cause | None:
    """A node reads memory back from its swap space, and loader threads wait for that wherever they touch it."""
    if not swaps(e):
        return None
    blocked_ms = e.loader.blocked_ms if e.loader is not None else 0.0
    effect = supplied(e, blocked_ms) if e.loader is not None else Effect(supply_ms=e.supply_ms, late_ms=late_ms(e))
    where = f"{wait_text(e)}: a loader thread waits {blocked_ms:.2f} ms an image" if e.loader is not None else wait_text(e)
    return Cause(
        "swapping",
        f"{where} while the node reads {swap_mib_per_s(e):.0f} MiB/s back from swap space: its memory is full",
        "free memory: fewer data.loader_workers, --set data.prefetch_batches=1, data.stage=none and data.cache=none, or other "
        "programs on that node (free -h)",
        effect,
    )


def late_batches(e: Evidence) -> Cause | None:
    """Threads have time to spare, and the step waits all the same: single batches take far longer than others. T' = T - wait."""
    if not e.is_late:
        return None
    step = e.typical
    ahead = min(MOST_PREFETCH, 4 * e.prefetch_batches)
    prefetch = f"--set data.prefetch_batches={ahead}, and " if ahead > e.prefetch_batches else ""
    return Cause(
        "late batches",
        f"{e.data_wait_ms:.1f} of a step's {step.step_ms:.1f} ms wait for images, though the loader needs {e.supply_ms:.1f} ms "
        "for a batch in the mean: now and then one comes late",
        f"{prefetch}see what else uses the disk, the network and the cores at such times",
        Effect(late_ms=late_ms(e)),
    )


def data_bound(e: Evidence) -> Cause | None:
    """Records without what loader threads do: a run's log lines before its end, or an older version's. The cause is left open."""
    if e.loader is not None or not e.loader_workers or e.is_late or swaps(e):
        return None
    short = "(--set train.max_steps=100)"
    if e.has_ended:
        lacking = "the records of this run lack loader/read_wait_ms or loader/core_wait_ms, which would show"
        change = f"train a few steps with this version {short} and run distill doctor on those"
    else:
        lacking = "the records show only at the run's end"
        change = f"run distill doctor again when the run has ended, or on a short one {short}"
    return Cause(
        "data-bound",
        f"{wait_text(e)}; {lacking} whether reading or decoding is slow",
        change,
        Effect(supply_ms=e.supply_ms, late_ms=late_ms(e)),
    )


def copy_bound(e: Evidence) -> Cause | None:
    """A step waits for its batch's copy to the device, or for the device to decode it.

    On a GPU that goes on during the step before: T' = max(work, supply). Without one it is a part of the step.
    """
    step = e.typical
    effect = Effect(copy_ms=e.copy_ms) if e.on_gpu else Effect(work_ms=step.h2d_ms, cpu_ms=e.cpu_of(step.h2d_ms))
    if e.decodes_on_device:
        return Cause(
            "device decode",
            f"{step.h2d_ms:.1f} of a step's {step.step_ms:.1f} ms wait for images that the GPU decodes",
            "--set data.decoder=auto, which decodes on the CPU, or distill pack --raw",
            effect,
        )
    return Cause(
        "copy-bound",
        f"{step.h2d_ms:.1f} of a step's {step.step_ms:.1f} ms wait for the batch's copy to the device",
        "see to the GPU's PCIe link (nvidia-smi -q -d PCIE) and to who else copies on this node, or lower data.image_size",
        effect,
    )
