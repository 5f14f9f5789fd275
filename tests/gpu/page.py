"""The table of a run on the terminal, and as one HTML file that loads nothing from anywhere."""

import html
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from tests.gpu.contract import Check
from tests.gpu.results import Folder, Row, shown

COLOURS = {"ok": "#1a7f37", "MISSED": "#cf222e", "finding": "#9a6700", "skipped": "#656d76", "not run yet": "#656d76"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328 }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #d1d9e0 }
td.figure { font-variant-numeric: tabular-nums; white-space: nowrap }
summary { cursor: pointer; color: #656d76 }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } th, td { border-color: #30363d } }
"""


def terminal_table(rows: Sequence[Row]) -> Table:
    """Check, what was expected, what was measured, and the verdict."""
    table = Table("check", "piece", "expected", "measured", "verdict", box=box.SIMPLE_HEAD)
    last = ""
    for row in rows:
        style = {"MISSED": "red", "ok": "green", "finding": "yellow"}.get(row.verdict, "dim")
        cells = ("" if row.check == last else row.check, *row[1:])
        table.add_row(*map(escape, cells), style=style)
        last = row.check
    return table


def counts(rows: Sequence[Row]) -> str:
    """How many rows have which verdict."""
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).most_common())


def page(folder: Folder, checks: Sequence[Check]) -> str:
    """The whole run: the machine, a table a check, and every figure that was measured."""
    facts = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in folder.machine.items()
    )
    parts = [_check(folder, check) for check in checks]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>raydistill on a GPU</title><style>{STYLE}</style>'
        f"<h1>raydistill on a GPU</h1><p>{html.escape(counts(list(folder.rows(checks))))}</p>"
        f"<table>{facts}</table>{''.join(parts)}</html>\n"
    )


def _check(folder: Folder, check: Check) -> str:
    lines = []
    for row in folder.rows([check]):
        color = COLOURS.get(row.verdict, "inherit")
        cells = (row.piece, row.expected, row.measured)
        lines.append(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + f'<td style="color:{color}">'
            f"{html.escape(row.verdict)}</td></tr>"
        )
    head = "<tr><th>piece</th><th>expected</th><th>measured</th><th>verdict</th></tr>"
    return f"<h2>{check.number} {html.escape(check.title)}</h2><table>{head}{''.join(lines)}</table>{_figures(folder, check)}"


def _figures(folder: Folder, check: Check) -> str:
    """Every figure of a check's pieces, folded away."""
    records = [(piece, folder.read(piece)) for piece in check.pieces]
    lines = [
        f"<tr><td>{html.escape(piece.name)}</td><td>{html.escape(name)}</td>"
        f'<td class="figure">{html.escape(shown(value))}</td></tr>'
        for piece, record in records
        if record is not None
        for name, value in (record.measured | {"seconds of the piece": round(record.seconds, 1)}).items()
    ]
    return f"<details><summary>all figures</summary><table>{''.join(lines)}</table></details>" if lines else ""
