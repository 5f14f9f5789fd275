"""The records of a run: a JSON file for each piece as soon as it has ended, and all of them with their verdicts together."""

import json
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from tests.gpu.contract import Check, Measured, Piece
from trainables.rundir import write_json

VERSION = 1


@dataclass(frozen=True)
class Record:
    """What became of one piece."""

    status: str
    """`measured`, `skipped` or `failed`."""
    seconds: float = 0.0
    measured: Measured = field(default_factory=dict)
    reason: str = ""
    """Why it was skipped or has failed."""


class Row(NamedTuple):
    """A line of the table."""

    check: str
    piece: str
    expected: str
    measured: str
    verdict: str


class Folder:
    """The records of one machine; a second run into the same folder goes on."""

    def __init__(self, root: Path, device: str) -> None:
        """Raises SystemExit where the folder has the records of another machine."""
        self.root, self.device = root, device
        (root / "pieces").mkdir(parents=True, exist_ok=True)
        (root / "logs").mkdir(exist_ok=True)
        self._machine_file = root / "machine.json"
        self.machine = machine(device)
        if not self._machine_file.exists():
            write_json(self._machine_file, self.machine)
        elif (found := json.loads(self._machine_file.read_text())) != self.machine:
            differing = sorted(key for key in self.machine if found.get(key) != self.machine[key])
            raise SystemExit(f"{root} has the records of another machine ({', '.join(differing)}): name another --out")

    def record_file(self, piece: Piece) -> Path:
        return self.root / "pieces" / f"{piece.name}.json"

    def log_file(self, piece: Piece) -> Path:
        return self.root / "logs" / f"{piece.name}.log"

    def read(self, piece: Piece) -> Record | None:
        """The record of a piece; None where it has not been measured."""
        try:
            return Record(**json.loads(self.record_file(piece).read_text()))
        except FileNotFoundError:
            return None

    def write(self, piece: Piece, record: Record) -> None:
        """Add a record, which appears complete."""
        write_json(self.record_file(piece), asdict(record))

    def rows(self, checks: Iterable[Check]) -> Iterator[Row]:
        """The table of these checks: a line for each expectation, and one for a piece that has no figures."""
        for check in checks:
            title = f"{check.number} {check.title}"
            for piece in check.pieces:
                record = self.read(piece)
                if record is None:
                    yield Row(title, piece.name, "", "", "not run yet")
                elif record.status != "measured":
                    yield Row(title, piece.name, "", record.reason, "MISSED" if record.status == "failed" else "skipped")
                else:
                    for expected in piece.expected:
                        value = record.measured.get(expected.figure)
                        verdict = expected.verdict(record.measured, self.device)
                        yield Row(title, piece.name, expected.text, shown(value), verdict)

    def summary(self, checks: Iterable[Check]) -> dict[str, Any]:
        """All records and rows, as `results.json` holds them."""
        checks = list(checks)
        records = {piece.name: self.read(piece) for check in checks for piece in check.pieces}
        return {
            "version": VERSION,
            "machine": self.machine,
            "rows": [row._asdict() for row in self.rows(checks)],
            "pieces": {name: asdict(record) for name, record in records.items() if record is not None},
        }


def shown(value: float | int | str | None) -> str:
    """A figure for people."""
    if value is None:
        return "no figure"
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on. Read without a CUDA context of this process, which some checks would count."""
    import torch
    import torchvision

    from trainables.device.cuda_check import driver

    found: dict[str, Any] = {
        "device": device,
        "gpus": gpu_names() if device == "cuda" else [],
        "driver": driver(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    return found


def gpu_names() -> list[str]:
    """The node's GPUs by name; none without a driver."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except pynvml.NVMLError:
        return []
