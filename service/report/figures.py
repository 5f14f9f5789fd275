"""The figures of a sweep, as pure functions of its `trial_frame`: speed over each axis, phases, scaling, cost."""

from collections.abc import Collection, Sequence

import pandas as pd
from plotly import express

from service.report import labels as names
from service.report.charts import GREY, MAX_SERIES, PHASE_COLORS, Figure, draw, mark_ticks, reference_line
from service.report.tables import WAIT
from service.runs.result import TrialRow
from trainables.metrics.phases import ALL_PHASES

STUDENT = "student.model"
OTHERS = "other trials"


def over_axis(frame: pd.DataFrame, keys: Sequence[str], key: str, unit: str) -> Figure | None:
    """Plot the fastest trial at each value of an axis, with a series per value of a second axis; all others are faint.

    `frame` has the trials that have a speed, fastest first, and `keys` are the axes in which they differ.
    """
    title, second = names.axis(key, unit), next((one for one in keys if one != key), None)
    if frame[title].nunique() < 2:
        return None
    series, order = pd.Series("fastest", frame.index), list[str]()
    if second is not None:
        series = frame[names.axis(second, unit)].map(lambda value: names.at(second, value, unit))
        order = sorted(series.unique()[:MAX_SERIES], key=names.natural)
    is_faint = pd.concat([frame[title], series], axis="columns").duplicated() | ~series.isin(order or ["fastest"])
    drawn = frame.assign(series=series.mask(is_faint, OTHERS), bar=frame["± images/s"].mask(is_faint))
    numbers = pd.to_numeric(frame[title], errors="coerce")
    if is_numeric := bool(numbers.notna().all()):
        drawn = drawn.assign(**{title: numbers}).sort_values(title, kind="stable")
    tips = ("trial", "point", "± images/s")
    plot = draw(express.scatter, drawn, title, "images/s", "series", order, {OTHERS: GREY}, tips, error_y="bar")
    plot.update_traces(mode="lines+markers" if is_numeric else "markers", line_width=1)
    faint = {"mode": "markers", "marker": {"size": 6, "symbol": "circle-open"}, "opacity": 0.6}
    plot.update_traces(faint, selector={"name": OTHERS})
    plot.data = sorted(plot.data, key=lambda trace: trace.name != OTHERS)  # behind the others
    if is_numeric:
        mark_ticks(plot, numbers.tolist())
    caption = "The fastest trial at each value" + (", bars one standard error." if drawn["bar"].notna().any() else ".")
    others = [names.axis(one, unit) for one in keys if one != key]
    shown = frame[[title, *others, "images/s", "± images/s", "trial"]]
    return Figure(f"speed-{keys.index(key)}", f"Speed over {title}", caption, plot, shown)


def phases(frame: pd.DataFrame, what: str) -> Figure | None:
    """Plot the phase times of each trial or stage, per 1,000 images so that batch sizes compare.

    `frame` has milliseconds by phase, and the `batch`; `what` is the column with the name of the trial or stage.
    """
    frame = frame.dropna(subset="step ms")
    if frame.empty:
        return None
    used = [f"{phase} ms" for phase in ALL_PHASES if frame[f"{phase} ms"].sum() > 0]
    about = [name for name in (what, "point", "images/s", WAIT, "batch") if name in frame]
    long = frame.melt(about, used, "phase", "ms/step").assign(phase=lambda long: long["phase"].str.removesuffix(" ms"))
    long["s per 1,000 images"] = long["ms/step"] / long["batch"]
    plot = draw(express.bar, long, what, "s per 1,000 images", "phase", colors=PHASE_COLORS, tips=[*about[1:], "ms/step"])
    caption = "Seconds per 1,000 images, stacked by phase; lower is faster."
    return Figure("phases", "Where a step's time goes", caption, plot, frame[[*about, *used, "step ms"]])


def efficiency(frame: pd.DataFrame, best: TrialRow, unit: str) -> Figure | None:
    """Plot the speed per worker relative to that with the fewest workers: 100% is ideal scaling."""
    at, batch, workers = f"number of {unit}s", best.scale.global_batch_size, best.scale.num_workers
    frame = frame.rename(columns={"num_workers": at})
    groups = {
        f"fastest at each {at}": frame[at] > 0,
        f"at global batch {batch}": frame["batch"] == batch,
        f"at batch {names.short(batch / workers)} per {unit}": frame["batch"] * workers == batch * frame[at],
    }
    found = []
    for series, chosen in groups.items():
        fastest = frame[chosen].drop_duplicates(at).sort_values(at).assign(series=series)
        each = fastest["images/s"] / fastest[at]
        found += [fastest.assign(**{"% of ideal": 100 * each / each.iloc[0]})] if len(fastest) > 1 else []
    if not found:
        return None
    drawn, most = pd.concat(found), found[0].iloc[-1]
    plot = draw(express.line, drawn, at, "% of ideal", "series", tips=("trial", "point", "images/s"))
    reference_line(plot, 100, "ideal")
    mark_ticks(plot, drawn[at].tolist())
    return Figure(
        "efficiency",
        "Scaling against ideal",
        f"Images/s per {unit}, relative to that with the fewest {unit}s. "
        f"{names.counted(most[at], unit)} reach {most['% of ideal']:.0f}% of ideal.",
        plot,
        drawn[["series", at, "trial", "images/s", "% of ideal"]],
    )


def pareto(frame: pd.DataFrame, unit: str, found: Collection[str] = ()) -> Figure | None:
    """Plot speed against the cost of an epoch. `found` are the trials on the front by the search's model, if it has one."""
    counts = [names.counted(count, unit) for count in sorted(frame["num_workers"].unique())]
    is_few = len(counts) <= MAX_SERIES
    frame = frame.assign(series=frame["num_workers"].map(lambda count: names.counted(count, unit)) if is_few else "trials")
    about = ("pareto", "Speed against cost", "Up is faster, left is cheaper.")
    return trade_off(*about, frame, f"{unit}-s/epoch", "images/s", "point", counts if is_few else (), found)


def accuracy_latency(frame: pd.DataFrame) -> Figure | None:
    """Plot the accuracy of trained students against their latency, if a sweep has several students."""
    if STUDENT not in frame or frame[STUDENT].nunique() < 2:
        return None
    caption = "Up is more accurate, left is faster: a forward pass on one image, on the device that trained the student."
    frame = frame.assign(series=frame[STUDENT])
    return trade_off("latency", "Accuracy against latency", caption, frame, "latency ms", "top-1 %", STUDENT)


def trade_off(
    id: str,
    title: str,
    caption: str,
    frame: pd.DataFrame,
    x: str,
    y: str,
    named: str,
    order: Sequence[str] = (),
    front: Collection[str] = (),
) -> Figure | None:
    """Plot trials by what they cost (`x`) and gain (`y`), with the Pareto front: those that no other one beats in both.

    `named` is the column that names the trials of the front in the caption. `front` has their ids if a search has found them.
    """
    frame = frame.dropna(subset=[x, y]).sort_values([x, y], ascending=[True, False])
    if len(frame) < 2:
        return None
    best = frame[frame["trial"].isin(list(front)) if front else frame[y] > frame[y].cummax().shift(fill_value=-1.0)]
    plot = draw(express.scatter, frame, x, y, "series", order, tips=("trial", "point", "s/epoch"), zero=False)
    name = "Pareto front of the search" if front else "Pareto front"
    line, marker = {"color": GREY, "shape": "hv", "dash": "dot", "width": 2}, {"size": 16, "symbol": "circle-open"}
    plot.add_scatter(x=best[x], y=best[y], name=name, mode="lines+markers", line=line, marker=marker, hoverinfo="skip")
    caption += f" On the front: {'; '.join(best[named][:4])}{' …' if len(best) > 4 else ''}."
    return Figure(id, title, caption, plot, best[["trial", named, x, y]])
