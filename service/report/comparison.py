"""How a comparison of two runs is shown: lines and tables in the terminal, and a page."""

from collections.abc import Iterator

import pandas as pd
from plotly import express

from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, VERMILION, Figure, draw, figure
from service.report.compare import Comparison, lead, point_verdict
from service.report.document import Page, PageSection
from service.report.table import Table

COLORS = {"B faster": GREEN, "within noise": BLUE, "B slower": VERMILION, "spread unknown": GREY}


def comparison_lines(comparison: Comparison) -> Iterator[str | Table]:
    yield f"A: {comparison.a.root}"
    yield f"B: {comparison.b.root}"
    for table in (common_points(comparison), differences(comparison)):
        if table is not None:
            yield table
    yield from lead(comparison)


def comparison_page(comparison: Comparison) -> Page:
    sections = [
        PageSection("Points that both have run", [common_points(comparison), ratios(comparison)]),
        PageSection("What differs in the experiments", [differences(comparison)]),
    ]
    a, b = comparison.a, comparison.b
    sentences = lead(comparison)
    title, foot = f"{a.result.name} (A) and {b.result.name} (B)", f"A: {a.root} · B: {b.root}"
    return Page("comparison", title, "", sentences[:2], sections, notes=sentences[2:], foot=foot)


def common_points(comparison: Comparison) -> Table | None:
    """Speed and accuracy of both at each point that both have run."""
    if not comparison.pairs:
        return None
    shown = ["images_per_s"]
    if any("top1_pct" in row.metrics for pair in comparison.pairs for row in (pair.a, pair.b)):
        shown.append("top1_pct")
    rows = []
    for pair in comparison.pairs:
        results = [names.metric_cell(row.metrics, name) for row in (pair.a, pair.b) for name in shown]
        error = names.number(pair.error * pair.ratio if pair.error is not None else None, 3)
        point = (str(pair.point[key]) for key in comparison.keys)
        rows.append([*point, *results, f"{pair.ratio:.3f}", error, point_verdict(pair)])
    results = [f"{side} {names.label(name).head}" for side in "AB" for name in shown]
    columns = [*(names.axis(key, comparison.a.unit) for key in comparison.keys), *results, "B ÷ A", "±", "verdict"]
    return Table("points that both have run", columns, rows, left=["verdict"], optional=("±", "A top-1 %", "B top-1 %"))


def differences(comparison: Comparison) -> Table | None:
    """What differs in the experiments."""
    rows, columns = [[key, str(a), str(b)] for key, a, b in comparison.differences], ["key", "A", "B"]
    return Table("what differs in the experiments", columns, rows, left=columns) if rows else None


def ratios(comparison: Comparison) -> Figure | None:
    """Speed of B over that of A at every common point, with 95% bounds, sorted."""
    if not comparison.pairs:
        return None
    unit, keys = comparison.a.unit, comparison.keys
    found = pd.DataFrame(
        {
            "point": [", ".join(names.at(key, pair.point[key], unit) for key in keys) for pair in comparison.pairs],
            "B ÷ A": [pair.ratio for pair in comparison.pairs],
            "verdict": [point_verdict(pair) for pair in comparison.pairs],
            "bound": [1.96 * (pair.error or 0.0) * pair.ratio for pair in comparison.pairs],
        }
    ).sort_values("B ÷ A", kind="stable")
    found["common points, by ratio"] = range(1, len(found) + 1)
    x, y = "common points, by ratio", "B ÷ A"
    plot = draw(express.scatter, found, x, y, "verdict", list(COLORS), COLORS, ["point"], zero=False, error_y="bound")
    plot.add_hline(y=1, line={"color": GREY, "dash": "dot", "width": 2}, annotation_text="as fast")
    read_as = "Above 1, B is faster; bars are 95% bounds from the spread of the steps."
    return figure("ratios", "Speed of B over A", read_as, plot, found[["point", "B ÷ A", "verdict"]], {"B ÷ A": 3})
