"""Trials that differ by their seed alone, taken together: their mean, and the paired difference to the sweep's first point."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import rich.table

from service.report import document
from service.report import labels as names
from service.report import plotly_marks as marks
from service.report.run_records import Row, rows_of, value
from service.report.winner import judged
from service.runs.result import RunResult

SEED = "seed"
LEVEL = 0.95
"""Of the confidence intervals; what is significant is so at 1 - LEVEL for all rows of a table together."""
ROUNDING = 1e-12
"""Of differences, relative to the numbers themselves."""


@dataclass(frozen=True)
class Difference:
    """A group less the first one, over the seeds that both have: a mean, and half of its confidence interval.

    `p` is that of a paired t-test for this row and all others together (Holm 1979, "A simple sequentially rejective multiple test
    procedure"): a dozen methods compared at 5% each would find a winner among equals in one table of two. None where all
    differences are the same: accuracies are multiples of an image, so that of two seeds this happens, and tells little.
    """

    mean: float
    half: float
    p: float | None
    num: int

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < 1 - LEVEL


@dataclass(frozen=True)
class Group:
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


def groups(result: RunResult) -> list[Group]:
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
        own = found.setdefault(_label(row, keys), {})
        if row.status == "ok" and (held := row.metrics.get(metric)) is not None:
            own[row.params[SEED]] = float(held)
    measured = {label: of for label, of in found.items() if of}
    if not measured or max(map(len, measured.values())) < 2:
        return []
    (_, first), *others = measured.items()
    raw = [paired(of, first) for _, of in others]
    adjusted = iter(holm([one.p for one in raw if one is not None and one.p is not None]))
    told = [one if one is None or one.p is None else replace(one, p=next(adjusted)) for one in raw]
    return [Group(label, of, one) for (label, of), one in zip(measured.items(), [None, *told], strict=True)]


def _label(row: Row, keys: Sequence[str]) -> str:
    """The values in which this point differs, without the keys that it does not set."""
    told = {key: value(row, key) for key in keys if key in row.params}
    if list(told) == ["distill.method"]:
        return _said(told["distill.method"])
    return ", ".join(f"{key.removeprefix('distill.')} {_said(held)}" for key, held in told.items()) or "all alike"


def _said(held: Any) -> str:
    return " + ".join(map(str, held)) if isinstance(held, list) else str(held)


def paired(of: Mapping[int, float], first: Mapping[int, float]) -> Difference | None:
    """The mean difference over the seeds that both have, Student's t interval and p of it; None below two of them."""
    from scipy import stats  # takes half a second, which a table without seeds does not need

    differences = [held - first[seed] for seed, held in of.items() if seed in first]
    num = len(differences)
    if num < 2:
        return None
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(num)
    half = float(stats.t.ppf((1 + LEVEL) / 2, num - 1)) * error
    alike = error <= ROUNDING * max(1.0, *map(abs, of.values()))
    p = None if alike else 2 * float(stats.t.sf(abs(mean) / error, num - 1))
    return Difference(mean, half, p, num)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of each test when all of them are made: the smallest counts for all, the next for one less, and so on."""
    adjusted, most = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        most = max(most, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = most
    return adjusted


def cells(result: RunResult) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table; no rows where there is nothing to compare."""
    found = groups(result)
    if not found:
        return [], []
    metric, mode = judged(result)
    what, digits = names.METRICS.get(metric, (metric, 3))
    heads = [
        "point",
        "seeds",
        f"mean {what}",
        "±",
        f"difference to {found[0].label}",
        f"{LEVEL:.0%} interval",
        "p (Holm)",
        "significant",
    ]
    rows = []
    for group in found:
        told = ["–"] * 4
        if (d := group.difference) is not None:
            sure = ("better" if (d.mean > 0) == (mode == "max") else "worse") if d.significant else "no"
            told = [
                f"{d.mean:+.{digits}f}",
                f"{d.mean - d.half:+.{digits}f} to {d.mean + d.half:+.{digits}f}",
                names.number(d.p, 3),
                sure,
            ]
        rows.append([
            group.label, str(len(group.of)), names.number(group.mean, digits), names.number(group.std, digits), *told,
        ])  # fmt: skip
    return heads, rows


def sentence(result: RunResult) -> list[str]:
    """Which point is best over its seeds, and how sure that is: a single seed's best trial may owe it to chance."""
    found = groups(result)
    if len(found) < 2:
        return []
    metric, mode = judged(result)
    best = (max if mode == "max" else min)(found, key=lambda group: group.mean)
    told = f"Over seeds {best.label} is best: {names.metric(metric, best.mean)}, the mean of {len(best.of)}"
    if (d := best.difference) is None:
        return [f"{told}."]
    digits = names.METRICS.get(metric, (metric, 3))[1]
    sure = f"{LEVEL:.0%} interval of {d.num} pairs; {'' if d.significant else 'not '}significant"
    return [f"{told}, {d.mean:+.{digits}f} ± {d.half:.{digits}f} beside {found[0].label} ({sure})."]


def caption(result: RunResult) -> str:
    """What the table is, in words."""
    first = groups(result)[0]
    return (
        f"Means over seeds ± their standard deviation, and paired differences to {first.label} with Student's t; p is for all"
        " rows together (Holm). What is not significant may be chance: more seeds tell."
    )


def seed_table(result: RunResult) -> rich.table.Table | None:
    """For the terminal; None where no point was run with two seeds."""
    heads, rows = cells(result)
    if not rows:
        return None
    table = rich.table.Table(title=f"{result.name}: over seeds", title_justify="left", caption=caption(result))
    for head in heads:
        table.add_column(head, justify="left" if head in ("point", "significant") else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def page_table(result: RunResult) -> document.Table | None:
    """For the page."""
    heads, rows = cells(result)
    return document.Table("Over seeds", heads, rows, caption(result)) if rows else None


def figure(result: RunResult) -> marks.Figure | None:
    """Each point's difference to the first with its interval: what crosses zero may be chance."""
    every = groups(result)
    found = [group for group in every if group.difference is not None]
    if not found:
        return None
    first, metric = every[0].label, judged(result)[0]
    what, digits = names.METRICS.get(metric, (metric, 3))
    labels, told = [marks.plain(group.label) for group in found], [group.difference for group in found if group.difference]
    tips = [marks.hover(f"{group.label}: {d.mean:+.{digits}f} ± {d.half:.{digits}f}, p {names.number(d.p, 3)}")
            for group, d in zip(found, told, strict=True)]  # fmt: skip
    dots = marks.dots(f"difference to {first}", 0, labels, [d.mean for d in told], tips)
    dots["error_y"] = marks.whiskers(marks.GREY, [d.half for d in told], [d.half for d in told])
    heads, rows = cells(result)
    read_as = f"{what}, mean difference with its {LEVEL:.0%} interval; across zero it may be chance."
    return marks.Figure(
        "seeds", f"Over seeds, difference to {first}", read_as,
        [dots], {"xaxis": {"type": "category", "showgrid": False}, "yaxis": marks.y_axis(what)}, heads, rows,
    )  # fmt: skip
