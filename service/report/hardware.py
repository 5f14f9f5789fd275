"""What GPUs and nodes did while a run went on: utilisation, temperature and clocks over time, from what telemetry has sampled."""

import re
import statistics
from collections.abc import Mapping, Sequence

from service.report import labels as names
from service.report.plotly_marks import DASHES, MOST_SERIES, PALETTE, SYMBOLS, Figure, Trace, band, dots, hover, line, y_axis
from service.report.run_records import History
from service.report.timeline import clock
from trainables.rundir import final_names

Sample = tuple[float, str, Mapping[str, float]]
"""Unix ms, the label of its history, and the metrics by their names."""
HARDWARE = (
    ("utilisation", "GPU utilisation", "util_pct", "%", True),
    ("temperature", "GPU temperature", "temperature_c", "°C", False),
    ("clocks", "GPU clocks (SM)", "sm_clock_mhz", "MHz", False),
    ("cpu", "CPU use of the nodes", "cpu_pct", "%", True),
)


def hardware(histories: Sequence[History]) -> list[Figure]:
    """What GPUs and nodes did, a point an epoch or, of a timing trial, a point a trial."""
    samples: list[Sample] = []
    for h in histories:
        lines = h.of("epoch") or h.of("summary")
        samples += [(float(one["time_ms"]), h.label, final_names(one["metrics"])) for one in lines]
    samples.sort(key=lambda sample: sample[0])
    if not samples:
        return []
    begin = min(h.start_ms for h in histories if h.lines)
    unit, factor = clock((samples[-1][0] - begin) / 1e3)
    xs = [(at - begin) / 1e3 / factor for at, _, _ in samples]
    figures = []
    for figure_name, title, field, unit_of_field, from_zero in HARDWARE:
        form = re.compile(r"node\d+/gpu\d+/" + field if figure_name != "cpu" else r"node\d+/" + field)
        series = sorted({key for _, _, m in samples for key in m if form.fullmatch(key)}, key=names.natural)
        if not series:
            continue
        values = {name: [m[name] for _, _, m in samples if name in m] for name in series}
        lowest, highest = min(map(min, values.values())), max(map(max, values.values()))
        many = len(series) > MOST_SERIES
        caption = f"Means of each epoch or trial{', with the band from the lowest to the highest' if many else ''}."
        figures.append(
            Figure(
                figure_name,
                f"{title} over time",
                f"{caption} From {lowest:,.0f} to {highest:,.0f} {unit_of_field}.",
                _mean_and_band(series, samples, xs) if many else _lines(series, samples, xs, unit_of_field),
                {"xaxis": {"title": {"text": f"{unit} since the start"}}, "yaxis": y_axis(unit_of_field, from_zero)},
                ["where", "lowest mean", "mean", "highest mean", "peak"],
                [_row(name, values[name], samples) for name in series],
                height=300,
            )
        )
    return figures


def _row(name: str, values: Sequence[float], samples: Sequence[Sample]) -> list[str]:
    """Lowest, mean and highest value of a series, and its peak between samples."""
    what, _, unit = name.rpartition("_")
    peaks = [m[peak] for _, _, m in samples if (peak := f"{what}_max_{unit}") in m]
    numbers = (min(values), statistics.fmean(values), max(values), max(peaks, default=None))
    return [name.rpartition("/")[0], *(names.number(number, 1) for number in numbers)]


def _lines(series: Sequence[str], samples: Sequence[Sample], xs: Sequence[float], unit: str) -> list[Trace]:
    """A line for each GPU or node."""
    traces = []
    for index, name in enumerate(series):
        points = [(x, m[name], label) for x, (_, label, m) in zip(xs, samples, strict=True) if name in m]
        where = name.rpartition("/")[0]
        tips = [hover(where, label, f"{y:.0f} {unit}") for _, y, label in points]
        style = {
            "mode": "lines+markers",
            "line": {"color": PALETTE[index], "dash": DASHES[index], "width": 1.5},
            "marker": {"color": PALETTE[index], "symbol": SYMBOLS[index], "size": 6},
        }
        traces.append(dots(where, index, [x for x, _, _ in points], [y for _, y, _ in points], tips) | style)
    return traces


def _mean_and_band(series: Sequence[str], samples: Sequence[Sample], xs: Sequence[float]) -> list[Trace]:
    """The mean of many series, and the band between the lowest and the highest."""
    per_sample = [(x, [m[name] for name in series if name in m]) for x, (_, _, m) in zip(xs, samples, strict=True)]
    per_sample = [(x, values) for x, values in per_sample if values]
    at = [x for x, _ in per_sample]
    return [
        band(PALETTE[0], at, [min(values) for _, values in per_sample], [max(values) for _, values in per_sample]),
        line(f"mean of {len(series)}", 0, at, [statistics.fmean(values) for _, values in per_sample]),
    ]
