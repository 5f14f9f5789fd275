"""`--to safetensors` and `torchvision`: the state dict with the names of the model's library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainables.errors import ExportError
from trainables.export.interface import Format
from trainables.export.student import Student
from trainables.notices import notice


def write_safetensors(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    if any("trainables" in line for line in student.constructor()):
        notice(f"{student.model} is built by raydistill: to load the file without it, choose --to onnx or torch_export")
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in student.module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})
    return {}


def write_torchvision(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    if student.name.library != "torchvision":
        raise ExportError(f"{student.model} is not a torchvision model: choose --to safetensors or onnx")
    torch.save(student.module.state_dict(), path)
    return {}


def safetensors_lines(student: Student, path: Path) -> list[str]:
    return _lines(student, "safetensors.torch, torch", f"safetensors.torch.load_file({str(path)!r})")


def torchvision_lines(student: Student, path: Path) -> list[str]:
    return _lines(student, "torch", f"torch.load({str(path)!r}, weights_only=True)")


def _lines(student: Student, packages: str, state: str) -> list[str]:
    return [
        f"import {packages}",
        *student.constructor(),
        f"model.load_state_dict({state})",
        "output = model.eval()(torch.from_numpy(images))",
    ]


SAFETENSORS = Format("model.safetensors", write_safetensors, safetensors_lines)
TORCHVISION = Format("model.pth", write_torchvision, torchvision_lines)
