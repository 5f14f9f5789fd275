"""Format keys, points, metrics and numbers for the report."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report.records import value
from service.runs.result import TrialRow
from trainables.metrics.phases import ALL_PHASES

AXES = {GLOBAL_BATCH: "global batch", LOADER_WORKERS: "loader workers"}


class MetricLabel(NamedTuple):
    """How to format a metric: its unit, its digits, and the ratio that compares two trials, or "" for their difference."""

    unit: str
    digits: int
    compared: Literal["", "speed", "cost"] = ""

    @property
    def head(self) -> str:
        """The heading of a column: `top-1 %`, where a sentence has `97.25% top-1`."""
        return f"{self.unit.removeprefix('% ')} %" if self.unit.startswith("%") else self.unit


METRICS = {
    "images_per_s": MetricLabel("images/s", 1, "speed"),
    "epoch_s": MetricLabel("s/epoch", 2, "speed"),
    "epoch_wall_s": MetricLabel("s/epoch, wall time", 2, "speed"),
    "step_s": MetricLabel("s/step", 4, "speed"),
    "gpu_s_per_epoch": MetricLabel("GPU-s/epoch", 2, "cost"),
    "data_pct": MetricLabel("% data wait", 1),
    "top1_pct": MetricLabel("% top-1", 2),
    "top5_pct": MetricLabel("% top-5", 2),
    "best_top1_pct": MetricLabel("% best top-1", 2),
    "raw_top1_pct": MetricLabel("% top-1 without EMA", 2),
    "linear_top1_pct": MetricLabel("% linear probe", 2),
    "cka": MetricLabel("CKA with the teacher", 4),
    "cosine": MetricLabel("cosine with the teacher", 4),
    "val_loss": MetricLabel("validation loss", 4),
    "raw_cka": MetricLabel("CKA without EMA", 4),
    "raw_cosine": MetricLabel("cosine without EMA", 4),
    "raw_loss": MetricLabel("validation loss without EMA", 4),
    "time_to_accuracy_s": MetricLabel("s to the accuracy", 1, "speed"),
    "peak_memory_mib": MetricLabel("MiB peak memory", 0),
    "steps": MetricLabel("steps", 0),
}
DIGITS = {f"{side}{label.head}": label.digits for side in ("", "A ", "B ") for label in METRICS.values()} | {
    **dict.fromkeys(("± images/s", "duration s", "share %", "lowest mean", "mean", "highest mean", "peak"), 1),
    **dict.fromkeys(("training", "validation"), 4),
    **dict.fromkeys(("B ÷ A", "±", "p"), 3),
    "% of ideal": 0,
}
"""Digits of a column of numbers by its heading; others have 2."""

MIN_SHARE = 0.005  # of a step; sentences leave out shorter phases


def number(value: Any, digits: int = 2) -> str:
    """Format a number for a cell; a missing one is a dash."""
    return f"{value:,.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else "–"


def short(value: float) -> str:
    """Format a number with three significant digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def label(name: str) -> MetricLabel:
    """Return the label of a metric; its own name if METRICS has none."""
    return METRICS.get(name, MetricLabel(name, 3))


def metric(name: str, value: float) -> str:
    unit, digits, _ = label(name)
    return f"{number(value, digits)}{'' if unit.startswith('%') else ' '}{unit}"


def metrics_text(metrics: Mapping[str, float], names: Iterable[str]) -> str:
    """Format those of the named metrics that exist: `1,280.0 images/s, 12.50 s/epoch, 97.25% top-1`."""
    return ", ".join(metric(name, metrics[name]) for name in dict.fromkeys(names) if name in metrics)


def metric_cell(metrics: Mapping[str, float], name: str) -> str:
    """Format a metric for a cell; an epoch time projected from fewer steps has a star."""
    star = "*" if name == "epoch_s" and metrics.get("epoch_projected") else ""
    return number(metrics.get(name), label(name).digits) + star


def axis(key: str, unit: str) -> str:
    """Return an axis's name: words for the three axes of every sweep, else the key."""
    return f"{unit}s" if key == NUM_WORKERS else AXES.get(key, key)


def counted(count: Any, unit: str) -> str:
    """Format a count: 1 GPU, 2 GPUs."""
    return f"{count} {unit}" + ("s" if str(count) != "1" else "")


def at(key: str, value: Any, unit: str) -> str:
    """Format a value of an axis: 2 GPUs, batch 512, 4 loader workers, precision bf16."""
    if key in (NUM_WORKERS, LOADER_WORKERS):
        return counted(value, unit if key == NUM_WORKERS else "loader worker")
    return f"batch {value}" if key == GLOBAL_BATCH else f"{key} {value}"


def point(row: TrialRow, unit: str, extras: Sequence[str]) -> str:
    """Format a trial's point: 2 GPUs × batch 512 × 4 loader workers, precision bf16."""
    scale = " × ".join(at(key, value(row, key), unit) for key in SCALE_AXES)
    return ", ".join([scale, *(at(key, value(row, key), unit) for key in extras if key not in SCALE_AXES)])


def phase_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each recorded phase's share of a step, in the order of ALL_PHASES."""
    known = {phase: metrics[f"phase/{phase}_ms"] for phase in ALL_PHASES if f"phase/{phase}_ms" in metrics}
    step_ms = metrics.get("phase/step_ms") or sum(known.values()) or math.nan
    return {phase: ms / step_ms for phase, ms in known.items()}


def shares_text(metrics: Mapping[str, float]) -> str:
    """Format the shares, longest phase first: `student 45%, teacher 30%, data 25%`."""
    ranked = sorted(phase_shares(metrics).items(), key=lambda item: -item[1])
    return ", ".join(f"{phase} {share:.0%}" for phase, share in ranked if share >= MIN_SHARE)


def natural(text: str) -> list[int]:
    """Return a sort key that puts node2 before node10."""
    return [int(digits) for digits in re.findall(r"\d+", text)]
