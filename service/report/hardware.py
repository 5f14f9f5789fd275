"""What GPUs and nodes did while a run went on: utilisation, temperature and clocks over time, from what telemetry has sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from service.report import labels as names
from service.report.plotly_marks import DASHES, MOST_SERIES, PALETTE, SYMBOLS, Figure, Trace, band, dots, hover, line, y_axis
from service.report.run_records import History
from service.report.timeline import clock
from trainables.rundir import final_names

HARDWARE = (
    ("utilisation", "GPU utilisation", "util_pct", "%", True),
    ("temperature", "GPU temperature", "temperature_c", "°C", False),
    ("clocks", "GPU clocks (SM)", "sm_clock_mhz", "MHz", False),
    ("cpu", "CPU use of the nodes", "cpu_pct", "%", True),
)


def hardware(histories: Sequence[History]) -> list[Figure]:
    """What GPUs and nodes did, a point an epoch or, of a timing trial, a point a trial."""
    samples = []
    for h in histories:
        told = h.of("epoch") or h.of("summary")
        samples += [(float(one["time_ms"]), h.label, final_names(one["metrics"])) for one in told]
    samples.sort(key=lambda sample: sample[0])
    if not samples:
        return []
    begin = min(h.start_ms for h in histories if h.lines)
    xs, unit = clock((at - begin) / 1e3 for at, _, _ in samples)
    figures = []
    for name, title, field, measure, zero in HARDWARE:
        form = re.compile(r"node\d+/gpu\d+/" + field if name != "cpu" else r"node\d+/" + field)
        places = sorted({key for _, _, m in samples for key in m if form.fullmatch(key)}, key=names.natural)
        if places:
            figures.append(_over_clock(name, title, places, samples, xs, unit, measure, zero))
    return figures


def _over_clock(
    name: str, title: str, places: list[str], samples: Sequence[tuple[float, str, Mapping[str, float]]], xs: list[float],
    unit: str, measure: str, zero: bool,
) -> Figure:  # fmt: skip
    """One measure of every GPU or node; of many, their mean between the lowest and the highest."""
    traces: list[Trace] = []
    table = []
    for place in places:
        held = [m[place] for _, _, m in samples if place in m]
        most = place.replace(measure_of(place), f"_max{measure_of(place)}")
        peaks = [m[most] for _, _, m in samples if most in m]
        table.append([place.rpartition("/")[0], *(names.number(one, 1) for one in (min(held), sum(held) / len(held), max(held))),
                      names.number(max(peaks, default=None), 1)])  # fmt: skip
    if len(places) <= MOST_SERIES:
        for number, place in enumerate(places):
            told = [(x, m[place], label) for x, (_, label, m) in zip(xs, samples, strict=True) if place in m]
            where = place.rpartition("/")[0]
            traces.append(
                dots(where, number, [x for x, _, _ in told], [y for _, y, _ in told],
                     [hover(where, label, f"{y:.0f} {measure}") for _, y, label in told])
                | {"mode": "lines+markers", "line": {"color": PALETTE[number], "dash": DASHES[number], "width": 1.5},
                   "marker": {"color": PALETTE[number], "symbol": SYMBOLS[number], "size": 6}}
            )  # fmt: skip
    else:
        every = [(x, [m[place] for place in places if place in m]) for x, (_, _, m) in zip(xs, samples, strict=True)]
        every = [(x, held) for x, held in every if held]
        at = [x for x, _ in every]
        traces.append(band(PALETTE[0], at, [min(held) for _, held in every], [max(held) for _, held in every]))
        traces.append(line(f"mean of {len(places)}", 0, at, [sum(held) / len(held) for _, held in every]))
    caption = "Means of each epoch or trial" + (
        ", with the band from the lowest to the highest." if len(places) > MOST_SERIES else "."
    )
    lowest, highest = (pick(float(row[place].replace(",", "")) for row in table) for pick, place in ((min, 1), (max, 3)))
    return Figure(
        name, f"{title} over time", f"{caption} From {lowest:,.0f} to {highest:,.0f} {measure}.", traces,
        {"xaxis": {"title": {"text": f"{unit} since the start"}}, "yaxis": y_axis(measure, zero)},
        ["where", "lowest mean", "mean", "highest mean", "peak"], table, height=300,
    )  # fmt: skip


def measure_of(place: str) -> str:
    """The unit that ends a telemetry name: `_pct`, `_c`, `_mhz`."""
    return "_" + place.rpartition("_")[2]
