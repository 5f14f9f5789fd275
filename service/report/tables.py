"""The tables of a run or a sweep, for both the terminal and the page."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence

import pandas as pd

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report import labels as names
from service.report.records import Records, Row, axes, ended, gpu_s_per_epoch, ordered, ran, value
from service.report.table import Shade, Table
from service.runs.result import RunResult, StageRow
from service.search.rows import probes
from trainables.metrics.telemetry import decode_throttle

BAD = ("failed", "oom", "infeasible", "stopped")
MAX_OPEN = 12  # rows, above which a table is folded
WAIT = "data wait s (min–max)"
TRIAL_METRICS = ("images_per_s", "top1_pct", "epoch_s", "step_s")


def trial_cells(row: Row, result: RunResult, on_page: bool) -> dict[str, str]:
    """Return a trial's cells by column: its point, status, speed, accuracy, cost, and data wait per step."""
    m, unit = row.metrics, result.unit
    keys = {key: names.axis(key, unit) for key in (*SCALE_AXES, *result.space)} | {GLOBAL_BATCH: "batch"}
    again = f"measured {len(row.measurements)} times" if row.measurements else ""
    best = "← best" if result.best is not None and row.id == result.best.id else ""
    status = " ".join(filter(None, (row.status, "oversubscribed" if row.oversubscribed else "", again, best)))
    shown = {names.label(name).head: names.metric_cell(m, name) for name in TRIAL_METRICS}
    wait_s = [names.number(m.get(f"phase/data{part}_ms", math.nan) / 1e3, 4) for part in ("", "_min", "_max")]
    return {
        "trial": row.id,
        "status": status if on_page or not row.reason else f"{status}: {row.reason}",
        **{head: str(value(row, key)) for key, head in keys.items()},
        "images/s": shown.pop("images/s"),
        **({"±": names.short(row.error * speed(row)) if row.error and speed(row) else "–"} if on_page else {}),
        **shown,
        WAIT: f"{wait_s[0]} ({wait_s[1]}–{wait_s[2]})" if "phase/data_ms" in m else "–",
        "data wait %": names.metric_cell(m, "data_pct"),
        **({f"{unit}-s/epoch": names.number(gpu_s_per_epoch(row))} if on_page else {}),
        **({"duration s": names.number(row.seconds or None, 1), "reason": row.reason} if on_page else {}),
    }


def trial_table(result: RunResult, rows: Sequence[Row], title: str, *, on_page: bool = True) -> Table:
    """Tabulate trials with the best one marked; empty columns are dropped."""
    frame = pd.DataFrame([trial_cells(row, result, on_page) for row in rows])
    frame = frame.loc[:, ~frame.isin(["", "–"]).all()]
    heads: list[str] = frame.columns.tolist()
    fixed = [names.axis(key, result.unit) for key in SCALE_AXES if key not in result.space]
    return Table(
        title,
        heads,
        frame.to_numpy().tolist(),
        left=["status", "reason", *(head for head in heads if frame[head].str[:1].str.isalpha().any())],
        optional=[WAIT, "data wait %", "s/step", *(head.replace("global batch", "batch") for head in fixed), "s/epoch"],
        marked=[index for index, row in enumerate(rows) if result.best is not None and row.id == result.best.id],
        folded=len(rows) > MAX_OPEN,
    )


def sweep_table(result: RunResult, rows: Sequence[Row], only: Collection[str] | None = None) -> Table:
    """Tabulate the trials for the terminal, without untested points. `only` limits it to those that fit on the screen."""
    trials = [row for row in rows if row.status != "untested"]
    points, tried = probes(rows), probes(trials)
    count = f"{len(tried)} of {len(points)} points" if len(tried) < len(points) else names.counted(len(trials), "trial")
    shown = [row for row in trials if only is None or row.id in only]
    return trial_table(result, shown, f"{result.name}: {count} by {result.metric} ({result.mode})", on_page=False)


def page_trials(records: Records) -> Table | None:
    tried = [row for row in records.rows if row.status != "untested"]
    return trial_table(records.result, tried, f"All {names.counted(len(tried), 'trial')}") if tried else None


def bad_trials(records: Records) -> Table | None:
    """Tabulate failed, infeasible and stopped trials with their reasons."""
    rows = [row for row in records.rows if row.status in BAD]
    return trial_table(records.result, rows, f"{names.counted(len(rows), 'trial')} and their reasons") if rows else None


def speed(row: Row) -> float:
    """Return a trial's images/s, or 0 without one."""
    return float(row.metrics.get("images_per_s") or 0.0)


def heat_table(records: Records) -> Table | None:
    """Tabulate images/s by workers × batch (down) and loader workers (across), or by workers and batch if those do not vary.

    A combination with several trials shows the best of the sweep, else the fastest, else the first that ended. None if fewer than
    two combinations have a trial that ended, or no trial has a speed.
    """
    best, unit, keys = records.best, records.result.unit, axes(records.rows)
    across_key = LOADER_WORKERS if LOADER_WORKERS in keys else GLOBAL_BATCH
    shown = [*(key for key in (NUM_WORKERS, GLOBAL_BATCH) if key != across_key), across_key]
    tried = [*([best] if best else []), *sorted(ran(records.rows), key=speed, reverse=True), *ended(records.rows)]
    cells: dict[tuple[str, ...], Row] = {}
    for row in tried:
        cells.setdefault(tuple(names.at(key, value(row, key), unit) for key in shown), row)
    if len(cells) < 2 or not ran(records.rows):
        return None
    fastest = max(map(speed, tried))

    def heat(row: Row | None) -> str | Shade:
        if row is None:
            return "–"
        text, share = names.number(speed(row), 1) if speed(row) else row.status, (speed(row) / fastest) ** 2
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
        pending = any(row.status == "pending" for row in records.rows)
        caption += " – has no result yet." if pending else " – was not tried."
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
    columns = {"mean ms": "", "min": "_min", "p50": "_p50", "p95": "_p95", "max": "_max"}
    shares = names.phase_shares(metrics) | ({"step": 1.0} if "phase/step_ms" in metrics else {})
    rows = [
        [
            phase,
            *(names.number(metrics.get(f"phase/{phase}{part}_ms")) for part in columns.values()),
            names.number(100 * share, 1),
        ]
        for phase, share in shares.items()
    ]
    heads = ["phase", *columns, "share %"]
    return Table(title, heads, rows, left=["phase"], optional=("min", "p50", "p95", "max"), folded=True) if rows else None


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
    sources = sorted({name.rpartition("/")[0] for name in metrics if re.match(r"node\d+/", name)}, key=names.natural)
    rows = []
    for source in sources:
        cells = []
        for what, unit in HARDWARE.values():
            field = "cpu" if what == "util" and "/gpu" not in source else what
            mean, peak = (metrics.get(f"{source}/{field}{part}_{unit}") for part in ("", "_max"))
            cells.append(f"{names.number(mean, 0)} ({names.number(peak, 0)})" if mean is not None else "–")
        reasons = decode_throttle(int(metrics.get(f"{source}/throttle_reasons", 0)))
        # an idle GPU and one with clocks set by the user are not throttled
        slowed = [reason for reason in reasons if reason not in ("gpu_idle", "applications_clocks_setting")]
        rows.append([source, *cells, ", ".join(slowed) or "–"])
    columns = ["where", *HARDWARE, "slowed by"]
    return Table(title, columns, rows, left=["where", "slowed by"], optional=[*HARDWARE][:0:-1]) if rows else None


STAGE_METRICS = (
    *("top1_pct", "top5_pct", "best_top1_pct", "linear_top1_pct", "cka", "cosine"),
    *("raw_top1_pct", "raw_cka", "raw_cosine", "images_per_s", "epoch_s", "steps"),
)


def stage_table(title: str, stages: Sequence[StageRow]) -> Table:
    """Tabulate the stages of a run."""
    shown = [name for name in STAGE_METRICS if any(name in stage.metrics for stage in stages)]
    rows = [[stage.stage, stage.model, *(names.metric_cell(stage.metrics, name) for name in shown)] for stage in stages]
    columns = ["stage", "model", *(names.label(name).head for name in shown)]
    return Table(title, columns, rows, left=["stage", "model"], optional=["steps", "top-5 %", "s/epoch"])
