"""What a step waits for before it computes: images that are read, decoded and copied."""

from __future__ import annotations

import math

from service.doctor.evidence import LEAST_PCT, Evidence, Finding, gain_pct

BUSY_PCT = 85.0
"""A node's cores above this leave no room for more threads."""
MOST_THREADS = 32


def no_prefetch(e: Evidence) -> Finding | None:
    """`data.loader_workers: 0`: nothing is loaded while the step computes.

    n threads load a batch in data/n beside the work: T' = max(work, data/n), with the fewest n for which that is the work.
    """
    step = e.typical
    if e.loader_workers or not step.data_ms:
        return None
    work_ms = step.step_ms - step.data_ms
    threads = max(1, min(MOST_THREADS, math.ceil(step.data_ms / max(work_ms, 1e-9))))
    return Finding(
        "no prefetch",
        f"data.loader_workers is 0: each step first loads its own images for {step.data_ms:.1f} of its "
        f"{step.step_ms:.1f} ms, while the models stand still",
        f"--set data.loader_workers={threads}",
        gain_pct(step.step_ms, max(work_ms, step.data_ms / threads)),
    )


def waiting_ms(e: Evidence) -> float | None:
    """Milliseconds an image in which a loader thread waited for its storage; None: unknown.

    A thread that neither computes nor reads through a call waits for pages of a mapped file, for a lock or for a free core.
    It is taken for storage where cores are free and disks are read.
    """
    if e.loader is None:
        return None
    pages = any((node.disk_read_mib_per_s or 0) > 1 and (node.cpu_pct or 0) < BUSY_PCT for node in e.nodes)
    blocked_ms = e.loader.image_ms - e.loader.cpu_ms
    return min(e.loader.image_ms, max(e.loader.read_ms, blocked_ms if pages else 0.0))


def loading(e: Evidence) -> Finding | None:
    """Steps wait for images: for the threads that decode them, or for what the threads read from.

    Of a thread's time an image, w is waiting for storage (`waiting_ms`) and c the rest. Whichever is more is the cause; without
    it a batch of b images is supplied in b·c/threads (or b·w/threads): T' = max(work, that). Records that do not tell go by the
    node: cores above 85% decode. Where they say nothing of the node either (a run's log lines before its end), no cause is named.
    """
    step = e.typical
    if not e.loader_workers or step.data_ms * 100 < LEAST_PCT * step.step_ms:
        return None
    work_ms = step.step_ms - step.data_ms
    known_pct = [node.cpu_pct for node in e.nodes if node.cpu_pct is not None]
    busy_pct, waits_ms = max(known_pct, default=0.0), waiting_ms(e)
    begin = f"{step.data_ms:.1f} of a step's {step.step_ms:.1f} ms wait for images"
    if e.loader is None and not known_pct:
        return Finding(
            "data-bound",
            f"{begin}; these records do not say yet whether they are read or decoded so slowly",
            "ask again when the run has ended, a short one (--set train.max_steps=100) for instance: its records tell",
            gain_pct(step.step_ms, work_ms),
        )
    if e.loader is None or waits_ms is None:
        storage, after_ms, detail = busy_pct < BUSY_PCT, work_ms, f"cores are busy {busy_pct:.0f}%"
    else:
        other_ms = e.loader.image_ms - waits_ms
        storage = waits_ms > other_ms
        after_ms = max(work_ms, (other_ms if storage else waits_ms) * e.rank_batch / e.loader.threads)
        detail = f"a loader thread takes {e.loader.image_ms:.2f} ms an image, {waits_ms:.2f} of it waiting for storage"
    threads = min(MOST_THREADS, math.ceil(e.loader_workers * step.step_ms / max(work_ms, 1e-9)))
    if storage:
        change = (
            "bring the images nearer (distill pack; --set data.stage=ram or data.cache=memory), or read more at a time: "
            f"--set data.loader_workers={threads}"
        )
        return Finding(
            "storage-bound", f"{begin} from the disk or the network: {detail}", change, gain_pct(step.step_ms, after_ms)
        )
    cheaper = "cheaper images (distill pack --max-side or --raw; pip install raydistill[turbojpeg])"
    more = f"--set data.loader_workers={threads}, or "
    change = f"{cheaper}: cores are busy {busy_pct:.0f}%" if busy_pct >= BUSY_PCT else more + cheaper
    return Finding("decode-bound", f"{begin} to be decoded: {detail}", change, gain_pct(step.step_ms, after_ms))


def copy(e: Evidence) -> Finding | None:
    """A step waits for its batch's copy to the device, or for the device to decode it: T' = T - h2d."""
    step = e.typical
    gain = gain_pct(step.step_ms, step.step_ms - step.h2d_ms)
    if e.decodes_on_device:
        return Finding(
            "device decode",
            f"{step.h2d_ms:.1f} of a step's {step.step_ms:.1f} ms wait for images that the GPU decodes",
            "--set data.decoder=auto, which decodes on the CPU, or distill pack --raw",
            gain,
        )
    return Finding(
        "copy-bound",
        f"{step.h2d_ms:.1f} of a step's {step.step_ms:.1f} ms wait for the batch's copy to the device",
        "see to the GPU's PCIe link (nvidia-smi -q -d PCIE) and to who else copies on this node, or lower data.image_size",
        gain,
    )
