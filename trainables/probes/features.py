"""Gather the features of a split: each image once, in dataset order, the same for any number of ranks.

Shapes: B batch, M images of the split, N of them that could be read, D features.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.data.loader.loader import Loader
from trainables.device.device_batches import DeviceBatch, on_device
from trainables.distributed.group import Group, gather_objects
from trainables.errors import ModelError
from trainables.metrics.heartbeat import Heartbeat


class Features(NamedTuple):
    """Features of images, on the CPU."""

    features_ND: Tensor  # float32, or float64 if computed in float64
    labels_N: Tensor  # int64
    indices_N: Tensor  # int64, dataset-wide, ascending


def gather_features(
    embed: Callable[[DeviceBatch], Tensor],
    loader: Loader,
    group: Group,
    heartbeat: Heartbeat | None = None,
    *,
    main_only: bool = False,
) -> Features:
    """Gather `embed`'s features (B, D) of all images of a "val" loader on every rank. Every rank must call this.

    `embed` runs without gradients, on this rank's images only, and does not change its model's mode. Unreadable images are left
    out, see `Loader.skipped`. With `main_only`, only rank 0 gets the features, which saves memory on the others.

    Raises:
        ModelError: features are not finite.
        DataError: the data cannot be read.
    """
    heartbeat = heartbeat or Heartbeat()
    own = _embed_own_batches(embed, loader, group, heartbeat)
    num_images = len(loader.source)
    features_MD: NDArray[Any] = np.empty((0, 0), np.float32)
    is_read_M = np.zeros(num_images, dtype=bool)
    for _ in range(max(gather_objects(len(own), group))):
        heartbeat.beat()
        for part in gather_objects(own.popleft() if own else None, group):  # one batch of each rank at a time
            if part is None:
                continue
            features_BD, indices_B = part
            if not np.isfinite(features_BD).all():
                row = int(np.isfinite(features_BD).all(axis=1).argmin())
                name = loader.source.name(int(indices_B[row]))
                raise ModelError(f"the features of {name} are not finite: the weights are damaged, or need precision=fp32")
            if main_only and not group.is_main:
                continue
            if not features_MD.size:
                features_MD = np.empty((num_images, features_BD.shape[1]), features_BD.dtype)
            features_MD[indices_B], is_read_M[indices_B] = features_BD, True
    indices_N = np.flatnonzero(is_read_M)
    features_ND = features_MD if len(indices_N) in (0, num_images) else features_MD[indices_N]
    return Features(torch.from_numpy(features_ND), loader.labels_M[indices_N], torch.from_numpy(indices_N))


@torch.inference_mode()
def _embed_own_batches(
    embed: Callable[[DeviceBatch], Tensor], loader: Loader, group: Group, heartbeat: Heartbeat
) -> deque[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Return the features (B, D) and indices (B,) of this rank's batches, except empty ones."""
    found = deque[tuple[NDArray[Any], NDArray[np.int64]]]()
    for batch in on_device(heartbeat.over(loader.epoch(0)), group.device):
        if len(batch.labels_B):
            batch.wait()
            features_BD = embed(batch)
            dtype = torch.float64 if features_BD.dtype == torch.float64 else torch.float32
            # Copy the indices, which are in the loader's memory.
            found.append((features_BD.to("cpu", dtype).numpy(), batch.host_indices_B.numpy().copy()))
    return found
