"""Exact distributed evaluation: count each sample once, sum on the device, all-reduce once, then divide.

Shapes: B batch, C channels, H W pixels, K classes.
"""

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.config import EvaluateConfig
from trainables.data.loader.loader import Batch
from trainables.device.compilation import Compilation
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.device.precision import with_precision
from trainables.device.tensor_format import autocast, to_pixels
from trainables.distributed.group import Group, all_reduce_sum, broadcast_buffers
from trainables.engine.features import all_skipped, load_evaluated, result_details, split_loader
from trainables.engine.weight_average import WeightAverage
from trainables.errors import DataError
from trainables.metrics.heartbeat import Heartbeat
from trainables.models.forward import logits_and_aux
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels


def correct_counts(logits_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Count the samples whose label has the largest logit, and one of the five largest (scalars, int64).

    With fewer than five classes the second number counts all samples.
    """
    hits_B5 = hits(logits_BK, labels_B)
    return hits_B5[:, 0].sum(), hits_B5.sum()


def hits(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return whether the label has a sample's largest logit, the second largest, …: bool (B, 5), or (B, K) if K < 5."""
    return logits_BK.topk(min(5, logits_BK.shape[1]), dim=1).indices == labels_B[:, None]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Generator[Batch, None, None],
    logits: Callable[[DeviceBatch], Tensor | None],
    group: Group,
    replicas: Group,
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent, mean cross-entropy and the number of images, over all ranks of `group`.

    `logits` maps a batch from the loader to its logits (B, K), or to None if another rank has them. Replicas may have different
    numbers of batches, so a forward pass must not communicate between them: `model` is not in DDP. Its buffers are set to those
    of the first of the `replicas`. Closes `batches` and restores the model's mode. Without any image, all values but
    `num_images` are NaN.
    """
    was_training = model.training
    model.eval()
    broadcast_buffers(model, replicas)
    sums = torch.zeros(4, dtype=torch.float64, device=group.device)  # images, cross-entropy, top-1 hits, top-5 hits
    with contextlib.closing(on_device(batches, group.device)) as device_batches:
        for batch in device_batches:
            labels_B = batch.labels_B
            if len(labels_B) == 0:
                continue
            batch.wait()
            logits_BK = logits(batch)
            if logits_BK is None:
                continue
            logits_BK = logits_BK.double()
            top1, top5 = correct_counts(logits_BK, labels_B)
            entropy = F.cross_entropy(logits_BK, labels_B, reduction="sum")
            sums += torch.stack([torch.full_like(entropy, len(labels_B)), entropy, top1.double(), top5.double()])
    model.train(was_training)
    images, entropy, top1, top5 = all_reduce_sum(sums, group).tolist()
    n = images or float("nan")
    return {"top1_pct": 100 * top1 / n, "top5_pct": 100 * top5 / n, "loss": entropy / n, "num_images": images}


def evaluate_averaged(measure: Callable[[], dict[str, float]], average: WeightAverage | None) -> dict[str, float]:
    """Return what `measure` returns. With averaged weights it measures those, and `raw_…` are the results of the others."""
    val = measure()
    if average is None:
        return val
    raw = {f"raw_{name}": val[name] for name in ("top1_pct", "cka", "cosine", "loss") if name in val}
    with average.swapped():
        return {**measure(), **raw}


def logits_of(
    model: nn.Module,
    pixels: Callable[[Tensor], Tensor],
    autocast: Callable[[], contextlib.AbstractContextManager[None]],
    compilation: Compilation,
) -> Callable[[DeviceBatch], Tensor]:
    """Return a function from a batch of uint8 images to `model`'s logits; `pixels` converts the images to the model's input."""

    def logits(batch: DeviceBatch) -> Tensor:
        compilation.begin_step()
        with autocast(), compilation.batch(len(batch.images_BCHW)):
            return logits_and_aux(model(pixels(batch.images_BCHW)))[0]

    return logits


def evaluate_checkpoint(config: EvaluateConfig, group: Group, heartbeat: Heartbeat | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint on the validation split of `config.data`; every rank gets the result.

    `skipped` lists the images that could not be read, and why. `precision_reason` is empty unless `config.precision` was `auto`.

    Raises:
        CheckpointError: the file cannot be read, or its classes differ from the data's.
        DataError: the data cannot be read.
    """
    heartbeat, config = heartbeat or Heartbeat(), with_precision(config, group)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    with split_loader(config, "val", group) as loader:
        model = load_evaluated(config, loader.source.classes, logits=True)[1].to(group.device, dtype)
        take_pixels(model, student_input(config.data))
        logits = logits_of(model, partial(to_pixels, dtype=dtype), autocast(config.precision, group.device), Compilation())
        heartbeat.enter("eval")
        result = evaluate(model, heartbeat.over(loader.epoch(0)), logits, group, group)
    if not result["num_images"]:
        raise DataError(f"{config.data.path}: no validation image could be read")
    skipped = all_skipped(loader, group)
    return {**result, **result_details(config, skipped)}
