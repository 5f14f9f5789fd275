"""Aggregate trials that differ only in their seed: their mean, and the paired difference to the sweep's first point."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from plotly import express

from service.report import labels as names
from service.report.charts import GREY, Figure, draw
from service.report.records import axes, value
from service.report.statistics import LEVEL, holm, paired_t_test
from service.report.table import Table
from service.report.winner import ranking_metric
from service.runs.result import RunResult, TrialRow

SEED = "seed"
CAPTION = (
    "Means ± standard deviations over seeds, and paired differences to {first} with Student's t-test; p is adjusted for all rows"
    " (Holm). A difference that is not significant may be chance; more seeds would tell."
)


def groups(result: RunResult) -> pd.DataFrame:
    """Return the points of a sweep over seeds, in the order of the sweep; empty if no point was run with two seeds.

    Columns: `point`, `seeds`, `mean`, `std` (n - 1); `difference` to the first point over the `pairs` of common seeds (a seed's
    effect on all points cancels), `half` of its confidence interval, `p` of a paired t-test adjusted for all rows (comparing a
    dozen equal methods at 5% each would find a winner in every other table), and whether it is `significant`.
    NaN means fewer than two pairs; `p` is also NaN if all differences are equal, which happens with two seeds, since accuracies
    are multiples of one image, and says little. `asha` is not compared: it stops seeds that begin badly, so that the lucky ones
    remain.
    """
    rows = [row for row in result.rows if SEED in row.params and result.policy != "asha"]
    keys, metric = [key for key in axes(rows) if key != SEED], ranking_metric(result)[0]
    labels = [_label(row, keys) for row in rows]
    measured = pd.Series([row.metrics.get(metric) if row.status == "ok" else None for row in rows], dtype=float)
    values = pd.DataFrame({"point": labels, "seed": [row.params[SEED] for row in rows], "value": measured})
    by_seed = values.pivot_table(index="point", columns="seed", values="value", aggfunc="last")
    by_seed = by_seed.reindex(list(dict.fromkeys(labels))).dropna(how="all")
    if by_seed.empty or by_seed.count(axis="columns").max() < 2:
        return pd.DataFrame()
    others = by_seed.iloc[1:] - by_seed.iloc[0]
    tests = {point: test for point, each in others.T.items() if (test := paired_t_test(each.dropna().tolist()))}
    found = by_seed.agg(["count", "mean", "std"], axis="columns").rename(columns={"count": "seeds"}).astype({"seeds": int})
    found["pairs"] = others.count(axis="columns")
    tested = pd.DataFrame(tests.values(), index=list(tests), columns=["difference", "half", "p"], dtype=float)
    found = found.join(tested.assign(p=holm(tested["p"])))
    return found.assign(significant=found["p"] < LEVEL).rename_axis("point").reset_index()


def _label(row: TrialRow, keys: Sequence[str]) -> str:
    """Format the values of the keys that this point sets."""
    values = {key: value(row, key) for key in keys if key in row.params}
    texts = {key: " + ".join(map(str, item)) if isinstance(item, list) else str(item) for key, item in values.items()}
    if list(texts) == ["distill.method"]:
        return texts["distill.method"]
    return ", ".join(f"{key.removeprefix('distill.')} {text}" for key, text in texts.items()) or "all alike"


def seed_table(result: RunResult) -> Table | None:
    """Tabulate the points; None if no point was run with two seeds."""
    found, (metric, mode) = groups(result), ranking_metric(result)
    if found.empty:
        return None
    digits, first, rows = names.label(metric).digits, found["point"][0], []
    records: Any = found.itertuples()
    for one in records:
        difference = ["–"] * 4
        if one.difference == one.difference:
            sure = ("better" if (one.difference > 0) == (mode == "max") else "worse") if one.significant else "no"
            interval = f"{one.difference - one.half:+.{digits}f} to {one.difference + one.half:+.{digits}f}"
            difference = [f"{one.difference:+.{digits}f}", interval, names.number(one.p, 3), sure]
        rows.append([one.point, str(one.seeds), names.number(one.mean, digits), names.number(one.std, digits), *difference])
    interval, p = f"{1 - LEVEL:.0%} interval", "p (Holm)"
    columns = ["point", "seeds", f"mean {names.label(metric).head}", "±", f"difference to {first}", interval, p, "significant"]
    caption, left = CAPTION.format(first=first), ["point", "significant"]
    return Table(f"{result.name}: over seeds", columns, rows, caption, left=left, optional=[interval, p])


def seeds_sentence(result: RunResult) -> list[str]:
    """Say which point is best over its seeds, and how certain that is: the best single trial may be lucky."""
    found, (metric, mode) = groups(result), ranking_metric(result)
    if len(found) < 2:
        return []
    best: Any = found.sort_values("mean", ascending=mode == "min", kind="stable").iloc[0]
    text = f"Over seeds {best.point} is best: {names.metric(metric, best['mean'])}, the mean of {best.seeds}"
    if best.difference != best.difference:
        return [f"{text}."]
    digits = names.label(metric).digits
    sure = f"{1 - LEVEL:.0%} interval of {best.pairs:.0f} pairs; {'' if best.significant else 'not '}significant"
    return [f"{text}, {best.difference:+.{digits}f} ± {best.half:.{digits}f} compared with {found['point'][0]} ({sure})."]


def seeds_figure(result: RunResult) -> Figure | None:
    """Plot each point's difference to the first with its confidence interval; one that crosses zero may be chance."""
    found, head = groups(result), names.label(ranking_metric(result)[0]).head
    if found.empty or found["difference"].isna().all():
        return None
    title = f"Over seeds, difference to {found['point'][0]}"
    shown = found.dropna(subset="difference").rename(columns={"difference": head, "half": "±"}).assign(series=title)
    plot = draw(express.scatter, shown, "point", head, "series", tips=["±", "p"], error_y="±")
    plot.update_traces(error_y_color=GREY).update_layout(showlegend=False)
    caption = f"{head}, mean difference with its {1 - LEVEL:.0%} interval; one that crosses zero may be chance."
    return Figure("seeds", title, caption, plot, shown[["point", head, "±", "p"]])
