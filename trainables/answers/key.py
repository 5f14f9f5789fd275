"""Whose answers they are: all that decides a teacher's logits for (epoch, sample), and a name made of it.

What does not decide them is left out, so that trials and runs share them: batch size, workers, student, method, optimizer, the
order of the images, and the seed where nothing is drawn by chance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from trainables.config import TrainConfig
from trainables.data.loader import Loader
from trainables.models.weights import teacher_sha256

FORMAT = 1
"""Raised whenever the same key would mean other numbers: pixels, augmentation, layout."""


def key_parts(config: TrainConfig, loader: Loader, classes: Sequence[str], top_k: int | None) -> dict[str, Any]:
    """The parts of the key, as `key.json` beside the answers tells them. Reads the teacher's weights.

    Raises:
        CheckpointError, ModelError, DataError: the teacher or the data cannot be read.
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
        "data": {"samples": loader.num_samples, "fingerprint": loader.fingerprint()},
        "images": {**view, "decoder": loader.decoder, "seed": config.seed if data.draws else None},
        "top_k": top_k,
    }


def key_of(parts: dict[str, Any]) -> str:
    """The name of a folder for these parts, 32 hexadecimal digits of their SHA-256."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
