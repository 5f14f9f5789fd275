"""What a complete stage leaves for the driver: the `summary` in the run's log, typed."""

from pydantic import BaseModel, ConfigDict, Field


class TeacherAccuracy(BaseModel):
    """How accurate a teacher with given weights is on the validation images."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str
    weights: str
    top1_pct: float
    num_images: int
    chance_pct: float
    """What the same predictions would reach if they had nothing to do with the images."""

    def __str__(self) -> str:
        on = f"{self.num_images:,} validation images, where chance is {self.chance_pct:.2f}%"
        return f"teacher {self.model}: {self.top1_pct:.2f}% top-1 on {on}"


class StageResult(BaseModel):
    """How a complete stage went. Types are not converted; unknown keys are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

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
    teachers: list[TeacherAccuracy] = Field(default_factory=list)
    """Those that it learned from and whose weights were given."""
