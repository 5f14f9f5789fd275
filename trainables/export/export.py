"""`distill export`: write a student in a format, read it back with that format's library, and keep it if the outputs agree."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainables.config.data import DataConfig
from trainables.data.source import open_on_node
from trainables.errors import ExportError
from trainables.export.compare import compare, predictor, resized_to
from trainables.export.formats import FORMATS
from trainables.export.student import Student, data_of, note_layers_behind_embedding
from trainables.rundir import unwritable_reason, write_json

RECORD = "export.json"


def export(
    student: Student, to: str, folder: Path, data: DataConfig, *, preprocess: bool, limit: int, tolerance: float
) -> dict[str, Any]:
    """Write `student` and export.json, whose content is returned, into `folder`, if its outputs on validation images of `data`
    differ from the checkpoint's by at most `tolerance` times the largest output.

    Raises:
        DataError: the images cannot be read.
        ExportError: the format does not support this student, or the outputs differ; then nothing is written.
    """
    form, folder = FORMATS[to], folder.absolute()
    form.check(student, to)
    if preprocess and not form.is_traced:
        raise ExportError(f"--preprocess: {to} stores parameters, not operations: choose --to onnx or torch_export")
    _check_folder(folder, to, form.file)
    if not student.classes:
        note_layers_behind_embedding(student)
    data = data_of(student, data)
    with contextlib.closing(open_on_node(data, "val")) as source:
        student = replace(student, val_resize=resized_to(student, data, source))
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        facts = form.write(student, temporary / form.file, preprocess)
        predict = predictor(form.lines(student, temporary / form.file), f"{to} of {student.model}")
        found = compare(student, predict, data, limit=limit, preprocess=preprocess)
        allowed = tolerance * found["max_output"]
        if not found["max_difference"] <= allowed:
            raise ExportError(
                f"{to} of {student.model} differs from the checkpoint by {found['max_difference']:.3g}, more than "
                f"{allowed:.3g} ({tolerance:g} × the largest output), so it was not written: try another --to"
            )
        packages = ("torch", *form.packages)
        record = {
            "format": to,
            "file": form.file,
            **student.description(),
            "input": "uint8 (B, 3, H, W)" if preprocess else "float32 (B, 3, H, W): (pixels / 255 - mean) / std",
            **facts,
            "versions": {name: version(name) for name in packages},
            "comparison": {**found, "data": data.path, "tolerance": allowed},
            "load": form.lines(student, folder / form.file),
        }
        write_json(temporary / RECORD, record)
        folder.mkdir(exist_ok=True)
        for path in temporary.iterdir():
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


def _check_folder(folder: Path, to: str, file: str) -> None:
    """Raise ExportError if the folder cannot be written, or has other files."""
    if folder.suffix == Path(file).suffix or folder.is_file():
        raise ExportError(f"--out {folder}: name a folder to write {file} and {RECORD} into")
    if reason := unwritable_reason(folder):
        raise ExportError(f"--out {folder} cannot be written: {reason}")
    with contextlib.suppress(FileNotFoundError):
        if json.loads((folder / RECORD).read_text()).get("format") == to:
            return
    if folder.exists() and any(folder.iterdir()):
        raise ExportError(f"--out {folder} has other files: choose another folder, or remove them")
