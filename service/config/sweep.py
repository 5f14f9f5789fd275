"""The sweep section of an experiment: the space, how it is searched, and by which metric."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from trainables.config import Count, Positive, Section
from trainables.errors import did_you_mean

SPEEDS = ("images_per_s", "step_s", "epoch_s", "gpu_s_per_epoch", "data_pct", "peak_memory_mib")
FRONT = "pareto"
"""The Pareto front of speed and cost, of the policy guided."""
TIME = "time_to_accuracy"
TIME_S = f"{TIME}_s"
"""The name of that metric in the record of a training that has reached its target."""
ACCURACIES = ("top1_pct", "best_top1_pct", "top5_pct", "cka", "cosine", "linear_top1_pct", "val_loss")
"""Metrics of trials that train whole epochs."""
MINIMIZED = frozenset({"epoch_s", "step_s", "gpu_s_per_epoch", "val_loss", "data_pct", "peak_memory_mib", TIME})


class SweepConfig(Section):
    """A search over values of the experiment."""

    space: dict[str, Any] = Field(
        {}, description="dotted key → list, {range: [first, last, step]}, or a distribution such as {loguniform: [low, high]}"
    )
    points: tuple[dict[str, Any], ...] = Field((), description="instead of a space: each point as dotted keys and their values")
    policy: Literal["grid", "random", "asha", "guided"] = Field(
        "grid", description="guided: a timing sweep that models a step's time and measures few points of the grid"
    )
    metric: str = Field(
        "images_per_s",
        description="what the best trial has most (times and losses: least) of; guided: also pareto and time_to_accuracy",
    )
    target_pct: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="time_to_accuracy: the validation top-1 to reach"
    )
    num_samples: Count = Field(16, description="random, asha: number of trials")
    steps: Count | None = Field(
        None,
        description="timing sweep: steps of a trial after its warm-up (guided: at most; absent: 60); absent: its epochs",
    )
    tolerance: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.025,
        description="guided: stop when any other point is better by more than this share with a probability of at most 10 %",
    )
    budget_grid_share: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="guided: largest cost relative to 40 steps of every point; absent: 0.35, or 0.6 with up to 50 points",
    )
    budget_gpu_h: Positive | None = Field(None, description="guided: largest cost in GPU-hours")
    trial_limit_s: Positive | None = Field(
        None,
        description="seconds, restarts included, after which a trial ends as failed",
    )
    max_concurrent: Count = Field(
        1, description="trials at a time, if resources allow; where speeds are compared, none shares cores or a teacher"
    )
    grace_epochs: Count = Field(1, description="asha: epochs before a trial may be stopped")
    reduction_factor: Annotated[int, Field(ge=2)] = Field(3, description="asha: one in this many continues")

    @property
    def axes(self) -> dict[str, Any]:
        """The searched keys with their values: the space, or of listed points every key with its values in any of them."""
        if not self.points:
            return self.space
        found: dict[str, list[Any]] = {}
        for point in self.points:
            for key, value in point.items():
                values = found.setdefault(key, [])
                if value not in values:
                    values.append(value)
        return dict(found)

    @property
    def searched(self) -> str:
        """The key that names the searched ones."""
        return "sweep.points" if self.points else "sweep.space"

    @property
    def timing_steps(self) -> int | None:
        """The largest number of steps that a trial of a timing sweep measures. Without one, trials train to their epochs."""
        return self.steps or (60 if self.policy == "guided" else None)

    @property
    def figure(self) -> str:
        """The name of `metric` in a trial's metrics."""
        return TIME_S if self.metric == TIME else self.metric

    @property
    def is_time_to_accuracy(self) -> bool:
        """Whether the fastest points are then trained to the target."""
        return self.policy == "guided" and self.metric == TIME

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether `metric` is minimised or maximised."""
        return "min" if self.metric in MINIMIZED or self.metric.endswith(("_ms", "_mib", "_w", "_c")) else "max"

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        known = (*SPEEDS, *ACCURACIES, TIME, FRONT)
        if metric not in known and not re.match(r"(phase|rank\d+|node\d+)/.", metric):
            instead = did_you_mean(metric, known, f"write one of {', '.join(known)}")
            raise ValueError(f"trials have no {metric!r}; {instead}")
        return metric
