"""Checkpoints of untrained students, and their exports."""

from pathlib import Path
from typing import Any

from trainables.config import DataConfig
from trainables.engine import checkpoint
from trainables.export.export import export
from trainables.export.student import read_student
from trainables.models.registry import build_model

DIGITS = tuple("0123456789")


def write_student(path: Path, model: str, *, image_size: int = 8, classes: tuple[str, ...] = DIGITS, **about: Any) -> Path:
    """The checkpoint of a student with its initial weights."""
    state = build_model(model, num_classes=len(classes), image_size=image_size, seed=1).state_dict()
    described = {"model": model, "num_classes": len(classes), "image_size": image_size, "classes": list(classes)}
    described |= {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]} | about
    checkpoint.write_tensors(path, {f"model.{name}": tensor for name, tensor in state.items()}, described)
    return path


def export_digits(path: Path, to: str, folder: Path, **options: Any) -> dict[str, Any]:
    """The record of an export that is compared on a few of the digits."""
    options = {"preprocess": False, "limit": 20, "tolerance": 1e-3, **options}
    return export(read_student(path), to, folder, DataConfig(path="digits"), **options)
