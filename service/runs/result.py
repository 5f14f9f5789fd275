"""The typed result of a run or sweep, which follows from its log, and `result.json`, its snapshot for people and scripts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

from service.config.messages import expected, shown
from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.config.sweep import TIME, TIME_S
from service.runs.outcome import Outcome, ResultPart
from trainables.config import DataIdentity
from trainables.errors import ExperimentError
from trainables.rundir import remove_unfinished, write_json

Kind = Literal["train", "sweep"]
VERSION = 2
"""Format of `result.json`, which only other programs read."""


class TrialScale(ResultPart):
    """What a trial runs on. `loader_workers` is a number or `auto`; an infeasible trial has the values as written."""

    num_workers: int = Field(alias=NUM_WORKERS)
    global_batch_size: int = Field(alias=GLOBAL_BATCH)
    loader_workers: Any = Field(alias=LOADER_WORKERS)

    @property
    def by_key(self) -> dict[str, Any]:
        """Axis → value."""
        return {NUM_WORKERS: self.num_workers, GLOBAL_BATCH: self.global_batch_size, LOADER_WORKERS: self.loader_workers}


class TrialRow(Outcome):
    """A row of a sweep: a point, what it runs on, and its outcome."""

    id: str
    params: dict[str, Any]
    kind: str = ""
    """`timing` or `accuracy`."""
    oversubscribed: bool = False
    """Whether the trial reserved more CPUs than the machine has cores."""
    scale: TrialScale
    speed_trial: str | None = None
    """If this is a training to the target: the id of the trial that measured the point's speed."""

    @property
    def outcome(self) -> Outcome:
        """The outcome fields alone."""
        return Outcome.model_validate({name: getattr(self, name) for name in Outcome.model_fields})

    @property
    def each_measurement(self) -> list[Outcome]:
        return self.measurements or [self.outcome]

    @field_validator("scale", mode="wrap")
    @classmethod
    def _scale_of_an_infeasible_trial_is_as_written(
        cls, scale: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        if info.data.get("status") != "infeasible" or not isinstance(scale, dict):
            return check(scale)
        written: dict[str, Any] = {name: scale.get(name) for name in (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)}
        return TrialScale.model_construct(**written)


class StageRow(Outcome):
    """A stage of a run that has ended."""

    stage: str
    model: str
    checkpoint: str | None = None
    """The one of its best epoch."""


class MlflowTarget(ResultPart):
    """The MLflow store and experiment of a run."""

    uri: str
    experiment: str


class ClusterHardware(ResultPart):
    """The nodes that workers run on; see `service.cluster.resources.Cluster.hardware`."""

    nodes: int
    slots_per_node: int
    cpus_per_node: float


class SearchSummary(ResultPart):
    """How a guided search ended."""

    why: str = ""
    front: list[str] = Field(default_factory=list)
    """The trials that no other one beats in both speed and cost, fewest workers first."""
    bound_pct: float | None = None
    """With 90% probability, no point is better by more than this; None if there is no bound."""
    spent_gpu_s: float = 0.0
    grid_share: float | None = None
    """The cost as a share of a lean grid, which measures every point once and briefly."""
    b_noise: float | None = None
    s_min: float | None = None
    predicted_s: dict[str, float] = Field(default_factory=dict)
    """Trial → predicted seconds to the target, in a search for time to accuracy."""


class RunResult(ResultPart):
    """The result of a run or sweep, finished or not."""

    kind: Kind
    name: str
    status: str
    started: str = ""
    runs_root: str
    sources: dict[str, str] = Field(default_factory=dict)
    finished: str = ""
    seconds: float = 0.0
    reason: str | None = None
    notices: list[str] = Field(default_factory=list)
    """A line for each thing that was guessed, mapped or left out of the inputs."""
    data: DataIdentity | None = None
    """The data that it trains on, or None in a sweep over `data.path`."""
    not_exact: list[str] = Field(default_factory=list)
    """A line for each reason why it differs from an uninterrupted run: other data that a resume accepted."""
    mlflow: MlflowTarget | None = None
    use_gpu: bool | None = None
    num_workers: int | None = None
    loader_workers: int | str | None = None
    stages: list[StageRow] = Field(default_factory=list)
    trials: list[TrialRow] | None = None
    chosen: str | None = None
    """Id of the best trial according to all probes of a finished guided search."""
    space: dict[str, Any] = Field(default_factory=dict)
    """Lists, ranges and distributions, as in `service.config.space`."""
    metric: str = ""
    mode: str = ""
    policy: str = ""
    tolerance: float = 0.025
    budget_grid_share: float | None = None
    budget_gpu_h: float | None = None
    timing_steps: int | None = None
    warmup_steps: int = 5
    hardware: ClusterHardware | None = None
    verdict: list[str] = Field(default_factory=list)
    """Which trial of a sweep won and why, in sentences."""
    noise_scales: list[float] = Field(default_factory=list)
    search: SearchSummary | None = None

    @property
    def rows(self) -> list[TrialRow]:
        return self.trials or []

    @property
    def best(self) -> TrialRow | None:
        """The `chosen` trial, else the complete one with the best metric, else None."""
        metric = TIME_S if self.metric == TIME else self.metric
        complete = [row for row in self.rows if row.status == "ok" and row.metrics.get(metric) is not None]
        pick: Callable[..., TrialRow | None] = max if self.mode == "max" else min
        found = pick(complete, key=lambda row: row.metrics[metric], default=None)
        return next((row for row in self.rows if row.id == self.chosen), found)

    @property
    def accepted_data(self) -> DataIdentity | None:
        """See `TrainConfig.accepted_data`."""
        return self.data if self.not_exact else None

    @property
    def notes(self) -> list[str]:
        """Lines that every reader of the result should see."""
        return [*self.notices, *(f"not exact: {line}" for line in self.not_exact)]

    @property
    def unit(self) -> str:
        """The device of one worker."""
        return "GPU" if self.use_gpu else "worker"


def write_result(path: Path, result: RunResult) -> None:
    """Write `result.json` atomically. The caller holds the run's lock."""
    remove_unfinished(path)
    fields = result.model_dump(mode="json", by_alias=True, warnings=False)
    best = None if result.best is None else result.best.model_dump(mode="json", by_alias=True, warnings=False)
    write_json(path, fields | {"best": best, "version": VERSION})


def parse_result(text: str, path: Path) -> RunResult:
    """Parse the result of the log at `path`. Raises ExperimentError: it is damaged; the message names the field."""
    try:
        return RunResult.model_validate_json(text)
    except ValidationError as error:
        damage = first_mistake(error)
    raise ExperimentError(f"{path} is damaged: {damage}: restore a copy, or start a new run")


def first_mistake(error: ValidationError) -> str:
    """Describe the first mistake: the field, and what it should be."""
    detail = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).removeprefix(".")
    if detail["type"] == "missing":
        return f"{field}: missing"
    return f"{field}: must be {expected(detail)}, not {shown(detail['input'])}"
