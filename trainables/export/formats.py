"""The export formats: how to write each, and Python code that loads it without this package.

Shapes: B batch, C=3 channels, H W pixels.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from trainables.errors import ExportError, first_line
from trainables.export.student import Network, Student
from trainables.models.forward import COSINES
from trainables.models.libraries.interface import installed
from trainables.notices import notice
from trainables.rundir import write_json

_OPERATOR = re.compile(r"OpOverload\(op='([\w.]+)'")
_BATCH_AXIS = ({0: torch.export.Dim("batch")},)
_DESCRIPTION = "raydistill.json"
"""The name of the description inside a program of torch.export."""


class Format(NamedTuple):
    """A format that a student can be exported to."""

    file: str
    """The file's name in the export folder."""
    write: Callable[[Student, Path, bool], dict[str, Any]]
    """Writes the file and returns entries for export.json. The last argument: whether the file prepares uint8 images itself.

    Raises ExportError: the format does not support this student.
    """
    lines: Callable[[Student, Path], list[str]]
    """Python code that loads the file; the last line computes `output` from `images`, a numpy array (B, C, H, W).

    The comparison runs these lines, and they are printed. Raises ExportError.
    """
    packages: tuple[str, ...] = ()
    """Required packages besides torch."""
    is_traced: bool = False
    """Whether the file has the model's operations, not just its parameters."""

    def check(self, student: Student, name: str) -> None:
        """Raises ExportError: a package is missing, or the format has no place for the student's class embeddings."""
        if missing := [package for package in self.packages if not installed(package)]:
            extra = {"timm": "timm"}.get(missing[0], "export")
            raise ExportError(f"--to {name} needs {', '.join(missing)}: `pip install raydistill[{extra}]`")
        if not self.is_traced and hasattr(student.module, COSINES):
            raise ExportError(
                f"{student.model} has class embeddings as its classifier, which {name} cannot store: choose --to onnx or "
                "torch_export"
            )


@contextlib.contextmanager
def _refused(student: Student, name: str) -> Iterator[None]:
    """Silence a tracer and turn its exception into one line. Raises ExportError, with the unsupported operator if known."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:  # a tracer may raise anything
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        operator = _OPERATOR.search(str(cause))
        reason = f"it has no operator for {operator[1]}" if operator else first_line(cause)
        raise ExportError(f"{name} cannot export {student.model}: {reason}: choose another --to, or change the model") from None
    finally:
        logging.disable(level)


def _traced(student: Student, preprocess: bool) -> torch.export.ExportedProgram:
    """Trace a program for any batch size of at least 1. Raises ExportError: see `_refused`."""
    shape, dtype = (2, 3, student.input.image_size, student.input.image_size), torch.uint8 if preprocess else torch.float32
    images_BCHW = torch.zeros(shape, dtype=dtype)
    with _refused(student, "torch.export"), torch.no_grad():
        network = Network(student, preprocess=preprocess).eval()
        return torch.export.export(network, (images_BCHW,), dynamic_shapes=_BATCH_AXIS, strict=False)


def _write_torch_export(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    torch.export.save(_traced(student, preprocess), path, extra_files={_DESCRIPTION: json.dumps(student.description())})
    return {}


def _torch_export_lines(student: Student, path: Path) -> list[str]:
    return [
        "import torch",
        f"model = torch.export.load({str(path)!r}).module()",
        "output = model(torch.from_numpy(images))",
    ]


def _write_onnx(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    """Write the file with classes and preprocessing in its metadata_props, and return its opset version."""
    program, description = _traced(student, preprocess), student.description()
    with _refused(student, "ONNX"):
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=[description["output"]],
            dynamic_shapes=_BATCH_AXIS,
        )
        assert exported is not None
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}
        exported.model.metadata_props.update(texts)
        exported.save(path, external_data=False)
    return {"opset": exported.model.opset_imports[""]}


def _onnx_lines(student: Student, path: Path) -> list[str]:
    return [
        "import onnxruntime",
        f"session = onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])",
        "output = session.run(None, {'images': images})[0]",
    ]


def _write_timm(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    """Write a folder for `timm.create_model("local-dir:…")` and transformers' wrapper: timm puts config.json next to the file."""
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


def _timm_lines(student: Student, path: Path) -> list[str]:
    return [
        "import timm, torch",
        f"model = timm.create_model({f'local-dir:{path.parent}'!r}, pretrained=True).eval()",
        "output = model(torch.from_numpy(images))",
    ]


def _write_torchvision(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    if student.name.library != "torchvision":
        raise ExportError(f"{student.model} is not a torchvision model: choose --to safetensors or onnx")
    torch.save(student.module.state_dict(), path)
    return {}


def _torchvision_lines(student: Student, path: Path) -> list[str]:
    return _state_dict_lines(student, "torch", f"torch.load({str(path)!r}, weights_only=True)")


def _write_safetensors(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    if any("trainables" in line for line in student.constructor()):
        notice(f"{student.model} is built by raydistill: to load the file without it, choose --to onnx or torch_export")
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in student.module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})
    return {}


def _safetensors_lines(student: Student, path: Path) -> list[str]:
    return _state_dict_lines(student, "safetensors.torch, torch", f"safetensors.torch.load_file({str(path)!r})")


def _state_dict_lines(student: Student, packages: str, state: str) -> list[str]:
    return [
        f"import {packages}",
        *student.constructor(),
        f"model.load_state_dict({state})",
        "output = model.eval()(torch.from_numpy(images))",
    ]


FORMATS = {
    "onnx": Format("model.onnx", _write_onnx, _onnx_lines, packages=("onnx", "onnxscript", "onnxruntime"), is_traced=True),
    "torch_export": Format("model.pt2", _write_torch_export, _torch_export_lines, is_traced=True),
    "timm": Format("model.safetensors", _write_timm, _timm_lines, packages=("timm",)),
    "torchvision": Format("model.pth", _write_torchvision, _torchvision_lines, packages=("torchvision",)),
    "safetensors": Format("model.safetensors", _write_safetensors, _safetensors_lines),
}
"""By the names in `trainables.export.NAMES`."""
