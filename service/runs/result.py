"""What `result.json` of a run directory holds, as far as it is read again: checked once, by `run_directory.reopen`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from service.config.messages import expected, shown
from service.search.points import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from trainables.errors import ExperimentError


class Part(BaseModel):
    """A part of a result. Types are not converted, since readers see what the file has; keys that nobody reads may be there."""

    model_config = ConfigDict(strict=True, extra="ignore")


class WrittenScale(Part):
    """The scale of a trial that cannot run: whatever the space has."""

    num_workers: Any = Field(alias=NUM_WORKERS)
    global_batch_size: Any = Field(alias=GLOBAL_BATCH)
    loader_workers: Any = Field(alias=LOADER_WORKERS)


class Scale(WrittenScale):
    """What a trial runs on."""

    num_workers: int = Field(alias=NUM_WORKERS)
    global_batch_size: int = Field(alias=GLOBAL_BATCH)
    loader_workers: Any = Field(alias=LOADER_WORKERS)
    """A number, or `auto`."""


class Trial(Part):
    """A row of a sweep."""

    id: str
    params: dict[str, Any]
    status: str
    reason: str = ""
    scale: Scale
    metrics: dict[str, float]
    steps_s: list[float] = []
    seconds: float = 0.0
    start_s: float | None = None
    end_s: float | None = None
    ended_s: float = 0.0
    probe: str | None = None

    @field_validator("scale", mode="wrap")
    @classmethod
    def _scale_of_an_infeasible_trial_is_as_written(
        cls, scale: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        return WrittenScale.model_validate(scale) if info.data.get("status") == "infeasible" else check(scale)


class Stage(Part):
    """A stage of a run that has ended."""

    stage: str
    model: str
    status: str
    reason: str = ""
    metrics: dict[str, float]
    seconds: float = 0.0
    start_s: float | None = None
    end_s: float | None = None


class StageTimes(Part):
    """What a stage took in all sessions of its run that ended by themselves."""

    seconds: float
    start_s: float | None


class Search(Part):
    """How a guided search ended."""

    why: str = ""
    front: list[str] = []


class Result(Part):
    """A run or a sweep, however far it has come."""

    kind: Literal["train", "sweep"]
    name: str
    status: str
    runs_root: str
    started: str = ""
    finished: str = ""
    seconds: float = 0.0
    reason: str | None = None
    sources: dict[str, str] = {}
    use_gpu: bool | None = None
    num_workers: int | None = None
    stages: list[Stage] = []
    stage_times: dict[str, StageTimes] = {}
    trials: list[Trial] | None = None
    best: Trial | None = None
    space: dict[str, Any] = {}
    """Lists, ranges and distributions, as `service.config.space` has them."""
    metric: str = ""
    mode: str = ""
    tolerance: float = 0.0
    timing_steps: int | None = None
    noise_scales: list[float] = []
    search: Search | None = None

    @model_validator(mode="after")
    def _trials_are_compared(self) -> Self:
        for name in ("space", "metric", "mode") if self.trials is not None else ():
            if name not in self.model_fields_set:
                raise PydanticCustomError("without", "{name}: missing", {"name": name})
        return self


def read_result(path: Path, experiment: Path) -> dict[str, Any]:
    """The `result.json` of a run directory, as it stands in the file. `experiment` is the run's `experiment.yaml`.

    Raises:
        ExperimentError: it is damaged; one line that names the field.
    """
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError):
        result = None
    damage = "it is no JSON object"
    if isinstance(result, dict):
        try:
            Result.model_validate(result)
        except ValidationError as error:
            damage = _first(error)
        else:
            return result
    raise ExperimentError(f"{path} is damaged: {damage}: put back a copy, or begin again from {experiment}")


def _first(error: ValidationError) -> str:
    """The first mistake: the field, and what it should be."""
    detail = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).removeprefix(".")
    if detail["type"] == "without":
        return detail["msg"]
    if detail["type"] == "missing":
        return f"{field}: missing"
    return f"{field}: must be {expected(detail)}, not {shown(detail['input'])}"
