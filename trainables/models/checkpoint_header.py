"""What a checkpoint of ours says about its model, read from the file's header: no tensor is loaded and no torch imported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trainables.errors import CheckpointError
from trainables.rundir import RunDir, StageDir, expand_home

META_KEY = "raydistill"
FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt")


@dataclass(frozen=True)
class Header:
    """The model of a checkpoint. `classes` in label order."""

    model: str
    num_classes: int
    image_size: int
    classes: tuple[str, ...]
    transform_input: bool = False
    """That it brings images to another scale first, as GoogLeNet and Inception do with torchvision's published weights."""


def locate(weights: str) -> Path | None:
    """The file that `weights` means, or None where it is the name of published weights.

    A directory stands for its best checkpoint: of a run, the student's; of a stage, its own.

    Raises:
        CheckpointError: there is no such file, or no checkpoint in the directory.
    """
    path = expand_home(weights)
    if path.is_dir():
        candidates = (RunDir(path).stage("student").best, StageDir(path).best)
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        looked = " or ".join(str(candidate.relative_to(path)) for candidate in candidates)
        raise CheckpointError(f"{weights} holds no {looked}: give a finished run's or stage's directory, or a file")
    if path.is_file():
        return path
    if os.sep in weights or weights.endswith(FILE_SUFFIXES):
        raise CheckpointError(f"there is no file {weights}: give the path of a checkpoint, or the name of published weights")
    return None


def read_header(path: Path) -> Header | None:
    """What the checkpoint says; None for a safetensors file that is not one of ours.

    Raises:
        CheckpointError: the file is damaged, cannot be read, or its header is not as we write it.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it was cut off or damaged; use another copy"
        ) from None
    if META_KEY not in metadata:
        return None
    try:
        about = json.loads(metadata[META_KEY])
        model, classes = str(about["model"]), tuple(map(str, about["classes"]))
        return Header(model, int(about["num_classes"]), int(about["image_size"]), classes, bool(about.get("transform_input")))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a header that does not say what its model is ({error!r}): write the checkpoint again"
        ) from None
