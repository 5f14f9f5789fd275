"""The tables that the terminal shows, made from `result.json` alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from trainables.phases import PHASES
from trainables.rundir import RunDir, read_lines
from trainables.telemetry import decode_throttle

SCALE = ("scale.num_workers", "data.global_batch_size", "data.loader_workers")


def number(value: Any, digits: int = 2) -> str:
    """A number for a cell; a dash where there is none."""
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "–"


def sweep_table(result: Mapping[str, Any]) -> Table:
    """One row a trial in the order of the space, the best one marked; what a guided search left out is not shown.

    Columns as users of distributed training read them: GPUs × batch × loader workers → s/step, of it data, images/s, s/epoch.
    """
    trials = [trial for trial in result["trials"] if trial["status"] != "untested"]
    count = f"{len(trials)} of {len(result['trials'])} points" if len(trials) < len(result["trials"]) else f"{len(trials)} trials"
    table = Table(title=f"{result['name']}: {count} by {result['metric']} ({result['mode']})", title_justify="left")
    extra = [key for key in result["space"] if key not in SCALE]
    left = ("trial", "GPUs" if result.get("use_gpu") else "procs", "batch", "workers", *extra)
    right = ("s/step", "data_s (min–max)", "data %", "images/s", "s/epoch", "top-1 %", "status")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name == "status" else "right", no_wrap=name != "status")
    best = (result.get("best") or {}).get("id")
    for trial in trials:
        m = trial.get("metrics") or {}
        notes = [
            trial["status"],
            "oversubscribed" if trial.get("oversubscribed") else "",
            "← best" if trial["id"] == best else "",
        ]
        table.add_row(
            trial["id"], *(str(trial["scale"][key]) for key in SCALE), *(str(trial["params"].get(key)) for key in extra),
            number(m.get("step_s"), 4), data_seconds(m), number(m.get("data_pct"), 1), number(m.get("images_per_s"), 1),
            epoch_seconds(m),
            number(m.get("top1_pct")), " ".join(filter(None, notes)) + (f": {trial['reason']}" if trial.get("reason") else ""),
            style="bold green" if trial["id"] == best else None,
        )  # fmt: skip
    return table


def data_seconds(m: Mapping[str, float]) -> str:
    """Mean seconds of a step that wait for data, with the least and the most."""
    if "phase/data_ms" not in m:
        return "–"
    mean, least, most = (m[f"phase/data{part}_ms"] / 1e3 for part in ("", "_min", "_max"))
    return f"{mean:.4f} ({least:.4f}–{most:.4f})"


def epoch_seconds(m: Mapping[str, float]) -> str:
    """Seconds an epoch takes; a star where that is projected from fewer steps."""
    return number(m.get("epoch_s")) + ("*" if m.get("epoch_projected") else "")


def phase_table(metrics: Mapping[str, float], title: str) -> Table:
    """Where a step's time goes: milliseconds per phase and their share of the step."""
    table = Table(title=title, title_justify="left")
    for name in ("phase", "mean ms", "min", "p50", "p95", "max", "share %"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    step = metrics.get("phase/step_ms") or float("nan")
    for phase in (*PHASES, "step"):
        mean = metrics.get(f"phase/{phase}_ms")
        if mean is not None:
            spread = (number(metrics.get(f"phase/{phase}_{name}_ms")) for name in ("min", "p50", "p95", "max"))
            table.add_row(phase, number(mean), *spread, number(100 * mean / step, 1))
    return table


def node_table(metrics: Mapping[str, float], title: str) -> Table | None:
    """What the hardware did: a row a node and a row a GPU, means with the most in brackets. None where nothing was sampled."""
    places = sorted({re.sub(r"/[^/]+$", "", name) for name in metrics if re.match(r"node\d+/", name)}, key=natural)
    if not places:
        return None
    table = Table(title=title, title_justify="left")
    columns = {"busy %": ("util", "pct"), "memory MiB": ("memory", "mib"), "disk read MiB/s": ("disk_read", "mib_per_s"),
               "°C": ("temperature", "c"), "W": ("power", "w"), "SM MHz": ("sm_clock", "mhz")}  # fmt: skip
    for name in ("where", *columns, "slowed by"):
        table.add_column(name, justify="left" if name in ("where", "slowed by") else "right")
    for place in places:
        cells = []
        for what, unit in columns.values():
            field = "cpu" if what == "util" and "/gpu" not in place else what
            mean, most = (metrics.get(f"{place}/{field}{part}_{unit}") for part in ("", "_max"))
            cells.append(f"{number(mean, 0)} ({number(most, 0)})" if mean is not None else "–")
        bits = int(metrics.get(f"{place}/throttle_reasons", 0))
        # A GPU without work and one whose clocks were set by hand were not held back.
        slowed = [name for name in decode_throttle(bits) if name not in ("gpu_idle", "applications_clocks_setting")]
        table.add_row(place, *cells, ", ".join(slowed) or "–")
    return table


def natural(place: str) -> list[int]:
    """Sort key: node2 before node10."""
    return [int(digits) for digits in re.findall(r"\d+", place)]


def measured(metrics: Mapping[str, float], who: str) -> list[Table]:
    """Where the time went, and what the nodes did meanwhile."""
    tables = (phase_table(metrics, f"a step of {who}"), node_table(metrics, f"the hardware under {who}: mean (most)"))
    return [table for table in tables if table is not None]


def stage_table(result: Mapping[str, Any]) -> Table:
    """One row a stage of a `train` run."""
    table = Table(title=result["name"], title_justify="left")
    for name in ("stage", "model", "top-1 %", "top-5 %", "best top-1 %", "images/s", "s/epoch", "steps"):
        table.add_column(name, justify="left" if name in ("stage", "model") else "right")
    for stage in result["stages"]:
        m = stage["metrics"]
        table.add_row(
            stage["stage"], stage["model"], *(number(m.get(name)) for name in ("top1_pct", "top5_pct", "best_top1_pct")),
            number(m.get("images_per_s"), 1), epoch_seconds(m), number(m.get("steps"), 0),
        )  # fmt: skip
    return table


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Sentences under a sweep's table: which configuration won and where its step's time goes."""
    best = result.get("best")
    if not best:
        return ["no trial is complete: nothing to compare yet"]
    m, scale = best["metrics"], best["scale"]
    count = scale["scale.num_workers"]
    one = "GPU" if result.get("use_gpu") else "worker"
    who = one + "s" * (count != 1)
    lines = [
        f"best: trial {best['id']} with {count} {who} × batch {scale['data.global_batch_size']} × "
        f"{scale['data.loader_workers']} loader workers: {number(m.get('images_per_s'), 1)} images/s, "
        f"{number(m.get('epoch_s'))} s an epoch" + (f", top-1 {number(m.get('top1_pct'))}%" if "top1_pct" in m else "")
    ]
    shares = {phase: m[f"phase/{phase}_ms"] for phase in PHASES if m.get(f"phase/{phase}_ms")}
    total = m.get("phase/step_ms") or sum(shares.values())
    if shares and total:
        ranked = sorted(shares.items(), key=lambda item: -item[1])
        lines.append("its step: " + ", ".join(f"{phase} {100 * ms / total:.0f}%" for phase, ms in ranked))
    if (search := result.get("search")) and result["metric"] == "pareto":
        lines += ["the front of speed and cost:", *(on_the_front(result, id) for id in search["front"])]
    if search:
        lines.append(f"searched with {search['spent_gpu_s']:,.0f} {one}-seconds: {search['why']}")
    if any((trial.get("metrics") or {}).get("epoch_projected") for trial in result["trials"]):
        lines.append("* projected from fewer steps than an epoch has")
    if any(trial.get("oversubscribed") for trial in result["trials"]):
        lines.append(
            "oversubscribed: the trial reserved more CPUs than this machine has; its times say little about a real cluster"
        )
    return lines


def on_the_front(result: Mapping[str, Any], id: str) -> str:
    """What a trial on the front of speed and cost is and gives."""
    trial = next(trial for trial in result["trials"] if trial["id"] == id)
    m, (workers, batch, threads) = trial["metrics"], (trial["scale"][key] for key in SCALE)
    speed, cost = number(m["images_per_s"], 1), number(m["gpu_s_per_epoch"], 0)
    return f"  {id}: {workers} × batch {batch} × {threads} loader workers: {speed} images/s for {cost} GPU-seconds an epoch"


def report_of(result: Mapping[str, Any], run_dir: RunDir) -> list[Any]:
    """Everything `distill report` shows of a run directory, finished or not: renderables and lines."""
    parts: list[Any] = [
        f"{result['kind']} {result['name']} in {run_dir.root}: {result['status']} {result.get('reason') or ''}".rstrip()
    ]
    if result["kind"] == "sweep" and "trials" in result:
        parts += [sweep_table(result), *verdict(result)]
        if result.get("best"):
            parts += measured(result["best"]["metrics"], f"trial {result['best']['id']}")
    elif result.get("stages"):
        parts.append(stage_table(result))
        for stage in result["stages"]:
            parts += measured(stage["metrics"], f"the {stage['stage']}") if stage["metrics"] else []
    if result["status"] != "complete":
        for path in sorted(run_dir.root.rglob("metrics.jsonl")):
            if lines := read_lines(path):
                m = lines[-1]["metrics"]
                where, speed = path.parent.relative_to(run_dir.root), number(m.get("images_per_s"), 1)
                parts.append(f"{where}: step {lines[-1]['step']}, {speed} images/s")
        parts.append(f"continue it with: distill resume {run_dir.root}")
    return parts
