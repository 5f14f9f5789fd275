"""How a comparison of two runs is shown: lines and tables in the terminal, and a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table as TextTable

from service.report import labels as names
from service.report.compare import Comparison, Pair, cells, difference_cells, lead, verdict
from service.report.document import Page, Section, Table, render
from service.report.page import without_none
from service.report.plotly_marks import GREY, Figure, dots, hover, line, plain, whiskers
from trainables.errors import ExperimentError
from trainables.rundir import write_atomic

VERDICTS = ("B faster", "within noise", "B slower", "spread unknown")


def comparison_lines(comparison: Comparison) -> Iterator[str | TextTable]:
    """The comparison as the terminal shows it."""
    yield f"A: {comparison.a.root}"
    yield f"B: {comparison.b.root}"
    if comparison.pairs:
        columns, rows = cells(comparison)
        table = TextTable(title="points that both have run", title_justify="left")
        for name in columns:
            table.add_column(name, justify="left" if name == "verdict" else "right")
        for row in rows:
            table.add_row(*row)
        yield table
    if comparison.differences:
        table = TextTable(title="what differs in the experiments", title_justify="left")
        for name in ("key", "A", "B"):
            table.add_column(name, overflow="fold")
        for row in difference_cells(comparison):
            table.add_row(*row)
        yield table
    yield from lead(comparison)


def write_comparison(comparison: Comparison, path: Path) -> None:
    """The comparison as a page, atomically.

    Raises:
        ExperimentError: it cannot be written there.
    """
    try:
        write_atomic(path, render(comparison_page(comparison)).encode())
    except OSError as error:
        raise ExperimentError(f"{path} cannot be written: {error.strerror}; choose another file with --html") from error


def comparison_page(comparison: Comparison) -> Page:
    """The comparison as a page."""
    columns, rows = cells(comparison)
    differences = Table("What differs in the experiments", ["key", "A", "B"], difference_cells(comparison))
    sections = [
        Section(
            "Points that both have run",
            tables=[Table("Common points", columns, rows)] if rows else [],
            figures=without_none(ratios(comparison)),
        ),
        Section("What differs in the experiments", tables=[differences] if differences.rows else []),
    ]
    a, b = comparison.a, comparison.b
    sentences = lead(comparison)
    title, foot = f"{a.result.name} (A) and {b.result.name} (B)", f"A: {a.root} · B: {b.root}"
    shown = [section for section in sections if section.tables or section.figures]
    return Page("comparison", title, "", sentences[:2], shown, notes=sentences[2:], foot=foot)


def ratios(comparison: Comparison) -> Figure | None:
    """Speed of B over that of A at every common point, with 95% bounds, sorted."""
    ordered = sorted(comparison.pairs, key=lambda pair: pair.ratio)
    if not ordered:
        return None
    unit, keys = comparison.a.unit, comparison.keys
    rank = {id(pair): index + 1 for index, pair in enumerate(ordered)}

    def name(pair: Pair) -> str:
        return ", ".join(names.at(key, pair.point[key], unit) for key in keys)

    traces = [line("as fast", 0, [0.5, len(ordered) + 0.5], [1, 1], hoverinfo="skip") | {"line": {"color": GREY, "dash": "dot"}}]
    for index, kind in enumerate(VERDICTS):
        pairs = [pair for pair in ordered if verdict(pair) == kind]
        if pairs:
            tips = [hover(name(pair), f"B ÷ A: {pair.ratio:.3f}", kind) for pair in pairs]
            marks = dots(kind, index, [rank[id(pair)] for pair in pairs], [pair.ratio for pair in pairs], tips)
            marks["error_y"] = whiskers(marks["marker"]["color"], [1.96 * (pair.error or 0.0) * pair.ratio for pair in pairs])
            traces.append(marks)
    return Figure(
        "ratios",
        "Speed of B over A",
        "Above 1, B is faster; bars are 95% bounds from the spread of the steps.",
        traces,
        {"xaxis": {"title": {"text": plain("common points, by ratio")}}, "yaxis": {"title": {"text": "B ÷ A"}}},
        ["point", "B ÷ A", "verdict"],
        [[name(pair), f"{pair.ratio:.3f}", verdict(pair)] for pair in ordered],
    )
