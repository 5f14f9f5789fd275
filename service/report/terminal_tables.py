"""The tables that the terminal shows, made from `result.json` alone."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from rich.table import Table

from service.config.space import SCALE_AXES
from service.report.labels import epoch_seconds_text, natural, number
from service.report.phase_shares import PhaseShare, phase_shares
from service.report.run_records import hangs_of, rows_of, teacher_lines
from service.report.seeds import seed_table, seeds_sentence
from service.report.text_table import text_table
from service.report.under_way import UnderWay
from service.report.winner import command
from service.report.winner import lines as sentences
from service.runs.result import RunResult
from service.runs.run_log import read_log
from service.runs.stored.stored_runs import display_name
from service.search.rows import probes
from trainables.metrics.telemetry import decode_throttle
from trainables.rundir import RunDir

__all__ = ["number", "report_of", "sweep_table", "verdict"]


def sweep_table(result: RunResult, only: Collection[str] | None = None) -> Table:
    """One row a trial in the order of the space, the best one marked; what a guided search left out is not shown.

    `only`: the trials that there is room for.

    Columns: what it ran on (workers × batch × loader workers), images/s and top-1, s/epoch, s/step and what of it waits for data.
    """
    trials = [trial for trial in result.rows if trial.status != "untested"]
    points, tried = probes(result.rows), probes(trials)
    count = f"{len(tried)} of {len(points)} points" if len(tried) < len(points) else f"{len(trials)} trials"
    extra = [key for key in result.space if key not in SCALE_AXES]
    axes = dict(zip(SCALE_AXES, ("GPUs" if result.use_gpu else "workers", "batch", "loader workers"), strict=True))
    measures = ("images/s", "top-1 %", "s/epoch", "s/step", "data_s (min–max)", "data %", "status")
    table = text_table(
        f"{result.name}: {count} by {result.metric} ({result.mode})",
        ("trial", *axes.values(), *extra, *measures),
        left=("status",),
        optional=("data_s (min–max)", "data %", "s/step", *(axes[key] for key in axes if key not in result.space), "s/epoch"),
    )
    best = result.best.id if result.best else None
    for trial in trials:
        if only is not None and trial.id not in only:
            continue
        m = trial.metrics or {}
        notes = [
            trial.status,
            "oversubscribed" if trial.oversubscribed else "",
            f"measured {len(again)} times" if (again := trial.measurements) else "",
            "← best" if trial.id == best else "",
        ]
        table.add_row(
            trial.id,
            *(str(trial.scale.by_key[key]) for key in SCALE_AXES),
            *(str(trial.params.get(key)) for key in extra),
            number(m.get("images_per_s"), 1),
            number(m.get("top1_pct")),
            epoch_seconds_text(m),
            number(m.get("step_s"), 4),
            data_seconds(m),
            number(m.get("data_pct"), 1),
            " ".join(filter(None, notes)) + (f": {trial.reason}" if trial.reason else ""),
            style="bold green" if trial.id == best else None,
        )
    return table


def data_seconds(m: Mapping[str, float]) -> str:
    """Mean seconds of a step that wait for data, with the least and the most."""
    if "phase/data_ms" not in m:
        return "–"
    mean, least, most = (m[f"phase/data{part}_ms"] / 1e3 for part in ("", "_min", "_max"))
    return f"{mean:.4f} ({least:.4f}–{most:.4f})"


def phase_table(metrics: Mapping[str, float], title: str) -> Table | None:
    """Where a step's time goes: milliseconds per phase and their share of the step. None where no step was timed."""
    rows = []
    step = [PhaseShare("step", metrics["phase/step_ms"], 1.0)] if "phase/step_ms" in metrics else []
    for phase, mean_ms, share in [*phase_shares(metrics), *step]:
        spread = (number(metrics.get(f"phase/{phase}_{name}_ms")) for name in ("min", "p50", "p95", "max"))
        rows.append([phase, number(mean_ms), *spread, number(100 * share, 1)])
    if not rows:
        return None
    return text_table(
        title,
        ["phase", "mean ms", "min", "p50", "p95", "max", "share %"],
        rows,
        left=("phase",),
        optional=("min", "p50", "p95", "max"),
    )


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
    """What the hardware did: a row a node and a row a GPU, means with the most in brackets. None where nothing was sampled."""
    names = sorted({re.sub(r"/[^/]+$", "", name) for name in metrics if re.match(r"node\d+/", name)}, key=natural)
    if not names:
        return None
    rows = []
    for name in names:
        cells = []
        for what, unit in HARDWARE.values():
            field = "cpu" if what == "util" and "/gpu" not in name else what
            mean, most = (metrics.get(f"{name}/{field}{part}_{unit}") for part in ("", "_max"))
            cells.append(f"{number(mean, 0)} ({number(most, 0)})" if mean is not None else "–")
        bits = int(metrics.get(f"{name}/throttle_reasons", 0))
        # A GPU without work and one whose clocks were set by hand were not held back.
        slowed = [name for name in decode_throttle(bits) if name not in ("gpu_idle", "applications_clocks_setting")]
        rows.append([name, *cells, ", ".join(slowed) or "–"])
    return text_table(title, ["where", *HARDWARE, "slowed by"], rows, left=("where", "slowed by"), optional=[*HARDWARE][:0:-1])


def measured(metrics: Mapping[str, float], who: str) -> list[Table]:
    """Where the time went, and what the nodes did meanwhile."""
    tables = (phase_table(metrics, f"a step of {who}"), node_table(metrics, f"the hardware under {who}: mean (most)"))
    return [table for table in tables if table is not None]


def stage_table(result: RunResult) -> Table:
    """One row a stage of a `train` run."""
    learned = {"top-1 %": ("top1_pct", 2), "top-5 %": ("top5_pct", 2), "best top-1 %": ("best_top1_pct", 2)}
    if any("cka" in stage.metrics for stage in result.stages):
        learned |= {"linear probe %": ("linear_top1_pct", 2), "CKA": ("cka", 4)}
    columns = ["stage", "model", *learned, "images/s", "s/epoch", "steps"]
    rows = []
    for stage in result.stages:
        m = stage.metrics
        accuracies = (number(m.get(name), digits) for name, digits in learned.values())
        speed, steps = number(m.get("images_per_s"), 1), number(m.get("steps"), 0)
        rows.append([stage.stage, stage.model, *accuracies, speed, epoch_seconds_text(m), steps])
    return text_table(result.name, columns, rows, left=("stage", "model"), optional=("steps", "top-5 %", "s/epoch"))


def verdict(result: RunResult) -> list[str]:
    """Sentences under a sweep's table: which configuration won, why, where its step's time goes, and how sure that is."""
    return sentences(result, rows_of(result))


def report_of(result: RunResult, run_dir: RunDir) -> list[Any]:
    """Everything `distill report` shows of a run directory, finished or not: renderables and lines."""
    parts = [*overview(result, run_dir), *note_lines(result)]
    if result.kind == "sweep" and result.best:
        parts += measured(result.best.metrics, f"trial {result.best.id}")
        parts.append(f"train at that point: {command(run_dir.root, result.best)}")
    for stage in result.stages:
        parts += measured(stage.metrics, f"the {stage.stage}") if stage.metrics else []
    parts += hangs_of(read_log(run_dir))
    if result.status != "complete":
        parts += UnderWay(run_dir).lines()
    if result.status in ("interrupted", "failed"):
        parts.append(f"continue it with: distill resume {display_name(run_dir.root)}")
    return parts


def note_lines(result: RunResult) -> list[str]:
    return [f"note: {line}" for line in result.notes]


def overview(result: RunResult, run_dir: RunDir, only: Collection[str] | None = None) -> list[Any]:
    """How a run stands: its trials and what they say, or its stages. `only`: as in `sweep_table`."""
    parts: list[Any] = [
        f"{result.kind} {result.name} in {display_name(run_dir.root)}: {result.status} {result.reason or ''}".rstrip()
    ]
    if result.trials is not None:
        parts += compared(result, only)
    elif result.stages:
        parts.append(stage_table(result))
    return parts + teacher_lines(result)


def compared(result: RunResult, only: Collection[str] | None = None) -> list[Any]:
    """A sweep's trials, what its points are over several seeds, and what that says. `only`: as in `sweep_table`."""
    over_seeds = seed_table(result)
    return [sweep_table(result, only), *([over_seeds] if over_seeds else []), *verdict(result), *seeds_sentence(result)]
