"""The tables of a run or a sweep, for both the terminal and the page."""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report import labels as names
from service.report.records import Records, axes, by_speed, ended, ordered, searched_keys, step_error, value
from service.report.table import Shade, Table
from service.runs.result import RunResult, StageRow, TrialRow
from service.search.rows import probes
from trainables.metrics.phases import ALL_PHASES
from trainables.metrics.telemetry import decode_throttle

MAX_OPEN = 12  # rows, above which a table is folded
WAIT = "data wait s (min–max)"


def table_of(frame: pd.DataFrame, title: str, **options: Any) -> Table:
    """Format a frame as a table with these fields; missing values are dashes. Columns that hold words are left-aligned."""

    def cell(name: str, value: Any) -> str:
        return str(value) if isinstance(value, str | int) else names.number(value, names.DIGITS.get(name, 2))

    heads = list(map(str, frame.columns))
    columns = [[cell(name, value) for value in frame[name].tolist()] for name in heads]
    left = [name for name, cells in zip(heads, columns, strict=True) if any(re.search("[A-Za-z]{2}", each) for each in cells)]
    return Table(title, heads, list(zip(*columns, strict=True)), **{"left": left, **options})


def trial_frame(result: RunResult, rows: Sequence[TrialRow]) -> pd.DataFrame:
    """Return a row per trial: up to `duration s` the columns of its table, then more numbers for figures."""
    unit, keys, varied, best = result.unit, searched_keys(rows), axes(rows), result.best
    found = []
    for row in rows:
        m, error = row.metrics, step_error(row)
        again = f"measured {len(row.measurements)} times" if row.measurements else ""
        marks = ("oversubscribed" if row.oversubscribed else "", again, "← best" if best and row.id == best.id else "")
        mean, low, high = (names.number(m.get(f"phase/data{part}_ms", np.nan) / 1e3, 4) for part in ("", "_min", "_max"))
        found.append(
            {
                "trial": row.id,
                "status": " ".join(filter(None, (row.status, *marks))) + (f": {row.reason}" if row.reason else ""),
                **{names.axis(key, unit): str(value(row, key)) for key in keys},
                "images/s": m.get("images_per_s"),
                "top-1 %": m.get("top1_pct"),
                "s/epoch": names.metric_cell(m, "epoch_s") if "epoch_s" in m else None,
                "s/step": m.get("step_s"),
                WAIT: f"{mean} ({low}–{high})" if "phase/data_ms" in m else None,
                "data wait %": m.get("data_pct"),
                "± images/s": error * m["images_per_s"] if error and "images_per_s" in m else None,
                f"{unit}-s/epoch": m.get("gpu_s_per_epoch"),
                "duration s": row.seconds or None,
                "point": names.point(row, unit, varied),
                "num_workers": row.scale.num_workers,
                "batch": row.scale.global_batch_size,
                "latency ms": m.get("inference_ms"),
                **phase_ms(m),
            }
        )
    return pd.DataFrame(found)


def phase_ms(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase} ms": metrics.get(f"phase/{phase}_ms", np.nan) for phase in (*ALL_PHASES, "step")}


def trial_table(result: RunResult, rows: Sequence[TrialRow], title: str, *, last: str = "duration s") -> Table | None:
    """Tabulate trials up to the column `last`, with the best one marked; empty columns are dropped."""
    if not rows:
        return None
    fixed = [names.axis(key, result.unit) for key in SCALE_AXES if key not in result.space]
    return table_of(
        trial_frame(result, rows).loc[:, :last].dropna(axis="columns", how="all"),
        title,
        optional=(WAIT, "data wait %", "s/step", *fixed, "s/epoch"),
        marked=[index for index, row in enumerate(rows) if result.best is not None and row.id == result.best.id],
        folded=len(rows) > MAX_OPEN,
    )


def sweep_table(result: RunResult, only: Collection[str] | None = None) -> Table | None:
    """Tabulate the trials for the terminal, without untested points. `only` limits it to those that fit on the screen."""
    trials = [row for row in result.rows if row.status != "untested"]
    points, tried = probes(result.rows), probes(trials)
    count = f"{len(tried)} of {len(points)} points" if len(tried) < len(points) else names.counted(len(trials), "trial")
    shown = [row for row in trials if only is None or row.id in only]
    return trial_table(result, shown, f"{result.name}: {count} by {result.metric} ({result.mode})", last="data wait %")


def heat_table(records: Records) -> Table | None:
    """Tabulate images/s by workers × batch (down) and loader workers (across), or by workers and batch if those do not vary.

    A combination with several trials shows the best of the sweep, else the fastest, else the first that ended. None if fewer than
    two combinations have a trial that ended, or no trial has a speed.
    """
    best, unit, keys = records.best, records.result.unit, axes(records.rows)
    across_key = LOADER_WORKERS if LOADER_WORKERS in keys else GLOBAL_BATCH
    shown = [*(key for key in (NUM_WORKERS, GLOBAL_BATCH) if key != across_key), across_key]
    measured = by_speed(records.rows)
    tried = [*([best] if best else []), *measured, *ended(records.rows)]
    cells: dict[tuple[str, ...], TrialRow] = {}
    for row in tried:
        cells.setdefault(tuple(names.at(key, value(row, key), unit) for key in shown), row)
    if len(cells) < 2 or not measured:
        return None
    fastest = measured[0].metrics["images_per_s"]

    def heat(row: TrialRow | None) -> str | Shade:
        if row is None:
            return "–"
        images_per_s = row.metrics.get("images_per_s") or 0.0
        text, share = names.number(images_per_s, 1) if images_per_s else row.status, (images_per_s / fastest) ** 2
        if best is not None and row.id == best.id:
            return Shade(f"{text} ★", share, "best")
        return Shade(text, share, "" if share else "bad")

    *down, across = ([names.at(key, one, unit) for one in ordered(value(row, key) for row in tried)] for key in shown)
    rows = [
        [" × ".join(head), *(heat(cells.get((*head, column))) for column in across)]
        for head in itertools.product(*down)
        if any((*head, column) in cells for column in across)
    ]
    caption = "Images/s; the stronger the color, the faster; ★ is the best trial."
    if any("–" in row for row in rows):
        caption += " – has no result."
    if extras := [key for key in keys if key not in SCALE_AXES]:
        caption += f" Each cell is the fastest over {', '.join(extras)}."
    heads = [names.axis(key, unit) for key in shown]
    return Table(f"Images/s by {', '.join(heads[:-1])} and {heads[-1]}", ["", *across], rows, caption, left=[""], heads=True)


def settings(records: Records) -> Table:
    """Tabulate the values of the experiment with their sources."""

    def source(key: str) -> str:
        """Return the source of a key, or of its nearest parent that has one."""
        while key and key not in records.result.sources:
            key = key.rpartition(".")[0]
        return records.result.sources.get(key, "default")

    rows = [[key, str(item), source(key)] for key, item in records.experiment.items()]
    columns = ["key", "value", "from"]
    return Table(f"All {len(rows)} values", columns, rows, left=columns, folded=True)


def phase_table(metrics: Mapping[str, float], title: str) -> Table | None:
    """Tabulate the phases of a step: milliseconds, and share of the step. None if no step was timed."""
    parts = {"mean ms": "", "min": "_min", "p50": "_p50", "p95": "_p95", "max": "_max"}
    shares = names.phase_shares(metrics) | ({"step": 1.0} if "phase/step_ms" in metrics else {})
    rows = [
        {
            "phase": phase,
            **{head: metrics.get(f"phase/{phase}{part}_ms") for head, part in parts.items()},
            "share %": 100 * share,
        }
        for phase, share in shares.items()
    ]
    optional = ("min", "p50", "p95", "max")
    return table_of(pd.DataFrame(rows), title, optional=optional, folded=True) if rows else None


HARDWARE = {
    "busy %": ("util", "pct"),
    "memory MiB": ("memory", "mib"),
    "disk read MiB/s": ("disk_read", "mib_per_s"),
    "°C": ("temperature", "c"),
    "W": ("power", "w"),
    "SM MHz": ("sm_clock", "mhz"),
}
"""Column of `node_table` → name and unit of the metric."""


def node_table(metrics: Mapping[str, float], title: str) -> Table | None:
    """Tabulate the telemetry: a row per node and per GPU, means with the peak in parentheses. None if nothing was sampled."""
    rows = []
    for source in sorted({name.rpartition("/")[0] for name in metrics if re.match(r"node\d+/", name)}, key=names.natural):
        row: dict[str, str | None] = {"where": source}
        for head, (what, unit) in HARDWARE.items():
            field = "cpu" if what == "util" and "/gpu" not in source else what
            mean, peak = (metrics.get(f"{source}/{field}{part}_{unit}") for part in ("", "_max"))
            row[head] = f"{names.number(mean, 0)} ({names.number(peak, 0)})" if mean is not None else None
        reasons = decode_throttle(int(metrics.get(f"{source}/throttle_reasons", 0)))
        # an idle GPU and one with clocks set by the user are not throttled
        slowed = [reason for reason in reasons if reason not in ("gpu_idle", "applications_clocks_setting")]
        rows.append({**row, "slowed by": ", ".join(slowed) or None})
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    return table_of(frame, title, optional=[*HARDWARE][:0:-1]) if rows else None


STAGE_METRICS = (
    *("top1_pct", "top5_pct", "best_top1_pct", "linear_top1_pct", "cka", "cosine"),
    *("raw_top1_pct", "raw_cka", "raw_cosine", "images_per_s", "epoch_s", "steps"),
)


def stage_table(title: str, stages: Sequence[StageRow]) -> Table | None:
    """Tabulate the stages of a run."""
    rows = [
        {
            "stage": stage.stage,
            "model": stage.model,
            **{names.label(name).head: names.metric_cell(stage.metrics, name) for name in STAGE_METRICS if name in stage.metrics},
        }
        for stage in stages
    ]
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    return table_of(frame, title, optional=("steps", "top-5 %", "s/epoch")) if rows else None
