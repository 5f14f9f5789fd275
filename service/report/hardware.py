"""What GPUs and nodes did while a run went on: utilization, temperature and clocks over time, from what telemetry has sampled."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
from plotly import express

from service.report import labels as names
from service.report.charts import MAX_SERIES, PALETTE, Figure, add_band, draw, figure
from service.report.run_records import History
from service.report.timeline import clock
from trainables.rundir import final_names

HARDWARE = (
    ("utilization", "GPU utilization", r"gpu\d+/util", "pct", "%", True),
    ("temperature", "GPU temperature", r"gpu\d+/temperature", "c", "°C", False),
    ("clocks", "GPU clocks (SM)", r"gpu\d+/sm_clock", "mhz", "MHz", False),
    ("cpu", "CPU use of the nodes", "cpu", "pct", "%", True),
)
"""Figure, title, metric of a node, its unit there and here, and whether the axis begins at zero."""


def hardware(histories: Sequence[History]) -> list[Figure]:
    """What GPUs and nodes did, a point per epoch or, of a timing trial, a point per trial."""
    samples = [
        {"time_ms": one["time_ms"], "what": h.label, **final_names(one["metrics"])}
        for h in histories
        for one in h.of("epoch") or h.of("summary")
    ]
    if not samples:
        return []
    wide = pd.DataFrame(samples).sort_values("time_ms", kind="stable")
    at_s = (wide["time_ms"] - min(h.start_ms for h in histories if h.lines)) / 1e3
    unit, factor = clock(at_s.iloc[-1])
    when = f"{unit} since the start"
    wide = pd.concat([wide, (at_s / factor).rename(when)], axis="columns")
    found = []
    for id, title, metric, ending, of, from_zero in HARDWARE:
        form = re.compile(rf"(node\d+.*)/[a-z_]+_{ending}")
        matches = [form.fullmatch(name) for name in map(str, wide) if re.fullmatch(rf"node\d+/{metric}_{ending}", name)]
        series = {match[0]: match[1] for match in matches if match}
        if not series:
            continue
        series = dict(sorted(series.items(), key=lambda item: names.natural(item[1])))
        long = wide.rename(columns=series).melt([when, "what"], list(series.values()), "where", of).dropna(subset=of)
        many = len(series) > MAX_SERIES
        if many:
            each = long.groupby(when)[of].agg(["min", "mean", "max"]).reset_index()
            each = each.rename(columns={"mean": of}).assign(where=f"mean of {len(series)}")
            plot = draw(express.line, each, when, of, "where", markers=False, zero=from_zero)
            add_band(plot, PALETTE[0], each[when].tolist(), each["min"].tolist(), each["max"].tolist())
        else:
            plot = draw(express.line, long, when, of, "where", tips=["what"], zero=from_zero)
            plot.update_traces(marker_size=6, line_width=1.5)
        numbers: Any = long.groupby("where", sort=False)[of].agg(["min", "mean", "max"])
        peaks = [wide.get(re.sub(rf"_{ending}$", f"_max_{ending}", name), pd.Series(dtype=float)).max() for name in series]
        caption = f"Means of each epoch or trial{', with the band from the lowest to the highest' if many else ''}."
        found.append(
            figure(
                id,
                f"{title} over time",
                f"{caption} From {long[of].min():,.0f} to {long[of].max():,.0f} {of}.",
                plot,
                numbers.set_axis(["lowest mean", "mean", "highest mean"], axis="columns").assign(peak=peaks).reset_index(),
                dict.fromkeys(["lowest mean", "mean", "highest mean", "peak"], 1),
                height=300,
            )
        )
    return found
