"""The outcome of a stage, trial or measurement, which is the part of a result that these share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainables.failures import Kind
from trainables.stage_result import TeacherAccuracy

Status = Literal["ok", "oom", "failed", "infeasible", "stopped", "pending", "untested"]
"""Only rows are `pending` (the trial has not ended) or `untested` (a guided search left it out)."""


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
    """If the point was measured several times: the outcome of each, in order. See `service.runs.measurements`."""

    @property
    def each_measurement(self) -> list[Outcome]:
        """The measurements that this outcome combines, which is only itself for a single one."""
        return self.measurements or [self]


def to_json(part: ResultPart) -> dict[str, Any]:
    """Return the fields that were set, by their names in files."""
    return part.model_dump(by_alias=True, exclude_unset=True, warnings=False)
