"""`--to torch_export`: a program of torch.export. Shapes: B batch, C=3 channels, H W pixels."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainables.errors import ExportError, first_line
from trainables.export.interface import Format
from trainables.export.student import Network, Student

OPERATOR = re.compile(r"OpOverload\(op='([\w.]+)'")
BATCH_AXIS = ({0: torch.export.Dim("batch")},)
DESCRIPTION = "raydistill.json"
"""The name of the description inside the exported program."""


@contextlib.contextmanager
def refused(student: Student, name: str) -> Iterator[None]:
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
        operator = OPERATOR.search(str(cause))
        reason = f"it has no operator for {operator[1]}" if operator else first_line(cause)
        raise ExportError(f"{name} cannot export {student.model}: {reason}: choose another --to, or change the model") from None
    finally:
        logging.disable(level)


def traced(student: Student, *, preprocess: bool) -> torch.export.ExportedProgram:
    """Trace a program for any batch size of at least 1. Raises ExportError: see `refused`."""
    shape, dtype = (2, 3, student.input.image_size, student.input.image_size), torch.uint8 if preprocess else torch.float32
    images_BCHW = torch.zeros(shape, dtype=dtype)
    with refused(student, "torch.export"), torch.no_grad():
        network = Network(student, preprocess=preprocess).eval()
        return torch.export.export(network, (images_BCHW,), dynamic_shapes=BATCH_AXIS, strict=False)


def write(student: Student, path: Path, preprocess: bool) -> dict[str, Any]:
    program = traced(student, preprocess=preprocess)
    torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(student.description())})
    return {}


def lines(student: Student, path: Path) -> list[str]:
    return [
        "import torch",
        f"model = torch.export.load({str(path)!r}).module()",
        "output = model(torch.from_numpy(images))",
    ]


FORMAT = Format("model.pt2", write, lines, is_traced=True)
