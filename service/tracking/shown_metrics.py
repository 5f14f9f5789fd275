"""Which metrics MLflow shows of a run or trial, and with how many digits. The run's folder has all of them in full.

Metrics of an epoch have the names of a stage's final metrics (`final_names`), hardware metrics have MLflow's names.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from trainables.metrics.phases import ALL_PHASES
from trainables.rundir import final_names


class Shown(NamedTuple):
    """How a metric is shown: its decimals, and whether it is sent for each epoch and for stages before the student."""

    decimals: int
    each_epoch: bool = False
    each_stage: bool = False


SHOWN = {
    "images_per_s": Shown(1, each_epoch=True, each_stage=True),
    "top1_pct": Shown(2, each_epoch=True, each_stage=True),
    "epoch_s": Shown(3),
    "data_pct": Shown(1),
    "top5_pct": Shown(2, each_epoch=True),
    "cka": Shown(4, each_epoch=True),
    "cosine": Shown(4, each_epoch=True),
    "linear_top1_pct": Shown(2),
    "val_loss": Shown(4, each_epoch=True),
    "raw_top1_pct": Shown(2, each_epoch=True),
    **{f"raw_{name}": Shown(4, each_epoch=True) for name in ("cka", "cosine", "loss")},
    "train/loss": Shown(4, each_epoch=True, each_stage=True),
    "train/task_loss": Shown(4, each_epoch=True),
    "train/distill_loss": Shown(4, each_epoch=True),
    "best_top1_pct": Shown(2, each_stage=True),
    "best_epoch": Shown(0),
    "teacher_top1_pct": Shown(2),
    "time_to_accuracy_s": Shown(1),
    "steps_to_accuracy": Shown(0),
    "gpu_s_per_epoch": Shown(3),
    "epoch_projected": Shown(0),
    "epoch_wall_s": Shown(3),
    "wall_s": Shown(1, each_stage=True),
    "step_s": Shown(5),
    "steps": Shown(0),
    "peak_memory_mib": Shown(0),
    "inference_ms": Shown(3),
    "noise_scale": Shown(1),
    "skipped_images": Shown(0),
    **{f"phase/{phase}_ms": Shown(2) for phase in ("step", *ALL_PHASES, "allreduce", "allreduce_wait")},
}
"""In the order in which MLflow gets them."""

MIB_IN_MB = 2**20 / 1e6
HARDWARE = {
    "cpu_pct": ("cpu_utilization_percentage", 1.0),
    "memory_mib": ("system_memory_usage_megabytes", MIB_IN_MB),
    "gpu/util_pct": ("utilization_percentage", 1.0),
    "gpu/memory_mib": ("memory_usage_megabytes", MIB_IN_MB),
    "gpu/power_w": ("power_usage_watts", 1.0),
}
"""Metrics of a node and of each GPU: our name → MLflow's name, and the factor from our unit to MLflow's."""


def of_epoch(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Select MLflow's metrics from an epoch's. `prefix` is "" for the student, else the stage's, such as `teacher/`."""
    final = final_names(dict(metrics))
    return _rounded(final, prefix, {name: shown for name, shown in SHOWN.items() if shown.each_epoch}) | _hardware(final, prefix)


def of_summary(metrics: Mapping[str, float], prefix: str = "", *, followed: bool = False, first: str = "") -> dict[str, float]:
    """Select MLflow's metrics from the final metrics of a stage or trial.

    With `followed`, its epochs are sent too, and metrics that each epoch has are left out. `first` is the metric that trials
    are compared by, which is sent first.
    """
    table = {first: SHOWN.get(first, Shown(3))} | SHOWN
    if followed and "epoch_wall_s" in metrics:
        return _rounded(metrics, prefix, {name: shown for name, shown in table.items() if not shown.each_epoch})
    return _rounded(metrics, prefix, table) | _hardware(metrics, prefix)


def _rounded(metrics: Mapping[str, float], prefix: str, table: Mapping[str, Shown]) -> dict[str, float]:
    return {
        f"{prefix}{name}": round(metrics[name], shown.decimals)
        for name, shown in table.items()
        if name in metrics and (shown.each_stage or not prefix)
    }


def _hardware(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Name the hardware metrics of the student's stage for MLflow's system metrics tab, by node if there are several."""
    if prefix:  # other stages repeat the student's step numbers
        return {}
    matches = [found for name in metrics if (found := re.fullmatch(r"node(\d+)/(?:gpu(\d+)/)?(\w+)", name))]
    several, shown = len({node for node, _, _ in map(re.Match.groups, matches)}) > 1, {}
    for match in matches:
        node, gpu, field = match.groups()
        if known := HARDWARE.get(field if gpu is None else f"gpu/{field}"):
            name = known[0] if gpu is None else f"gpu_{gpu}_{known[0]}"
            shown[f"system/{f'node_{node}/' if several else ''}{name}"] = round(metrics[match.group()] * known[1], 1)
    return shown
