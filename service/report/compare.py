"""Compare two sweeps (or runs): the best of each, the speed at all common points, and other differences."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from plotly import express

from service.config.space import SCALE_AXES
from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, VERMILION, Figure, draw, reference_line
from service.report.document import Page
from service.report.records import Records, axes, ran, searched_keys, step_error
from service.report.statistics import LEVEL, holm, paired_t_test
from service.report.table import Table
from service.report.tables import table_of
from service.report.winner import won
from service.search.rows import probes

RATIO = "B ÷ A"
COLORS = {"B faster": GREEN, "within noise": BLUE, "B slower": VERMILION, "spread unknown": GREY}


@dataclass(frozen=True)
class Comparison:
    """The common points of two runs, and the differences between their experiments."""

    a: Records
    b: Records
    points: pd.DataFrame
    """A row per common point: its axes, speeds and accuracies, the ratio `B ÷ A`, its standard error `±`, and a `verdict`."""

    @property
    def differences(self) -> Table | None:
        """The keys whose values differ between the experiments, without those that both searched."""
        own = [records.experiment for records in (self.a, self.b)]
        a, b = ({key for row in one.rows for key in row.params} for one in (self.a, self.b))
        keys = [key for key in {**own[0], **own[1]} if key != "name" and key not in a & b]
        changed = [[key, *(str(one.get(key)) for one in own)] for key in keys if own[0].get(key) != own[1].get(key)]
        columns = ["key", "A", "B"]
        return Table("differences between the experiments", columns, changed, left=columns) if changed else None


def compare(a: Records, b: Records) -> Comparison:
    """Match the points of two runs; a key that a run did not search has the value of its experiment."""
    keys, unit = searched_keys([*a.rows, *b.rows]), a.result.unit
    both = measured(a, keys, "A").merge(measured(b, keys, "B"), on=keys)
    if both.empty:
        return Comparison(a, b, pd.DataFrame())
    keys = [key for key in keys if key in SCALE_AXES or both[key].nunique() > 1]
    ratio, error = both["B images/s"] / both["A images/s"], (both["A error"] ** 2 + both["B error"] ** 2) ** 0.5
    shown = both[[*keys, "A images/s", "A top-1 %", "B images/s", "B top-1 %"]].dropna(axis="columns", how="all")
    points = shown.rename(columns={key: names.axis(key, unit) for key in keys})
    points = points.assign(**{RATIO: ratio, "±": error * ratio, "verdict": verdicts(ratio, error)})
    points.index = pd.Index(", ".join(names.at(key, one[key], unit) for key in keys) for _, one in both.iterrows())
    return Comparison(a, b, points)


def measured(records: Records, keys: Sequence[str], side: str) -> pd.DataFrame:
    """Return a row per measured point: its values as text, speed, accuracy, and the relative standard error of the speed."""
    found = []
    for row in ran(probes(records.rows)):
        known = {**records.experiment, **row.params, **row.scale.by_key}
        numbers = (row.metrics["images_per_s"], row.metrics.get("top1_pct"), step_error(row) or np.nan)
        found.append([*(str(known.get(key)) for key in keys), *numbers])
    return pd.DataFrame(found, columns=[*keys, f"{side} images/s", f"{side} top-1 %", f"{side} error"])


def verdicts(ratios: pd.Series, errors: pd.Series) -> pd.Series:
    """Return a verdict for each point from its speed ratio and the ratio's relative standard error.

    It is a two-sided z-test of the log ratio against 0, with Holm's correction over all points.
    """
    z = np.log(ratios).abs() / errors.clip(lower=1e-9)
    is_significant = holm(z.map(lambda each: math.erfc(each / math.sqrt(2)))) <= LEVEL
    found = pd.Series(np.where(ratios > 1, "B faster", "B slower"), ratios.index).where(is_significant, "within noise")
    return found.where(errors.notna(), "spread unknown")


def lead(comparison: Comparison) -> list[str]:
    """Summarize the comparison in sentences."""
    sentences, speeds, points = [], [], comparison.points
    for side, records in (("A", comparison.a), ("B", comparison.b)):
        best = records.best
        summary = won(best, records.result.unit, axes(records.rows), "images_per_s") if best else "no trial is complete."
        sentences.append(f"{side}, {records.result.name}: {summary}")
        speeds += [best.metrics["images_per_s"]] if best and "images_per_s" in best.metrics else []
    if len(speeds) == 2:
        sentences.append(f"B's best is {speeds[1] / speeds[0]:.3f} times as fast as A's best.")
    if points.empty:
        return [*sentences, "A and B have no point in common."]
    counted = names.counted(len(points), "common point")
    count = points["verdict"].value_counts().reindex(list(COLORS), fill_value=0)
    if test := paired_t_test(np.log(points[RATIO]).tolist()):
        log_mean, half, _ = test
        mean, low, high = (math.exp(log) for log in (log_mean, log_mean - half, log_mean + half))
        bounds = f"geometric mean; 95% between {low:.3f} and {high:.3f}"
        sentences.append(f"Over {counted} B is {mean:.3f} times as fast as A ({bounds}).")
    unknown = count["spread unknown"]
    if unknown < len(points):
        sentences += [
            f"Beyond step noise, B is faster at {count['B faster']} of {counted} and slower at {count['B slower']}; "
            f"{count['within noise']} differ by no more than noise.",
            "This noise does not include what slowed the machine on one of the days (heat, other jobs).",
        ]
    return [*sentences, *([f"For {unknown} of {counted}, the spread of the step times is unknown."] if unknown else [])]


def common_points(comparison: Comparison) -> Table | None:
    """Tabulate speed and accuracy of both at each common point."""
    optional = ("±", "A top-1 %", "B top-1 %")
    return None if comparison.points.empty else table_of(comparison.points, "common points", optional=optional)


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
    return Figure("ratios", "Speed of B over A", caption, plot, found[["point", RATIO, "verdict"]])


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
