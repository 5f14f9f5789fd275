"""Trials that differ by their seed alone, taken together: their mean, and the paired difference to the sweep's first point."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import rich.table

from service.report import labels as names
from service.report import plotly_marks as marks
from service.report.document import PageTable
from service.report.run_records import Row, rows_of, value
from service.report.statistics import LEVEL, holm, paired_t_test
from service.report.text_table import text_table
from service.report.winner import judged
from service.runs.result import RunResult

SEED = "seed"
ROUNDING = 1e-12
"""Of differences, relative to the numbers themselves."""


@dataclass(frozen=True)
class Difference:
    """A group less the first one, over the seeds that both have: a mean, and half of its confidence interval.

    `p` is that of a paired t-test for this row and all others together (`statistics.holm`): a dozen methods compared at 5% each
    would find a winner among equals in one table of two. None where all differences are the same: accuracies are multiples of
    an image, so that of two seeds this happens, and says little.
    """

    mean: float
    half: float
    p: float | None
    num: int

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


@dataclass(frozen=True)
class SeedGroup:
    """Trials of one point but for the seed."""

    label: str
    of: Mapping[int, float]
    """Seed → the metric of its trial."""
    difference: Difference | None = None
    """None: it is the first group, or fewer than two seeds are shared with it."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.of.values())

    @property
    def std(self) -> float | None:
        """The sample's deviation (n - 1)."""
        return statistics.stdev(self.of.values()) if len(self.of) > 1 else None


def groups(result: RunResult) -> list[SeedGroup]:
    """The points of a sweep over seeds, in the order of the sweep; empty where no point was run with two seeds.

    The first is what the others are compared with: seeds pair them, so that what a seed does to all alike cancels. Nothing of
    `asha`, which ends the seeds that begin badly: those that are left are the lucky ones.
    """
    if result.policy == "asha":
        return []
    metric = judged(result)[0]
    rows = [row for row in rows_of(result) if SEED in row.params]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row.params) if key != SEED]
    keys = [key for key in keys if len({repr(row.params.get(key)) for row in rows}) > 1]
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        by_seed = found.setdefault(_label(row, keys), {})
        if row.status == "ok" and (measurement := row.metrics.get(metric)) is not None:
            by_seed[row.params[SEED]] = float(measurement)
    measured = {label: of for label, of in found.items() if of}
    if not measured or max(map(len, measured.values())) < 2:
        return []
    (_, first), *others = measured.items()
    raw = [paired(of, first) for _, of in others]
    adjusted = iter(holm([one.p for one in raw if one is not None and one.p is not None]))
    differences = [one if one is None or one.p is None else replace(one, p=next(adjusted)) for one in raw]
    return [SeedGroup(label, of, one) for (label, of), one in zip(measured.items(), [None, *differences], strict=True)]


def _label(row: Row, keys: Sequence[str]) -> str:
    """The values in which this point differs, without the keys that it does not set."""
    values = {key: value(row, key) for key in keys if key in row.params}
    if list(values) == ["distill.method"]:
        return _text(values["distill.method"])
    return ", ".join(f"{key.removeprefix('distill.')} {_text(item)}" for key, item in values.items()) or "all alike"


def _text(item: Any) -> str:
    return " + ".join(map(str, item)) if isinstance(item, list) else str(item)


def paired(values: Mapping[int, float], first: Mapping[int, float]) -> Difference | None:
    """The mean difference over the seeds that both have, with Student's t interval and p-value; None below two of them."""
    differences = [value - first[seed] for seed, value in values.items() if seed in first]
    test = paired_t_test(differences, rounding=ROUNDING * max(1.0, *map(abs, values.values())))
    return None if test is None else Difference(test.mean, test.half_width, test.p_value, len(differences))


def page_table(result: RunResult) -> PageTable | None:
    """For the page, a row a point; None where no point was run with two seeds."""
    found = groups(result)
    if not found:
        return None
    metric, mode = judged(result)
    what, digits, _ = names.label(metric)
    first = found[0].label
    heads = ["point", "seeds", f"mean {what}", "±"]
    heads += [f"difference to {first}", f"{1 - LEVEL:.0%} interval", "p (Holm)", "significant"]
    rows = []
    for group in found:
        difference = ["–"] * 4
        if (d := group.difference) is not None:
            sure = ("better" if (d.mean > 0) == (mode == "max") else "worse") if d.significant else "no"
            interval = f"{d.mean - d.half:+.{digits}f} to {d.mean + d.half:+.{digits}f}"
            difference = [f"{d.mean:+.{digits}f}", interval, names.number(d.p, 3), sure]
        mean, std = names.number(group.mean, digits), names.number(group.std, digits)
        rows.append([group.label, str(len(group.of)), mean, std, *difference])
    caption = (
        f"Means over seeds ± their standard deviation, and paired differences to {first} with Student's t; p is for all"
        " rows together (Holm). What is not significant may be chance: more seeds show it."
    )
    return PageTable("Over seeds", heads, rows, caption)


def seed_table(result: RunResult) -> rich.table.Table | None:
    found = page_table(result)
    if found is None:
        return None
    left = ("point", "significant")
    return text_table(
        f"{result.name}: over seeds", found.columns, found.rows, left=left, optional=found.columns[-3:-1], caption=found.caption
    )


def seeds_sentence(result: RunResult) -> list[str]:
    """Which point is best over its seeds, and how sure that is: a single seed's best trial may owe it to chance."""
    found = groups(result)
    if len(found) < 2:
        return []
    metric, mode = judged(result)
    best = (max if mode == "max" else min)(found, key=lambda group: group.mean)
    text = f"Over seeds {best.label} is best: {names.metric(metric, best.mean)}, the mean of {len(best.of)}"
    if (d := best.difference) is None:
        return [f"{text}."]
    digits = names.label(metric).digits
    sure = f"{1 - LEVEL:.0%} interval of {d.num} pairs; {'' if d.significant else 'not '}significant"
    return [f"{text}, {d.mean:+.{digits}f} ± {d.half:.{digits}f} compared with {found[0].label} ({sure})."]


def seeds_figure(result: RunResult) -> marks.Figure | None:
    """Each point's difference to the first with its interval: what crosses zero may be chance."""
    all_groups = groups(result)
    found, numbers = [group for group in all_groups if group.difference is not None], page_table(result)
    if not found or numbers is None:
        return None
    first, metric = all_groups[0].label, judged(result)[0]
    what, digits, _ = names.label(metric)
    labels = [marks.unformatted(group.label) for group in found]
    differences = [group.difference for group in found if group.difference]
    tips = [
        marks.hover(f"{group.label}: {d.mean:+.{digits}f} ± {d.half:.{digits}f}, p {names.number(d.p, 3)}")
        for group, d in zip(found, differences, strict=True)
    ]
    dots = marks.dots(f"difference to {first}", 0, labels, [d.mean for d in differences], tips)
    dots["error_y"] = marks.whiskers(marks.GREY, [d.half for d in differences], [d.half for d in differences])
    read_as = f"{what}, mean difference with its {1 - LEVEL:.0%} interval; across zero it may be chance."
    return marks.Figure(
        "seeds",
        f"Over seeds, difference to {first}",
        read_as,
        [dots],
        {"xaxis": {"type": "category", "showgrid": False}, "yaxis": marks.y_axis(what)},
        numbers.columns,
        numbers.rows,
    )
