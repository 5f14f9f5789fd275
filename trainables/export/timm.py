"""`--to timm`: a folder for `timm.create_model("local-dir:…")` and transformers' wrapper of timm models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trainables.errors import ExportError
from trainables.export.interface import Format
from trainables.export.student import Student
from trainables.rundir import write_json


def write(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    """timm writes config.json next to the file."""
    if student.name.library != "timm":
        others = "torchvision, safetensors or onnx" if student.name.library == "torchvision" else "safetensors or onnx"
        raise ExportError(f"{student.model} is not a timm model: choose --to {others}")
    from timm.models import save_for_hf

    size = student.input.image_size
    images = {
        "input_size": (3, size, size),
        "mean": student.input.mean,
        "std": student.input.std,
        "interpolation": student.input.interpolation,
        "crop_pct": crop_pct(size, student.val_resize or size),
        "crop_mode": "center",
        "test_input_size": None,
        "test_crop_pct": None,
    }
    labels = {"label_names": list(student.classes)} if student.classes else {}
    arguments = {"model_args": student.name.kwargs} if student.name.kwargs else {}
    config = path.with_name("config.json")
    save_for_hf(student.module, str(path.parent), {"pretrained_cfg": images, **labels, **arguments}, safe_serialization=True)
    saved = json.loads(config.read_text())
    saved.get("model_args", {}).pop("num_classes", None)  # `saved` itself has it, and transformers rejects a duplicate
    write_json(config, saved)
    return {}


def crop_pct(size: int, resize: int) -> float:
    """Return the crop's share of the image from which timm computes `resize`, as ⌊size / crop_pct⌋."""
    share = size / resize
    return share if math.floor(size / share) == resize else math.nextafter(share, 0)  # 68 / (68 / 100) is below 100


def lines(student: Student, path: Path) -> list[str]:
    return [
        "import timm, torch",
        f"model = timm.create_model({f'local-dir:{path.parent}'!r}, pretrained=True).eval()",
        "output = model(torch.from_numpy(images))",
    ]


FORMAT = Format("model.safetensors", write, lines, packages=("timm",))
