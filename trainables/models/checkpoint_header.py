"""Read the model description in the header of our checkpoints, without loading tensors or importing torch."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import CheckpointError
from trainables.models.foreign_files import refuse_foreign
from trainables.models.libraries.interface import TrainedInput
from trainables.rundir import RunDir, StageDir, expand_home

META_KEY = "raydistill"
INDEX_SUFFIX = ".index.json"
FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt", ".npz", INDEX_SUFFIX)
FOLDER_FILES = (
    *("model.safetensors", f"model.safetensors{INDEX_SUFFIX}"),
    *("pytorch_model.bin", f"pytorch_model.bin{INDEX_SUFFIX}", "pytorch_model.pth", "model.pth"),
)
"""Weight files in a folder saved by timm or Hugging Face, in lookup order."""


@dataclass(frozen=True)
class CheckpointHeader:
    """The model of a checkpoint."""

    model: str
    num_classes: int
    image_size: int
    classes: tuple[str, ...]
    """In label order."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Per-channel normalization with `mean`; () in older checkpoints."""
    interpolation: str = "bilinear"
    """The filter that resized its images."""
    shards: tuple[str, ...] = ()
    """Names of the files next to it with its tensors, if it was written by pipeline stages."""
    transform_input: bool = False
    """Whether the model rescales its input, as GoogLeNet and Inception do with torchvision's published weights."""
    logit_scale: float | None = None
    """Set if the file has class embeddings instead of a classifier: logits are `logit_scale` times the cosine to each."""

    @property
    def trained_input(self) -> TrainedInput:
        size, classes, interpolation = self.image_size, self.num_classes, self.interpolation
        return TrainedInput(size, self.mean, self.std, classes, interpolation=interpolation, categories=self.classes)


def checkpoints_of(folder: Path) -> tuple[Path, Path]:
    """Return the checkpoints that a directory may stand for: that of a run's student, and that of a stage."""
    return RunDir(folder).stage("student").best, StageDir(folder).best


def locate_checkpoint(weights: str) -> Path | None:
    """Return the file of `weights`, or None for the name of published weights.

    A directory stands for the first existing file of its `checkpoints_of`, then of FOLDER_FILES.

    Raises CheckpointError: the file does not exist, or the directory has no checkpoint.
    """
    if weights.startswith(HUB_SCHEMES):
        return None
    if "://" in weights:
        raise CheckpointError(f"{weights} is not a file: copy it to a folder that all nodes mount, and give that path")
    path = expand_home(weights.removeprefix(FOLDER_SCHEME))
    if path.is_dir():
        candidates = checkpoints_of(path)
        for candidate in (*candidates, *(path / name for name in FOLDER_FILES)):
            if candidate.is_file():
                return candidate
        refuse_foreign(path)
        paths = " or ".join(str(candidate.relative_to(path)) for candidate in candidates)
        raise CheckpointError(
            f"{weights} has no {paths}: give a finished run's or stage's directory, a folder with {FOLDER_FILES[0]}, or a file"
        )
    if path.is_file():
        return path
    if os.sep in weights or weights.endswith(FILE_SUFFIXES):
        raise CheckpointError(f"there is no file {weights}: give the path of a checkpoint, or the name of published weights")
    return None


def is_safetensors(path: Path) -> bool:
    """Whether a file is safetensors by its name, or by its first bytes: the length of a JSON object, then the object."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        return file.read(10)[8:] == b'{"'


def read_checkpoint_header(path: Path) -> CheckpointHeader | None:
    """Read a checkpoint's header; None for a safetensors file that is not one of ours.

    Raises CheckpointError: the file is damaged, unreadable or another library's, or has an invalid header.
    """
    metadata = _metadata(path)
    if META_KEY not in metadata:
        return None
    try:
        fields = json.loads(metadata[META_KEY])
        header = CheckpointHeader(
            model=str(fields["model"]),
            num_classes=int(fields["num_classes"]),
            image_size=int(fields["image_size"]),
            classes=tuple(map(str, fields["classes"])),
            mean=tuple(map(float, fields.get("mean") or ())),
            std=tuple(map(float, fields.get("std") or ())),
            interpolation=str(fields.get("interpolation") or "bilinear"),
            shards=tuple(map(str, fields.get("shards") or ())),
            transform_input=bool(fields.get("transform_input")),
            logit_scale=float(fields["logit_scale"]) if fields.get("logit_scale") else None,
        )
        for shard in header.shards:
            _metadata(path.with_name(shard))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a header that does not describe its model ({error!r}): write the checkpoint again"
        ) from None
    return header


def read_model_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a checkpoint's model under their names in the model; those of methods and optimizers are left out."""
    with safe_open(path, framework="np") as file:
        names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118 - it is no mapping
        return {name.removeprefix("model."): file.get_tensor(name) for name in names}


def _metadata(path: Path) -> dict[str, str]:
    """Read the metadata in a safetensors file's header."""
    try:
        refuse_foreign(path)
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({error}): it is truncated or damaged; use another copy"
        ) from None
