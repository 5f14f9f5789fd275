"""Whose answers they are: all that decides a teacher's logits for (epoch, sample), and a name made of it.

What does not decide them is left out, so that trials and runs share them: batch size, workers, student, method, optimizer, the
order of the images, and the seed where nothing is drawn by chance.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainables.config import TrainConfig
from trainables.data.loader import Loader
from trainables.distributed.group import Group, gather_objects
from trainables.errors import DataError, DistillError, ExperimentError
from trainables.models.weights import teacher_sha256

FORMAT = 1
"""Raised whenever the same key would mean other numbers: pixels, augmentation, layout."""


class Images(NamedTuple):
    """What a loader shows, as far as no setting says it: the same for all workers."""

    num_samples: int
    fingerprint: str
    decoder: str


def agree_on_images(path: str, loader: Loader, group: Group, key: str) -> Images:
    """What the loaders of all ranks show of `path`, where it is the same: one sample has one answer. Every rank calls it.

    One rank of each node looks at the data, of which nodes may have copies. `key`: of the experiment, whose answers they share.

    Raises:
        DataError, ExperimentError: one line, on every rank.
    """
    looks = group.local_rank == 0
    told = gather_objects((socket.gethostname(), loader.decoder, _seen(loader) if looks else None), group)
    seen = [(rank, host, shown) for rank, (host, _, shown) in enumerate(told) if shown is not None]
    if wrong := next((shown for _, _, shown in seen if isinstance(shown, DistillError)), None):
        raise wrong
    (_, first_host, first), *others = seen
    if differ := [(rank, host) for rank, host, shown in others if shown != first]:
        rank, host = differ[0]
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise DataError(
            f"{key}: {path} has images of other names, sizes or contents on {host} (rank {rank}{more}) than on {first_host} "
            "(rank 0): copy the same to all nodes, or give a folder that they share"
        )
    decoders = sorted({decoder for _, decoder, _ in told})
    if len(decoders) > 1:
        raise ExperimentError(
            f"{key}: the workers decode JPEG by {' and '.join(decoders)}, which differ in a rounding: "
            "install the same on all nodes, or set data.decoder"
        )
    return Images(first[0], first[1], decoders[0])


def _seen(loader: Loader) -> tuple[int, str] | DistillError:
    try:
        return loader.num_samples, loader.fingerprint()
    except DistillError as error:
        return error


def key_parts(config: TrainConfig, images: Images, classes: Sequence[str], top_k: int | None) -> dict[str, Any]:
    """The parts of the key, as `key.json` beside the answers tells them. Reads the teacher's weights.

    Raises:
        CheckpointError, ModelError: the teacher cannot be read.
    """
    data, teacher = config.data, config.teacher
    assert teacher is not None
    assert teacher.weights is not None
    weights = teacher_sha256(
        teacher.model, teacher.weights, num_classes=len(classes), image_size=data.image_size, classes=classes, seed=config.seed
    )
    # How pixels come about. Also of what is not used here: a key too many costs a teacher's run, one too few the truth.
    view = data.model_dump(mode="json", include={
        "image_size", "augment", "device_augment", "fidelity", "val_resize", "mean", "std",
    })  # fmt: skip
    return {
        "format": FORMAT,
        "teacher": {"model": teacher.model, "sha256": weights, "num_classes": len(classes), "precision": config.precision},
        "data": {"samples": images.num_samples, "fingerprint": images.fingerprint},
        "images": {**view, "decoder": images.decoder, "seed": config.seed if data.draws else None},
        "top_k": top_k,
    }


def key_of(parts: dict[str, Any]) -> str:
    """The name of a folder for these parts, 32 hexadecimal digits of their SHA-256."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
