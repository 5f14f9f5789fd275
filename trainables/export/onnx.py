"""`--to onnx`: torch's ONNX exporter, with classes and preprocessing in the file's metadata_props."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from trainables.export.interface import Format
from trainables.export.student import Student
from trainables.export.torch_export import BATCH_AXIS, refused, traced


def write(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    """Write the file and return its opset version."""
    program = traced(student, preprocess=preprocess)
    description = student.description()
    with refused(student, "ONNX"):
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=[description["output"]],
            dynamic_shapes=BATCH_AXIS,
        )
        assert exported is not None
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}
        exported.model.metadata_props.update(texts)
        exported.save(path, external_data=False)
    return {"opset": exported.model.opset_imports[""]}


def lines(student: Student, path: Path) -> list[str]:
    return [
        "import onnxruntime",
        f"session = onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])",
        "output = session.run(None, {'images': images})[0]",
    ]


FORMAT = Format("model.onnx", write, lines, packages=("onnx", "onnxscript", "onnxruntime"), is_traced=True)
