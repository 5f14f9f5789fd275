"""Time a step's passes after training, on a single image and on larger batches, to show its fixed costs.

Shapes: B images, C=3 channels, H=W pixels.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from trainables.data.loader.core_wait import CoreWait
from trainables.device.device_batches import DeviceBatch
from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.distributed.group import Group
from trainables.distributed.pipeline.graph import mode_of
from trainables.engine.passes import TrainState, run_student
from trainables.failures import kind_of
from trainables.metrics.latency import pass_seconds

log = logging.getLogger("raydistill")
_MAX_S, _ROUNDS = 1.0, 3
_MAX_PASS_S = 0.25
"""Do not time a batch whose passes would take longer: fixed costs are a small part of it."""
_MAX_FACTOR = 64


def inference_ms(model: nn.Module, inputs_1CHW: Tensor, autocast: Callable[[], contextlib.AbstractContextManager[None]]) -> float:
    """Return the median time in ms of a student's forward pass on a single image, in eval mode on its device."""

    def run() -> None:
        with torch.no_grad(), autocast():
            model(inputs_1CHW)

    with mode_of(model, training=False):
        return 1e3 * median(pass_seconds(run, _MAX_S / 2, inputs_1CHW.device))


def pass_latency(
    train_state: TrainState, image_size: int, *, micro_batch: int, step_s: float, max_images: int, peak_bytes: int = 0
) -> dict[str, float]:
    """Time augmentation, teacher forward, student forward, loss and backward in ms, on images of zeros.

    `one_image_ms` is the time for one image, mostly for launching the work. `passes/N_images_ms` is for N images: the job's
    micro-batch and its doublings, up to `max_images` or a quarter second. On a GPU, `passes/out_of_memory_images` is the N that
    did not fit.

    Each time is the minimum over a few rounds of all sizes (1 s at most after the first), so that a change of the machine's
    speed affects all. CPU times exclude waits for a free core. There is no communication: the student and its methods run
    without DDP, as if this rank were alone. Training state does not change: batch norms keep their statistics, gradients are
    discarded, and no random number is drawn, as models are in eval mode. cuDNN's search for the fastest convolutions stays on:
    without it, its choices for these shapes would stay for later stages.

    Args:
        step_s: Seconds per micro-batch in training.
        max_images: Maximum size of a micro-batch, given the images of an epoch.
        peak_bytes: Peak GPU memory in tensors.
    """
    device, found = train_state.group.device, dict[str, float]()
    with mode_of(train_state.distillation_module, training=False):
        min_s = {1: min(passes_s(train_state, image_size, 1) for _ in range(2))}
        num_images, pass_s = micro_batch, min(step_s, micro_batch * min_s[1])  # an upper bound
        while num_images <= min(max_images, _MAX_FACTOR * micro_batch) and pass_s <= _MAX_PASS_S:
            if device.type == "cuda" and not _fits(device, peak_bytes * num_images / micro_batch):
                log.info("not timing passes on %d images: they do not fit the GPU's memory", num_images)
                break
            now_s = min(_fitting_s(train_state, image_size, num_images) for _ in range(2))
            if now_s == math.inf:
                log.info("not timing passes on %d images: out of memory", num_images)
                found["passes/out_of_memory_images"] = float(num_images)
                break
            min_s[num_images] = now_s
            num_images, pass_s = 2 * num_images, 2 * now_s
        until_s = time.perf_counter() + _MAX_S
        for _ in range(_ROUNDS - 1):
            if time.perf_counter() < until_s:
                min_s = {number: min(seconds, _fitting_s(train_state, image_size, number)) for number, seconds in min_s.items()}
    timed = {f"passes/{number}_images_ms": 1e3 * seconds for number, seconds in min_s.items() if number >= micro_batch}
    return {"one_image_ms": 1e3 * min_s[1]} | timed | found


@contextlib.contextmanager
def use_batch_stats(model: nn.Module, num_images: int) -> Iterator[None]:
    """Make local batch norms use batch statistics if there are several images, as in training, but not update their own."""
    if num_images == 1:
        yield
        return
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.track_running_stats
        and not isinstance(module, GlobalBatchNorm | nn.SyncBatchNorm)
    ]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm in norms:
            norm.training, norm.track_running_stats = False, True


def _fits(device: torch.device, needed_bytes: float) -> bool:
    """Return whether the GPU's memory can hold tensors of this size, including the current ones."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    return needed_bytes <= free_bytes + torch.cuda.memory_reserved(device)


def _fitting_s(train_state: TrainState, image_size: int, num_images: int) -> float:
    """Return `passes_s`, or infinity if memory runs out."""
    try:
        return passes_s(train_state, image_size, num_images)
    except (RuntimeError, MemoryError) as error:
        if kind_of(error) != "out_of_memory":
            raise
        if train_state.group.device.type == "cuda":
            torch.cuda.empty_cache()
        return math.inf


def passes_s(train_state: TrainState, image_size: int, num_images: int) -> float:
    """Return the seconds of the passes on `num_images` images. On a CPU, exclude waits for a free core."""
    device, run = train_state.group.device, passes(train_state, image_size, num_images)
    core_wait = CoreWait() if device.type == "cpu" else None

    def now_s() -> float:
        return time.perf_counter() - (core_wait.seconds() if core_wait else 0.0)

    with use_batch_stats(train_state.distillation_module, num_images):
        start_s = now_s()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now_s() - start_s


def passes(train_state: TrainState, image_size: int, num_images: int) -> Callable[[], None]:
    """Return a function that runs the passes on `num_images` images; call it within `mode_of` and `use_batch_stats`."""
    model, device = train_state.distillation_module, train_state.group.device
    images_BCHW = torch.zeros((num_images, 3, image_size, image_size), device=device, dtype=torch.uint8)
    images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
    labels_B = torch.zeros(num_images, dtype=torch.int64, device=device)
    batch = DeviceBatch(images_BCHW, labels_B, labels_B, labels_B.cpu(), 0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alone = replace(train_state, group=Group(device=device), cpu_group=None)

    def run() -> None:
        inputs = alone.prepare(batch)
        with alone.autocast():
            teacher_outputs = alone.teacher(inputs.images_BCHW, num_images)
        _, losses = run_student(alone, inputs.images_BCHW, inputs, teacher_outputs, 0.0, module=model)
        torch.autograd.grad(losses.total(1.0), trained, allow_unused=True)

    return run
