"""The methods as a table."""

from __future__ import annotations

import sys

from rich.table import Table
from rich.text import Text

from trainables.methods import load, offered


def method_table() -> Table:
    """A row for each method that goes by a name: its paper and loss, its default weight and taps. Imports torch."""
    table = Table(title="distill.method", title_justify="left", show_lines=True)
    for heading in ("name", "paper", "loss, beside task_weight·CE", "weight", "taps"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "weight" else "left")
    for name in sorted(offered()):
        kind = load(name)
        paper = (sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0]
        loss = (kind.__doc__ or "").split("\n\n")[0]
        cells = (
            name,
            " ".join(paper.split()),
            " ".join(loss.split()),
            f"{kind.Options().weight:g}",
            " ".join(kind.taps) or "logits",
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table
