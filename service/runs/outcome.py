"""The outcome of a stage, trial or measurement, which is the part of a result that these share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trainables.failures import Kind
from trainables.stage_result import TeacherAccuracy

Status = Literal["ok", "oom", "failed", "infeasible", "stopped", "pending", "untested"]
"""Only rows are `pending` (the trial has not ended) or `untested` (a guided search left it out)."""
SUMMED = ("steps", "steady_steps", "warmup_s", "train_s", "eval_s", "checkpoint_s", "timing_s", "other_s", "wall_s")
LARGEST, SMALLEST = ("peak_memory_mib", "reserved_memory_mib"), ("free_memory_mib",)


class ResultPart(BaseModel):
    """A part of a result. Types are strict, so that readers see what the file has; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)


class Outcome(ResultPart):
    """How a stage ended. If it is complete, `metrics` is its summary."""

    status: Status
    reason: str = ""
    failure: Kind | None = None
    """The kind of failure that ended its workers, if any."""
    metrics: dict[str, float] = Field(default_factory=dict)
    precision: str | None = None
    """The precision that it trained in, or None if it did not end."""
    precision_reason: str = ""
    """Why it is this one, if the experiment says `auto`."""
    restarts: int = 0
    steps_s: list[float] = Field(default_factory=list)
    """Seconds of each measured step of a timing run."""
    teachers: list[TeacherAccuracy] = Field(default_factory=list)
    """The teachers that it learned from and whose weights were given."""
    seconds: float = 0.0
    """Wall time, including the start of its workers unless they were running already."""
    start_s: float | None = None
    """Time to start its workers: 0 if they were running already, None if unknown."""
    end_s: float | None = None
    """Time from the loop's last record to the outcome, None if unknown."""
    ended_s: float = 0.0
    """Unix time."""
    measurements: list[Outcome] = Field(default_factory=list)
    """If the point was measured several times: the outcome of each, in order. See `combined`."""

    @property
    def each_measurement(self) -> list[Outcome]:
        """The measurements that this outcome combines, which is only itself for a single one."""
        return self.measurements or [self]


def combined(measurements: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a point, which is `ok` if at least one measurement is.

    Several measurements are also listed in `measurements`. For `metrics` see `pooled`; other times are summed.
    """
    last = measurements[-1]
    if len(measurements) == 1:
        return last
    ran = [one for one in measurements if one.status == "ok"]
    latest = ran[-1] if ran else last
    starts_s = [one.start_s for one in measurements if one.start_s is not None]
    ends_s = [one.end_s for one in measurements if one.end_s is not None]
    return Outcome(
        status="ok" if ran else last.status,
        reason="" if ran else last.reason,
        failure=None if ran else last.failure,
        metrics=pooled([(one.metrics, len(one.steps_s)) for one in ran]),
        precision=latest.precision,
        precision_reason=latest.precision_reason,
        restarts=sum(one.restarts for one in measurements),
        steps_s=[step_s for one in ran for step_s in one.steps_s],
        seconds=sum(one.seconds for one in measurements),
        start_s=sum(starts_s) if starts_s else None,
        end_s=sum(ends_s) if ends_s else None,
        ended_s=last.ended_s,
        measurements=list(measurements),
    )


def pooled(measured: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Pool the metrics of several measurements, each with its number of steps: means over all steps.

    `images_per_s` is all images over all seconds. Minima, maxima and peaks are taken over all measurements, and counts and
    times are summed. A rank's node number is left out if the measurements ran on different nodes.
    """
    if len(measured) < 2:
        return dict(measured[0][0]) if measured else {}
    found = {}
    for name in dict.fromkeys(name for metrics, _ in measured for name in metrics):
        values = [(metrics[name], max(steps, 1), metrics.get("step_s", 1.0)) for metrics, steps in measured if name in metrics]
        if name.endswith("/node") and len({value for value, _, _ in values}) > 1:
            continue
        if name in SUMMED:
            found[name] = sum(value for value, _, _ in values)
        elif name.endswith("_min_ms") or name in SMALLEST:
            found[name] = min(value for value, _, _ in values)
        elif name.endswith("_max_ms") or name in LARGEST:
            found[name] = max(value for value, _, _ in values)
        else:
            weighted = [(value, steps * (step_s if name == "images_per_s" else 1.0)) for value, steps, step_s in values]
            found[name] = sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)
    return found
