"""How a stage, a trial or a measurement ended: the part of a result that all of them share, and its file in a trial's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainables.errors import ExperimentError
from trainables.failures import Kind
from trainables.rundir import StageDir, write_json
from trainables.stage_result import VERSION as STAGE_VERSION
from trainables.stage_result import StageResult, TeacherAccuracy

VERSION = 2
"""Of `result.json`, of a run and of a trial. Older ones are read; files without a version have the fields of format 1."""
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
    """Of its training; None: it did not end, or an older version wrote it."""
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

    @model_validator(mode="before")
    @classmethod
    def _has_a_kind(cls, fields: Any) -> Any:
        """Results without a `failure` are older; they have the kind of this one in words of ours alone."""
        older = isinstance(fields, dict) and "failure" not in fields
        if older and fields.get("reason") == "the node ran out of memory: Ray killed a worker to save it":
            return fields | {"failure": "node_out_of_memory"}
        return fields

    @property
    def each_measurement(self) -> list[Outcome]:
        """The measurements that this outcome is made of: itself, where there was only one."""
        return self.measurements or [self]


def to_json(part: ResultPart) -> dict[str, Any]:
    """The fields that were set, by the names that files have."""
    return part.model_dump(by_alias=True, exclude_unset=True, warnings=False)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write a trial's `result.json`, atomically."""
    write_json(path, {"version": VERSION, **outcome.model_dump()})


def read_outcome(path: Path) -> Outcome:
    """A trial's `result.json`. Raises ExperimentError: it is damaged, or a newer version wrote it."""
    check_version(path)
    try:
        return Outcome.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ExperimentError(f"{path} is damaged: put back a copy, or remove it to run this trial again") from error


def read_summary(stage: StageDir) -> StageResult | None:
    """A stage's `stage.json`; None where the stage is not complete.

    Raises ExperimentError: it is damaged, or a newer version wrote it.
    """
    check_version(stage.result, STAGE_VERSION)
    try:
        return StageResult.model_validate_json(stage.result.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ExperimentError(f"{stage.result} is damaged: put back a copy, or remove it to run this stage again") from error


def check_version(path: Path, newest: int = VERSION) -> None:
    """Refuse a result that a newer version wrote. Raises ExperimentError."""
    try:
        version = json.loads(path.read_bytes()).get("version", 0)
    except (OSError, ValueError, AttributeError):  # damaged, which whoever reads its fields says
        return
    if not isinstance(version, int) or version > newest:
        raise ExperimentError(
            f"{path} has format {version!r} of a newer version, and this one reads up to {newest}: use the version that wrote it"
        )
