"""Compare two sweeps (or runs): the best of each, the speed at all common points, and other differences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from plotly import express

from service.config.space import SCALE_AXES
from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, VERMILION, Figure, draw, figure, reference_line, table_of
from service.report.document import Page
from service.report.records import Records, Row, axes, ran
from service.report.statistics import LEVEL, holm, paired_t_test
from service.report.table import Table
from service.report.winner import won
from service.search.rows import probes

RATIO = "B ÷ A"
COLORS = {"B faster": GREEN, "within noise": BLUE, "B slower": VERMILION, "spread unknown": GREY}


@dataclass(frozen=True)
class Comparison:
    """The common points of two runs, and the differences between their experiments."""

    a: Records
    b: Records
    keys: list[str]  # axes that identify a point
    points: pd.DataFrame
    """A row per common point: its `keys`, speeds and accuracies, the ratio `B ÷ A`, its standard error `±`, and a `verdict`."""
    differences: Table | None  # between the experiments


def compare(a: Records, b: Records) -> Comparison:
    """Match the points of two runs; a key that a run did not search has the value of its experiment."""
    searched = list(dict.fromkeys([*SCALE_AXES, *(key for records in (a, b) for row in records.rows for key in row.params)]))
    points_a, points_b = (points_of(records, searched) for records in (a, b))
    common = [(*points_a[name], points_b[name][1]) for name in points_a if name in points_b]
    keys = [key for key in searched if key in SCALE_AXES or len({repr(point[key]) for point, _, _ in common}) > 1]
    shown = ["images_per_s", *(["top1_pct"] if any("top1_pct" in row.metrics for _, *pair in common for row in pair) else [])]
    found = []
    for point, one, other in common:
        ratio = other.metrics["images_per_s"] / one.metrics["images_per_s"]
        error = math.hypot(*(np.nan if row.error is None else row.error for row in (one, other)))
        found.append(
            {names.axis(key, a.result.unit): str(point[key]) for key in keys}
            | {
                f"{side} {names.label(key).head}": row.metrics.get(key)
                for side, row in zip("AB", (one, other), strict=True)
                for key in shown
            }
            | {RATIO: ratio, "±": error * ratio}
        )
    points = pd.DataFrame(found)
    if found:
        points["verdict"] = verdicts(points[RATIO], points["±"] / points[RATIO])
        points.index = pd.Index(", ".join(names.at(key, point[key], a.result.unit) for key in keys) for point, _, _ in common)
    both = {key for key in searched if all(any(key in row.params for row in records.rows) for records in (a, b))}
    changed = [
        [key, str(a.experiment.get(key)), str(b.experiment.get(key))]
        for key in dict.fromkeys([*a.experiment, *b.experiment])
        if key != "name" and key not in both and a.experiment.get(key) != b.experiment.get(key)
    ]
    columns = ["key", "A", "B"]
    differences = Table("differences between the experiments", columns, changed, left=columns) if changed else None
    return Comparison(a, b, keys, points, differences)


def points_of(records: Records, keys: list[str]) -> dict[tuple[str, ...], tuple[dict[str, Any], Row]]:
    """Return each measured point and its row, by the `repr` of its values, since 1 == True."""
    found = {}
    for row in ran(probes(records.rows)):
        known = {**records.experiment, **row.params, **row.scale.by_key}
        point = {key: known.get(key) for key in keys}
        found[tuple(map(repr, point.values()))] = point, row
    return found


def verdicts(ratios: pd.Series, errors: pd.Series) -> pd.Series:
    """Return a verdict for each point from its speed ratio and the ratio's relative standard error.

    It is a two-sided z-test of the log ratio against 0, with Holm's correction over all points.
    """
    z = np.log(ratios).abs() / errors.clip(lower=1e-9)
    is_significant = holm(z.map(lambda each: math.erfc(each / math.sqrt(2)))) <= LEVEL
    found = pd.Series(np.where(ratios > 1, "B faster", "B slower"), ratios.index).where(is_significant, "within noise")
    return found.where(errors.notna(), "spread unknown")


def overall(ratios: pd.Series) -> tuple[float, float, float] | None:
    """Return the geometric mean of the ratios and its 95% bounds from the spread over points; None for fewer than two.

    The bounds do not cover differences between two days (clocks, other jobs, caches), which shift all points alike.
    """
    test = paired_t_test(np.log(ratios).tolist())
    if test is None:
        return None
    return math.exp(test.mean), math.exp(test.mean - test.half_width), math.exp(test.mean + test.half_width)


def lead(comparison: Comparison) -> list[str]:
    """Summarize the comparison in sentences."""
    sentences, speeds = [], []
    for side, records in (("A", comparison.a), ("B", comparison.b)):
        best, keys = records.best, axes(records.rows)
        summary = won(best, records.result.unit, keys, "images_per_s") if best else "no trial is complete."
        sentences.append(f"{side}, {records.result.name}: {summary}")
        speeds += [best.metrics["images_per_s"]] if best and "images_per_s" in best.metrics else []
    if len(speeds) == 2:
        sentences.append(f"B's best is {times(speeds[1] / speeds[0])} A's best.")
    points = comparison.points
    if points.empty:
        return [*sentences, "A and B have no point in common."]
    counted = names.counted(len(points), "common point")
    if whole := overall(points[RATIO]):
        mean, low, high = whole
        sentences.append(f"Over {counted} B is {times(mean)} A (geometric mean; 95% between {low:.3f} and {high:.3f}).")
    count = points["verdict"].value_counts().reindex(list(COLORS), fill_value=0)
    unknown = count["spread unknown"]
    if unknown < len(points):
        sentences += [
            f"Beyond step noise, B is faster at {count['B faster']} of {counted} and slower at {count['B slower']}; "
            f"{count['within noise']} differ by no more than noise.",
            "This noise does not include what slowed the machine on one of the days (heat, other jobs).",
        ]
    return [*sentences, *([f"For {unknown} of {counted}, the spread of the step times is unknown."] if unknown else [])]


def times(ratio: float) -> str:
    return f"{ratio:.3f} times as fast as"


def common_points(comparison: Comparison) -> Table | None:
    """Tabulate speed and accuracy of both at each common point."""
    if comparison.points.empty:
        return None
    table = table_of(comparison.points, "common points")
    return replace(table, left=["verdict"], optional=("±", "A top-1 %", "B top-1 %"))


def ratios(comparison: Comparison) -> Figure | None:
    """Plot the ratio of B's speed to A's at every common point, with 95% bounds, sorted."""
    points, rank = comparison.points, "common points, by ratio"
    if points.empty:
        return None
    found = points.sort_values(RATIO, kind="stable").rename_axis("point").reset_index()
    found[rank], found["bound"] = range(1, len(found) + 1), 1.96 * found["±"].fillna(0.0)
    plot = draw(express.scatter, found, rank, RATIO, "verdict", list(COLORS), COLORS, ["point"], zero=False, error_y="bound")
    reference_line(plot, 1, "as fast")
    caption = "Above 1, B is faster; bars are 95% bounds from the spread of the step times."
    return figure("ratios", "Speed of B over A", caption, plot, found[["point", RATIO, "verdict"]])


def comparison_lines(comparison: Comparison) -> Iterator[str | Table]:
    """Yield what the terminal shows."""
    yield f"A: {comparison.a.run_dir.root}"
    yield f"B: {comparison.b.run_dir.root}"
    yield from filter(None, (common_points(comparison), comparison.differences))
    yield from lead(comparison)


def comparison_page(comparison: Comparison) -> Page:
    a, b, sentences = comparison.a, comparison.b, lead(comparison)
    return Page(
        "comparison",
        f"{a.result.name} (A) and {b.result.name} (B)",
        lead=sentences[:2],
        notes=sentences[2:],
        sections={
            "Common points": [common_points(comparison), ratios(comparison)],
            "Differences between the experiments": [comparison.differences],
        },
        foot=f"A: {a.run_dir.root} · B: {b.run_dir.root}",
    )
