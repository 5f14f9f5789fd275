"""The typed `summary` of a complete stage, which the driver reads from the run's log."""

from pydantic import BaseModel, ConfigDict, Field


class TeacherAccuracy(BaseModel):
    """The accuracy of a teacher with given weights on the validation images."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str
    weights: str
    top1_pct: float
    num_images: int
    chance_pct: float
    """The expected accuracy if the same predictions were assigned to images at random."""

    def __str__(self) -> str:
        on = f"{self.num_images:,} validation images, where chance is {self.chance_pct:.2f}%"
        return f"teacher {self.model}: {self.top1_pct:.2f}% top-1 on {on}"


class StageResult(BaseModel):
    """The results of a complete stage. Types are not converted; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str = ""
    decoder: str | None = None
    """The decoder of the training images; None if the stage did not train."""
    precision: str | None = None
    precision_reason: str = ""
    """Why this precision was chosen, if the experiment's is `auto`."""
    metrics: dict[str, float]
    """The summary's metrics."""
    steps_s: list[float] = Field(default_factory=list)
    """Duration of each measured step of a timing run."""
    teachers: list[TeacherAccuracy] = Field(default_factory=list)
    """The stage's teachers whose weights were given."""
