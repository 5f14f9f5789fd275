"""2: a GPU whose memory runs out: in which words, what we call it, and whether the same process can train again."""

from collections.abc import Callable
from functools import partial

import torch

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.work import R34_R18, Pair, Stepper, device_batch, first_device, job_config, open_job, release, sized
from trainables.device.device_batches import DeviceBatch
from trainables.failures import failure_of

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Of the memory that a step takes: what a full card leaves it."""
MOST_LEFT = 50.0
"""MiB of tensors that may be left of a job that has ended."""


def step_once(settings: Settings, pair: Pair, batch: Callable[[], DeviceBatch], size: int, device: torch.device) -> None:
    """Build a job and take two steps."""
    with open_job(job_config(settings, pair, min(size, 4096), "bf16"), device) as job:
        step = Stepper(job, batch())
        step()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def verdict_of(run: Callable[[], object]) -> tuple[str, str] | None:
    """The kind and the words of what a run raised; None: nothing."""
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        failure = failure_of(error, 0)
        return failure.kind, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return None


def huge_batch(pair: Pair, size: int, device: torch.device) -> DeviceBatch:
    """A batch of the size itself; on a CPU one that has so many rows without memory for them, until it is normalized."""
    if device.type == "cuda":
        return device_batch(pair, size, device)
    one = device_batch(pair, 1, device)
    shapes = ((size, 3, pair.image_size, pair.image_size), (size,), (size,), (size,))
    images, labels, indices, host_indices = (tensor.expand(shape) for tensor, shape in zip(one[:4], shapes, strict=True))
    return DeviceBatch(images, labels, indices, host_indices, 0)


def double_until_full(settings: Settings) -> Measured:
    """r34 → r18 in bfloat16, twice the batch each time until it fails; then a job of the first size."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    first, factor = (4, 2**42) if settings.small else (256, 2)
    size, seen = first, None
    while seen is None:
        seen = verdict_of(partial(step_once, settings, pair, partial(huge_batch, pair, size, device), size, device))
        release(device)
        largest, size = size // factor, size * factor
    left = left_of_job(device)
    again = verdict_of(partial(step_once, settings, pair, partial(device_batch, pair, first, device), first, device))
    return {
        "batch that fits": largest,
        "kind": seen[0],
        "not oom": int(seen[0] != "out_of_memory"),
        "words": seen[1],
        **left,
        "next job failed": int(again is not None),
    }


def filled(settings: Settings, benchmark: bool) -> Measured:
    """About batch 256 on a card that is full but for a part of what a step takes, so that it fails in different places."""
    device, pair = first_device(settings), sized(R34_R18, settings)
    torch.backends.cudnn.benchmark = benchmark
    size = 64 if settings.small else 256

    def steps(rows: int) -> None:
        step_once(settings, pair, partial(device_batch, pair, rows, device), rows, device)

    steps(size)
    peak_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    kinds, words = list[str](), dict[str, int]()
    for number, share in enumerate(SHARES):
        release(device)
        # another batch each time, for which cuDNN has not searched yet
        seen = on_a_full_card(partial(steps, size - 8 * (number + 1)), int(share * peak_bytes), device)
        seen = seen or ("none", f"it fits in {share:g} of its memory")
        kinds.append(seen[0])
        words[seen[1]] = words.get(seen[1], 0) + 1
    release(device)
    return {
        "not oom": sum(kind not in ("out_of_memory", "none") for kind in kinds),
        "failed": sum(kind != "none" for kind in kinds),
        "words": "; ".join(f"{count} × {text}" for text, count in words.items()),
        **left_of_job(device),
    }


def left_of_job(device: torch.device) -> Measured:
    """MiB that tensors have, and what is left of it without cuBLAS's workspaces, which a process keeps."""
    if device.type == "cpu":
        return {"left_mib": 0.0, "left_mib without cuBLAS": 0.0}
    left_mib = torch.cuda.memory_allocated(device) / 2**20
    torch._C._cuda_clearCublasWorkspaces()
    return {"left_mib": left_mib, "left_mib without cuBLAS": torch.cuda.memory_allocated(device) / 2**20}


def on_a_full_card(run: Callable[[], None], left_bytes: int, device: torch.device) -> tuple[str, str] | None:
    """See `verdict_of`, with so many bytes of the card left. The twin asks for more than there is instead."""
    if device.type == "cpu":
        run()
        return verdict_of(partial(torch.empty, 2**50))
    free, _ = torch.cuda.mem_get_info(device)
    filler = torch.empty(max(0, free - left_bytes), dtype=torch.uint8, device=device)
    try:
        return verdict_of(run)
    finally:
        del filler


OF_FILLED = (
    Expected("not oom", "all read out_of_memory", 0, 0, on_cpu=True),
    Expected("failed", "fails with at least three of the five", low=3, on_cpu=True),
    Expected("words", "type and words: recorded"),
    Expected("left_mib", f"tensors left afterwards ≤ {MOST_LEFT:g} MiB", high=MOST_LEFT, on_cpu=True),
    Expected("left_mib without cuBLAS", "of it without cuBLAS's workspaces: recorded"),
)
CHECK = Check(
    2,
    "Out of memory",
    (
        Piece("2-filled-search", partial(filled, benchmark=True), OF_FILLED, 3),
        Piece("2-filled-plain", partial(filled, benchmark=False), OF_FILLED, 3),
        Piece(
            "2-doubling",
            double_until_full,
            (
                Expected("not oom", "reads out_of_memory", 0, 0, on_cpu=True),
                Expected("words", "type and words: recorded"),
                Expected("batch that fits", "largest batch that fits: recorded"),
                Expected("left_mib", f"tensors left afterwards ≤ {MOST_LEFT:g} MiB", high=MOST_LEFT, on_cpu=True),
                Expected("left_mib without cuBLAS", "of it without cuBLAS's workspaces: recorded"),
                Expected("next job failed", "the next job in the same process trains", 0, 0, on_cpu=True),
            ),
            5,
        ),
    ),
)
