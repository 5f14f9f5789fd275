"""The methods as a table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trainables.methods import load, offered

if TYPE_CHECKING:
    from trainables.methods.contract import Method


def method_table() -> Table:
    """A row for each method that goes by a name: its paper and loss, its default weight and taps. Imports torch."""
    table = Table(title="distill.method", title_justify="left", show_lines=True)
    for heading in ("name", "paper", "loss, beside task_weight·CE", "weight", "taps"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "weight" else "left")
    for name in sorted(offered()):
        kind = load(name)
        paper = (sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0]
        loss = (kind.__doc__ or "").split("\n\n")[0]
        cells = (name, paper, loss, f"{kind.Options().weight:g}", _taps(kind))
        table.add_row(*(Text(" ".join(cell.split())) for cell in cells))
    return table


def _taps(kind: type[Method]) -> str:
    options = kind.Options()
    student, teacher = (kind.taps if own is None else own for own in (options.student_taps, options.teacher_taps))
    if student == teacher:
        return " ".join(student) or "logits"
    return f"student {' '.join(student)}, teacher {' '.join(teacher)}"
