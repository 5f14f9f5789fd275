"""The key of a cache: all that decides a teacher's rows for (epoch, sample), and the folder's name made of it.

What does not decide them is left out, so that trials and runs share them: batch size, workers, student, method, optimizer, the
order of the images unless it decides who is mixed with whom, and the seed where nothing is drawn by chance.
"""

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from trainables.config import TrainConfig
from trainables.data.identity import fingerprint
from trainables.data.loader.loader import Loader
from trainables.device.tensor_format import teacher_precision
from trainables.distributed.group import Group, all_gather_results, broadcast_result
from trainables.errors import DataError, ExperimentError
from trainables.models.model_input import teacher_input
from trainables.models.weights import teacher_sha256
from trainables.teachers.network import fit
from trainables.teachers.rows import RowFormat
from trainables.user_code import option_key

FORMAT = 5
"""Raised whenever the same key would mean other numbers: fingerprint, pixels, augmentation, format of the columns."""
_PIXEL_KEYS = {"image_size", "augment", "min_crop_area", "device_augment", "fidelity", "val_resize"}
"""Keys of `data` that decide pixels, also those that are not used here: a key too many costs a teacher's run, one too few is
wrong."""


class ImageSet(NamedTuple):
    """What a loader reads, as far as no setting names it: the same for all workers."""

    num_samples: int
    fingerprint: str
    decoder: str


def shared_key_parts(
    config: TrainConfig, group: Group, loader: Loader, classes: Sequence[str], row_format: RowFormat
) -> dict[str, Any]:
    """The parts of a job's key, on every rank; every rank calls it. Raises DistillError: see `check_same_data`, `key_parts`."""
    assert config.teacher is not None
    images = check_same_data(config.data.path, loader, group, str(config.teacher.rows_from))
    return broadcast_result(lambda: key_parts(config, images, classes, row_format), group)


def check_same_data(path: str, loader: Loader, group: Group, key: str) -> ImageSet:
    """What the loaders of all ranks read from `path`, where it is the same: a sample has one row. Every rank calls it.

    One rank of each node fingerprints the data, of which nodes may have copies. `key`: the experiment's, for messages.

    Raises:
        DataError: the data cannot be read, or differs between nodes; on every rank.
        ExperimentError: the workers decode by different libraries; on every rank.
    """

    def read() -> tuple[str, str, tuple[int, str] | None]:
        images = (len(loader.source), fingerprint(loader.source)) if group.local_rank == 0 else None
        return socket.gethostname(), loader.decoder, images

    ranks = all_gather_results(read, group)
    (_, first_host, first), *others = [(rank, host, images) for rank, (host, _, images) in enumerate(ranks) if images is not None]
    for rank, host, images in others:
        if images != first:
            raise DataError(
                f"{key}: {path} has images of other names, sizes or contents on {host} (rank {rank}) than on {first_host} "
                "(rank 0): copy the same to all nodes, or give a folder that they share"
            )
    decoders = sorted({decoder for _, decoder, _ in ranks})
    if len(decoders) > 1:
        raise ExperimentError(
            f"{key}: the workers decode JPEG by {' and '.join(decoders)}, which differ in a rounding: "
            "install the same libraries on all nodes"
        )
    return ImageSet(*first, decoders[0])


def key_parts(config: TrainConfig, images: ImageSet, classes: Sequence[str], row_format: RowFormat) -> dict[str, Any]:
    """The parts of the key, as they are written to `key.json`. Reads the teacher's weights.

    Raises CheckpointError, ModelError: the teacher cannot be read.
    """
    data, teacher = config.data, config.teacher
    assert teacher is not None
    weights, precision = teacher_sha256(**fit(teacher, config, classes)), teacher_precision(teacher, config)
    pixels = data.model_dump(mode="json", include=_PIXEL_KEYS)
    pixels["erased_to"] = data.mean if data.device_augment.random_erasing else None
    pixels["partners"] = data.shuffle if data.device_augment.mixes else None
    model = option_key(teacher.model)  # the code of one in a file is in `weights`
    return {
        "format": FORMAT,
        "teacher": {"model": model, "sha256": weights, "num_classes": len(classes), "precision": precision},
        "input": asdict(teacher_input(teacher, data)),
        "data": {"samples": images.num_samples, "fingerprint": images.fingerprint},
        "images": {**pixels, "decoder": images.decoder, "seed": config.seed if data.augments_at_random else None},
        **row_format.key,
    }


def cache_key(parts: dict[str, Any]) -> str:
    """The folder's name: 32 hexadecimal digits of the SHA-256 of the parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
