"""What a step costs however few images it has: its passes timed on a single image and on larger batches, after the training.

Shapes: B images, C=3 channels, H=W pixels.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from trainables.data.loader.core_wait import CoreWait
from trainables.device.device_batches import DeviceBatch
from trainables.distributed.batch_norm import GlobalBatchNorm
from trainables.distributed.group import Group
from trainables.engine.passes import TrainState, run_student
from trainables.failures import kind_of
from trainables.metrics.latency import pass_seconds

log = logging.getLogger("raydistill")
_MAX_S, _ROUNDS = 1.0, 3
_MAX_PASS_S = 0.5
"""No batch is timed whose passes would take longer."""
_MAX_FACTOR = 64
_WORTH_IT = 0.97
"""A batch twice as large makes an image cheaper where it brings its time below this part of the least so far."""
_MAX_WORSE = 2
"""After so many in a row that do not, no larger one is timed."""


@dataclass(frozen=True)
class TrainingShape:
    """What a training has shown of its micro-batches."""

    micro_batch: int
    step_s: float
    """Seconds of a step for each of its micro-batches."""
    max_images: int
    """The most images that a micro-batch can have: an epoch has no more."""
    peak_bytes: int = 0
    """The most GPU memory in tensors."""


def inference_ms(model: nn.Module, inputs_1CHW: Tensor, autocast: Callable[[], contextlib.AbstractContextManager[None]]) -> float:
    """The median milliseconds of a student's forward pass on a single image, in eval mode on the device that has it."""

    def run() -> None:
        with torch.no_grad(), autocast():
            model(inputs_1CHW)

    with unchanged(model):
        return 1e3 * median(pass_seconds(run, _MAX_S / 2, inputs_1CHW.device))


def pass_latency(train_state: TrainState, image_size: int, shape: TrainingShape) -> dict[str, float]:
    """Milliseconds of augmentation, teacher's forward, student's forward, loss and backward, on images of zeros.

    `one_image_ms`: on one of them, which is what launching the work takes where a device has next to nothing to do.
    `passes/N_images_ms`: on N, the micro-batch of the training and each doubling of it, until two in a row make no image cheaper
    (one may have been disturbed), as long as there are so many images, and as that takes half a second at most. On a GPU N has
    to fit: `passes/out_of_memory_images` is the one that did not.

    The least of a few rounds over all of them, 1 s at most after the first: a machine whose speed changes changes it for all.
    Where the CPU does the work waits for a free core are left out. No communication: the student and its methods are run without
    DDP, as if this rank were alone. Nothing of the training is changed: batch norms leave their statistics as they are, gradients
    are thrown away, and no random number is drawn.
    """
    device, found = train_state.group.device, dict[str, float]()
    with unchanged(train_state.distillation_module):
        least_s = {1: min(passes_s(train_state, image_size, 1) for _ in range(2))}
        num_images, image_s, num_worse = shape.micro_batch, math.inf, 0
        took_s = min(shape.step_s, num_images * least_s[1])  # at most
        max_images = min(shape.max_images, _MAX_FACTOR * shape.micro_batch)
        while num_images <= max_images and took_s <= _MAX_PASS_S:
            if device.type == "cuda" and not _fits(device, shape.peak_bytes * num_images / shape.micro_batch):
                log.info("no passes on %d images are timed: the GPU's memory is too small", num_images)
                break
            now_s = min(_fitting_s(train_state, image_size, num_images) for _ in range(2))
            if now_s == math.inf:
                log.info("no passes on %d images are timed: out of memory", num_images)
                found["passes/out_of_memory_images"] = float(num_images)
                break
            least_s[num_images] = now_s
            num_worse = num_worse + 1 if now_s / num_images > _WORTH_IT * image_s else 0
            if num_worse == _MAX_WORSE:
                break
            num_images, took_s, image_s = 2 * num_images, 2 * now_s, min(image_s, now_s / num_images)
        until_s = time.perf_counter() + _MAX_S
        for _ in range(_ROUNDS - 1):
            if time.perf_counter() < until_s:
                least_s = {number: min(least, _fitting_s(train_state, image_size, number)) for number, least in least_s.items()}
    timed = {f"passes/{number}_images_ms": 1e3 * seconds for number, seconds in least_s.items() if number >= shape.micro_batch}
    return {"one_image_ms": 1e3 * least_s[1]} | timed | found


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, so that its passes change and draw nothing; back in its own mode afterwards.

    cuDNN searches for the fastest convolutions here too: what it chose without a search it would keep for these shapes, and so
    for later stages of this process.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def normalized_by_batch(model: nn.Module, num_images: int) -> Iterator[None]:
    """Batch norms normalize by a batch of several images, as in training, and leave their statistics. Those over all ranks stay
    as they are."""
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
    """Whether the GPU has so much memory for tensors, those included that are on it now."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    return needed_bytes <= free_bytes + torch.cuda.memory_reserved(device)


def _fitting_s(train_state: TrainState, image_size: int, num_images: int) -> float:
    """See `passes_s`; infinite where they need more memory than there is."""
    try:
        return passes_s(train_state, image_size, num_images)
    except (RuntimeError, MemoryError) as error:
        if kind_of(error) != "out_of_memory":
            raise
        if train_state.group.device.type == "cuda":
            torch.cuda.empty_cache()
        return math.inf


def passes_s(train_state: TrainState, image_size: int, num_images: int) -> float:
    """Seconds of the passes on so many images, normalized by the batch where they are several.

    On a CPU without waits for a free core: the doctor knows them from the training.
    """
    device, run = train_state.group.device, passes(train_state, image_size, num_images)
    core_wait = CoreWait() if device.type == "cpu" else None

    def now_s() -> float:
        return time.perf_counter() - (core_wait.seconds() if core_wait else 0.0)

    with normalized_by_batch(train_state.distillation_module, num_images):
        start_s = now_s()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now_s() - start_s


def passes(train_state: TrainState, image_size: int, num_images: int) -> Callable[[], None]:
    """What launches the passes on so many images once; call it within `unchanged` and `normalized_by_batch`."""
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
