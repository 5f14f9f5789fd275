"""The description of its model in the header of a checkpoint of ours, read without loading a tensor or importing torch."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import CheckpointError
from trainables.models.foreign_files import refuse_foreign
from trainables.rundir import RunDir, StageDir, expand_home

META_KEY = "raydistill"
INDEX_SUFFIX = ".index.json"
FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt", ".npz", INDEX_SUFFIX)
FOLDER_FILES = (
    *("model.safetensors", f"model.safetensors{INDEX_SUFFIX}"),
    *("pytorch_model.bin", f"pytorch_model.bin{INDEX_SUFFIX}", "pytorch_model.pth", "model.pth"),
)
"""The weights in a folder that timm or Hugging Face has saved, in the order in which they are looked for."""


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
    """With `mean`, how its images were normalized, by channel; () in older checkpoints."""
    interpolation: str = "bilinear"
    """The filter with which its images were resized."""
    shards: tuple[str, ...] = ()
    """The names of the files next to it that have its tensors, where it was written by pipeline stages."""
    transform_input: bool = False
    """Whether the model rescales its input, as GoogLeNet and Inception do with torchvision's published weights."""
    logit_scale: float | None = None
    """Its model has no classifier, and the file an embedding of each class: logits are so many times the cosine to these."""


def checkpoints_of(folder: Path) -> tuple[Path, Path]:
    """The checkpoints that the directory of a run, or of a stage, stands for: a run's student's, a stage's own."""
    return RunDir(folder).stage("student").best, StageDir(folder).best


def locate_checkpoint(weights: str) -> Path | None:
    """The file of `weights`, or None where it is the name of published weights.

    A directory stands for the first of its `checkpoints_of` that there is, else of FOLDER_FILES.

    Raises CheckpointError: there is no such file, or no checkpoint in the directory.
    """
    if weights.startswith(HUB_SCHEMES):
        return None
    if "://" in weights:
        raise CheckpointError(f"{weights} is no file: copy it to a folder that all nodes mount, and give its path there")
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
    """Whether a file has this name, or its beginning: the length of a JSON object, and the object."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        return file.read(10)[8:] == b'{"'


def read_checkpoint_header(path: Path) -> CheckpointHeader | None:
    """The header of a checkpoint; None for a safetensors file that is not one of ours.

    Raises CheckpointError: the file is damaged, of another library, cannot be read, or has an invalid header.
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


def _metadata(path: Path) -> dict[str, str]:
    """The texts in a safetensors file's header."""
    try:
        refuse_foreign(path)
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): it was cut off or damaged; use another copy"
        ) from None
