"""How a comparison of two runs is shown: lines and tables in the terminal, and a page."""

from collections.abc import Iterator

import rich.table

from service.report import labels as names
from service.report.compare import CommonPoint, Comparison, lead, point_verdict
from service.report.document import Page, PageSection, PageTable
from service.report.plotly_marks import GREY, Figure, dots, hover, line, unformatted, whiskers
from service.report.text_table import text_table

VERDICTS = ("B faster", "within noise", "B slower", "spread unknown")


def comparison_lines(comparison: Comparison) -> Iterator[str | rich.table.Table]:
    yield f"A: {comparison.a.root}"
    yield f"B: {comparison.b.root}"
    if common := common_points(comparison):
        yield text_table(
            "points that both have run", common.columns, common.rows, left=("verdict",), optional=("±", "A top-1 %", "B top-1 %")
        )
    if found := differences(comparison):
        yield text_table("what differs in the experiments", found.columns, found.rows, left=found.columns)
    yield from lead(comparison)


def comparison_page(comparison: Comparison) -> Page:
    sections = [
        PageSection.of("Points that both have run", common_points(comparison), ratios(comparison)),
        PageSection.of("What differs in the experiments", differences(comparison)),
    ]
    a, b = comparison.a, comparison.b
    sentences = lead(comparison)
    title, foot = f"{a.result.name} (A) and {b.result.name} (B)", f"A: {a.root} · B: {b.root}"
    return Page("comparison", title, "", sentences[:2], sections, notes=sentences[2:], foot=foot)


def common_points(comparison: Comparison) -> PageTable | None:
    """Both speeds at each point that both have run."""
    if not comparison.pairs:
        return None
    unit = comparison.a.unit
    accurate = any("top1_pct" in row.metrics for pair in comparison.pairs for row in (pair.a, pair.b))
    columns = [*(names.axis(key, unit) for key in comparison.keys), *("A images/s", "A top-1 %")[: 1 + accurate]]
    columns += [*("B images/s", "B top-1 %")[: 1 + accurate], "B ÷ A", "±", "verdict"]
    rows = []
    for pair in comparison.pairs:
        results = [
            names.number(row.metrics.get(name), digits)
            for row in (pair.a, pair.b)
            for name, digits in (("images_per_s", 1), ("top1_pct", 2))[: 1 + accurate]
        ]
        error = names.number(pair.error * pair.ratio if pair.error is not None else None, 3)
        point = (str(pair.point[key]) for key in comparison.keys)
        rows.append([*point, *results, f"{pair.ratio:.3f}", error, point_verdict(pair)])
    return PageTable("Common points", columns, rows)


def differences(comparison: Comparison) -> PageTable | None:
    """What differs in the experiments."""
    rows = [[key, str(a), str(b)] for key, a, b in comparison.differences]
    return PageTable("What differs in the experiments", ["key", "A", "B"], rows) if rows else None


def ratios(comparison: Comparison) -> Figure | None:
    """Speed of B over that of A at every common point, with 95% bounds, sorted."""
    ordered = sorted(comparison.pairs, key=lambda pair: pair.ratio)
    if not ordered:
        return None
    unit, keys = comparison.a.unit, comparison.keys
    rank = {id(pair): index + 1 for index, pair in enumerate(ordered)}

    def name(pair: CommonPoint) -> str:
        return ", ".join(names.at(key, pair.point[key], unit) for key in keys)

    traces = [line("as fast", 0, [0.5, len(ordered) + 0.5], [1, 1], hoverinfo="skip") | {"line": {"color": GREY, "dash": "dot"}}]
    for index, kind in enumerate(VERDICTS):
        pairs = [pair for pair in ordered if point_verdict(pair) == kind]
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
        {"xaxis": {"title": {"text": unformatted("common points, by ratio")}}, "yaxis": {"title": {"text": "B ÷ A"}}},
        ["point", "B ÷ A", "verdict"],
        [[name(pair), f"{pair.ratio:.3f}", point_verdict(pair)] for pair in ordered],
    )
