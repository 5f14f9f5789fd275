"""`distill bench-model`: latency of forward passes on this machine's CPU. Shapes: B batch, C=3 channels, H W pixels."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainables.errors import ExportError, first_line
from trainables.export.formats import FORMATS
from trainables.export.student import Network, Student
from trainables.metrics.latency import pass_seconds
from trainables.models.libraries.interface import installed
from trainables.models.registry import check_forward
from trainables.notices import notice

MAX_S = 2.0
Passes = Callable[[int], Callable[[], Any]]
"""Maps a batch size to a function that runs one forward pass."""


def bench(student: Student, batches: Sequence[int], *, image_size: int | None, compiled: bool) -> dict[str, Any]:
    """Return parameters, MACs per image (FLOPs / 2), MiB of the state dict, and a row for each runtime and batch size.

    onnxruntime is included if it is installed and supports the model; otherwise a notice explains why not.

    Raises:
        ExportError: the model cannot be compiled.
        ModelError: the model does not accept images of this size.
    """
    if image_size is not None:
        student = replace(student, input=replace(student.input, image_size=image_size))
        check_forward(student.module, image_size, len(student.classes), name=student.model)
    size, network = student.input.image_size, Network(student, preprocess=False).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, size, size))
    state = student.module.state_dict().values()
    rows = _rows("torch eager", _torch_passes(network, size), batches)
    if compiled:
        try:
            rows += _rows("torch compiled", _torch_passes(torch.compile(network), size), batches)
        except Exception as error:  # torch.compile's own exceptions, or a C++ compiler's
            raise ExportError(f"torch.compile fails on {student.model} ({first_line(error)}): leave out --compile") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        try:
            FORMATS["onnx"].check(student, "onnx")
            FORMATS["onnx"].write(student, path, False)
            rows += bench_file(path, batches, image_size=None)["rows"]
        except ExportError as error:
            notice(f"onnxruntime is left out: {error}")
    return {
        "model": student.model,
        "image_size": size,
        "num_parameters": sum(parameter.numel() for parameter in student.module.parameters()),
        "macs": counter.get_total_flops() // 2,
        "size_mib": sum(tensor.nbytes for tensor in state) / 2**20,
        "num_threads": torch.get_num_threads(),
        "rows": rows,
    }


def bench_file(path: Path, batches: Sequence[int], *, image_size: int | None) -> dict[str, Any]:
    """Measure an ONNX file as `bench` does, without counting MACs. Raises ExportError: onnxruntime cannot run it."""
    if missing := [package for package in ("onnx", "onnxruntime") if not installed(package)]:
        raise ExportError(f"{path} needs {' and '.join(missing)}: `pip install raydistill[export]`")
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (images,) = session.get_inputs()
        batch, channels, height, width = (side if isinstance(side, int) else None for side in images.shape)
    except Exception as error:  # onnxruntime has many exception classes
        raise ExportError(f"{path} is not an ONNX model of images (B, C, H, W): {first_line(error)}") from None
    if image_size is not None and (height or image_size) != image_size:
        raise ExportError(f"{path} only accepts images of {height}×{width}: leave out --image-size")
    size = height or image_size or 224
    shape, dtype = (channels or 3, size, width or size), np.uint8 if "uint8" in images.type else np.float32

    def passes(number: int) -> Callable[[], Any]:
        images_BCHW = np.zeros((number, *shape), dtype)
        return lambda: session.run(None, {images.name: images_BCHW})

    if batch is not None and [batch] != list(batches):
        notice(f"{path} only accepts batches of {batch}")
    rows = _rows("onnxruntime", passes, batches if batch is None else [batch])
    tensors = onnx.load(path).graph.initializer
    return {
        "model": str(path),
        "image_size": size,
        "num_parameters": sum(int(np.prod(tensor.dims)) for tensor in tensors),
        "macs": None,
        "size_mib": path.stat().st_size / 2**20,
        "num_threads": torch.get_num_threads(),
        "rows": rows,
    }


def _torch_passes(module: Callable[..., Any], size: int) -> Passes:
    def passes(number: int) -> Callable[[], Any]:
        images_BCHW = torch.zeros(number, 3, size, size)
        return torch.inference_mode()(lambda: module(images_BCHW))

    return passes


def _rows(runtime: str, passes: Passes, batches: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for number in batches:
        seconds = pass_seconds(passes(number), MAX_S)
        median_s, p95_s = np.percentile(seconds, (50, 95))
        speed = {"median_ms": 1e3 * median_s, "p95_ms": 1e3 * p95_s, "images_per_s": number / median_s}
        rows.append({"runtime": runtime, "batch": number, "num_passes": len(seconds), **speed})
    return rows
