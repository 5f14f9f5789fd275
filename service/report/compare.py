"""Two sweeps (or runs) side by side: the best of each, the speed at every point that both have, and what else differs."""

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
    """What two runs have in common, and what not."""

    a: Records
    b: Records
    keys: list[str]  # of a point
    points: pd.DataFrame
    """A row for each common point: its `keys`, speeds and accuracies, the ratio `B ÷ A`, its standard error `±`, a `verdict`."""
    differences: Table | None  # of the experiments


def compare(a: Records, b: Records) -> Comparison:
    """Match the points of two runs: a key that one of them did not search counts with its experiment's own value."""
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
    differences = Table("what differs in the experiments", columns, changed, left=columns) if changed else None
    return Comparison(a, b, keys, points, differences)


def points_of(records: Records, keys: list[str]) -> dict[tuple[str, ...], tuple[dict[str, Any], Row]]:
    """Each point with a speed, as it was probed, with its row; by its values as they are written: 1 is not True."""
    found = {}
    for row in ran(probes(records.rows)):
        known = {**records.experiment, **row.params, **row.scale.by_key}
        point = {key: known.get(key) for key in keys}
        found[tuple(map(repr, point.values()))] = point, row
    return found


def verdicts(ratios: pd.Series, errors: pd.Series) -> pd.Series:
    """What is known of each point, by the ratio of its speeds and that ratio's relative standard error.

    A p-value is the probability of a ratio so far from 1 if both were equally fast (two-sided, normal), for all points together.
    """
    z = np.log(ratios).abs() / errors.clip(lower=1e-9)
    beyond = holm(z.map(lambda each: math.erfc(each / math.sqrt(2)))) <= LEVEL
    found = pd.Series(np.where(ratios > 1, "B faster", "B slower"), ratios.index).where(beyond, "within noise")
    return found.where(errors.notna(), "spread unknown")


def overall(ratios: pd.Series) -> tuple[float, float, float] | None:
    """Geometric mean of the ratios with its 95% bounds, from how the points differ among themselves; None for fewer than two.

    What differs between two days (clocks, other jobs, caches) moves all points alike and is in neither figure.
    """
    test = paired_t_test(np.log(ratios).tolist())
    if test is None:
        return None
    return math.exp(test.mean), math.exp(test.mean - test.half_width), math.exp(test.mean + test.half_width)


def lead(comparison: Comparison) -> list[str]:
    """What the comparison says, in sentences."""
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
        return [*sentences, "No point was run by both."]
    counted = names.counted(len(points), "common point")
    if whole := overall(points[RATIO]):
        mean, low, high = whole
        sentences.append(f"Over {counted} B is {times(mean)} A (geometric mean; 95% between {low:.3f} and {high:.3f}).")
    count = points["verdict"].value_counts().reindex(list(COLORS), fill_value=0)
    unknown = count["spread unknown"]
    if unknown < len(points):
        sentences += [
            f"Beyond the noise of the steps, B is faster at {count['B faster']} of {counted} and slower at {count['B slower']}; "
            f"{count['within noise']} differ by no more than noise.",
            "What made the machine slower on one of the days (heat, other jobs) is not in that noise.",
        ]
    return [*sentences, *([f"Of {unknown} of them the spread of the steps is not known."] if unknown else [])]


def times(ratio: float) -> str:
    return f"{ratio:.3f} times as fast as"


def common_points(comparison: Comparison) -> Table | None:
    """Speed and accuracy of both at each point that both have run."""
    if comparison.points.empty:
        return None
    table = table_of(comparison.points, "points that both have run")
    return replace(table, left=["verdict"], optional=("±", "A top-1 %", "B top-1 %"))


def ratios(comparison: Comparison) -> Figure | None:
    """Speed of B over that of A at every common point, with 95% bounds, sorted."""
    points, rank = comparison.points, "common points, by ratio"
    if points.empty:
        return None
    found = points.sort_values(RATIO, kind="stable").rename_axis("point").reset_index()
    found[rank], found["bound"] = range(1, len(found) + 1), 1.96 * found["±"].fillna(0.0)
    plot = draw(express.scatter, found, rank, RATIO, "verdict", list(COLORS), COLORS, ["point"], zero=False, error_y="bound")
    reference_line(plot, 1, "as fast")
    read_as = "Above 1, B is faster; bars are 95% bounds from the spread of the steps."
    return figure("ratios", "Speed of B over A", read_as, plot, found[["point", RATIO, "verdict"]])


def comparison_lines(comparison: Comparison) -> Iterator[str | Table]:
    """What the terminal shows."""
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
            "Points that both have run": [common_points(comparison), ratios(comparison)],
            "What differs in the experiments": [comparison.differences],
        },
        foot=f"A: {a.run_dir.root} · B: {b.run_dir.root}",
    )
