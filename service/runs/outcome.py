"""How a stage, a trial or a measurement ended: the part of a result that all of them share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainables.failures import Kind
from trainables.stage_result import TeacherAccuracy

Status = Literal["ok", "oom", "failed", "infeasible", "stopped", "pending", "untested"]
"""`pending` and `untested` are statuses of rows alone: the trial has not ended, or a guided search left it out."""


class ResultPart(BaseModel):
    """A part of a result. Types are not converted, since readers see what the file has; unknown keys are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)


class Outcome(ResultPart):
    """How a stage ended. `metrics` is its summary where it is complete."""

    status: Status
    reason: str = ""
    failure: Kind | None = None
    """What kind of failure ended its workers, where one did."""
    metrics: dict[str, float] = Field(default_factory=dict)
    precision: str | None = None
    """What came of its training; None: it did not end."""
    precision_reason: str = ""
    """Why it is this one, where the experiment's was `auto`."""
    restarts: int = 0
    steps_s: list[float] = Field(default_factory=list)
    """Seconds of each measured step of a timing run."""
    teachers: list[TeacherAccuracy] = Field(default_factory=list)
    """Those that it learned from and whose weights were given."""
    seconds: float = 0.0
    """Wall time that it took, its workers' start included where it had one of its own."""
    start_s: float | None = None
    """That start; 0 where it shared another's, None where it is not known."""
    end_s: float | None = None
    """From the loop's last record to the outcome; None where it is not known."""
    ended_s: float = 0.0
    """Unix time."""
    measurements: list[Outcome] = Field(default_factory=list)
    """Of a point that was measured several times: the outcome of each, in order; see `service.runs.measurements`."""

    @property
    def each_measurement(self) -> list[Outcome]:
        """The measurements that this outcome is made of: itself, where there was only one."""
        return self.measurements or [self]


def to_json(part: ResultPart) -> dict[str, Any]:
    """The fields that were set, by the names that files have."""
    return part.model_dump(by_alias=True, exclude_unset=True, warnings=False)
