"""`stage.json`: what a complete stage leaves for the driver, typed and with the version of its format."""

from pydantic import BaseModel, ConfigDict, Field

from trainables.rundir import StageDir, write_json

VERSION = 1
"""Files without a version are older; they have the same fields and are read."""


class StageResult(BaseModel):
    """How a complete stage went. Types are not converted; unknown keys are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    stage: str = ""
    model: str = ""
    decoder: str | None = None
    """The decoder of its training images; None: it trained nothing."""
    precision: str | None = None
    precision_reason: str = ""
    """Why it is this one, where the experiment's was `auto`."""
    metrics: dict[str, float]
    """Its summary."""
    steps_s: list[float] = Field(default_factory=list)
    """Seconds of each measured step of a timing run."""


def write_stage_result(stage: StageDir, result: StageResult) -> None:
    """Write `stage.json`, atomically."""
    write_json(stage.result, {"version": VERSION, **result.model_dump()})
