"""The schema of an experiment: everything that a user may write. Rules between sections are in `service.config.rules`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from service.config.sweep import TIME, SweepConfig
from trainables.config import (
    AssistantConfig,
    DataConfig,
    DistillConfig,
    EvalConfig,
    OptimConfig,
    Precision,
    ScaleConfig,
    Section,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    TrainingConfig,
)
from trainables.rundir import expand_home

MAX_NAME = 150
"""Characters of an experiment's name: its run directories, MLflow runs and Ray jobs are called after it."""


class TrackingConfig(Section):
    """The MLflow store of the records."""

    enabled: bool = Field(True, description="record runs in MLflow")
    uri: str | None = Field(None, description="an MLflow server or database; absent: the SQLite store of the runs' root")
    experiment: str = Field("raydistill", min_length=1, description="name of the MLflow experiment")
    log_model: bool = Field(True, description="log the student as an MLflow model")


class Experiment(Section):
    """Everything that a user may write, validated."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)] = Field(
        "experiment", description="in run directories, MLflow runs and Ray jobs; absent from a file: the file's name"
    )
    data: DataConfig = DataConfig()
    teacher: TeacherConfig | None = None
    assistants: tuple[AssistantConfig, ...] = Field(
        (), description="models between teacher and student: each learns from the one before it, the student from the last"
    )
    student: StudentConfig
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = OptimConfig()
    scale: ScaleConfig = ScaleConfig()
    train: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    precision: Precision = Field(
        "fp32",
        description="bf16, fp16: autocast, with a gradient scaler for fp16; fp64: all of it, for exact comparisons; auto: bf16"
        " where the GPUs have it and images have 224 pixels or more, else fp32",
    )
    sweep: SweepConfig = SweepConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of initial weights, order of images and augmentation")

    @property
    def distills(self) -> bool:
        """Whether the student has more than labels to learn from: a teacher, or a method that does without one."""
        method = self.distill.method
        return bool(method) and (self.teacher is not None or method != ("kd",))

    @property
    def distillation(self) -> DistillConfig | None:
        """How the student learns from more than labels, if it does."""
        return self.distill if self.distills else None

    @property
    def model(self) -> str:
        """The student's."""
        return self.student.model

    @property
    def weights(self) -> str | None:
        """What the student begins with."""
        return self.student.weights

    @property
    def preparation(self) -> dict[str, TeacherConfig | AssistantConfig]:
        """The stages before the student's, in order, each with the model that it trains: the teacher, then the assistants."""
        assistants = {f"assistant{n}": assistant for n, assistant in enumerate(self.assistants, start=1)}
        return {**({"teacher": self.teacher} if self.teacher else {}), **assistants}

    @property
    def stage_names(self) -> list[str]:
        """The stages that a run may have, in order; the init stages are there where their stage's methods have one."""
        return [each for name in (*self.preparation, "student") for each in (f"{name}-init", name)]

    def written_cache(self, kind: Literal["train", "sweep"]) -> Path | None:
        """The `teacher.cache` into which a run or a sweep writes; None: there is none. A timing run writes none."""
        if self.teacher is None or self.teacher.cache is None or not self.distills:
            return None
        timed = self.train.max_steps is not None
        if kind == "sweep":
            timed = self.sweep.timing_steps is not None and not self.sweep.is_time_to_accuracy
        return None if timed else expand_home(self.teacher.cache).absolute()

    def measures_teacher(self, stage: str) -> bool:
        """Whether a stage's teacher is measured: its weights were given, and the stage is a training on real images."""
        given = self.teacher is not None and self.teacher.weights is not None
        first = "assistant1" if self.assistants else "student"
        return given and stage == first and self.train.max_steps is None and self.data.path != "synthetic"

    def stage(self, name: str, output_dir: Path, labels: Mapping[str, str], weights: str | None = None) -> TrainConfig:
        """The configuration of the workers of one stage, of the `preparation` or `student`.

        `weights` are those of the stage before it. All stages but the teacher's distil alike.
        """
        before = self.preparation
        model, optim, train, scale = self.student.model, self.optim, self.train, self.scale
        if name in before:
            scale = scale.model_copy(update={"cut": None})
            model = before[name].model
            optim = optim.model_copy(update={"epochs": before[name].epochs or optim.epochs})
            measures_noise = train.noise_scale or self.sweep.metric == TIME
            train = train.model_copy(update={"until_top1_pct": None, "until_s": None, "noise_scale": measures_noise})
        teacher = distill = None
        if name != "teacher":
            teacher = self._teacher_of(name, weights)
            distill = self.distillation
        return TrainConfig(
            stage=name,
            output_dir=str(output_dir),
            data=self.data,
            model=model,
            weights=None if name in before else self.student.weights,
            weights_key=None if name in before else self.student.weights_key,
            teacher=teacher,
            distill=distill,
            optim=own_optimizers(optim, distill),
            scale=scale,
            train=train,
            eval=self.eval,
            precision=self.precision,
            seed=self.seed,
            labels=dict(labels),
        )

    def _teacher_of(self, name: str, weights: str | None) -> TeacherConfig | None:
        """The teacher of a stage after the teacher's, with `weights`: the experiment's, or the assistant before the stage."""
        if self.teacher is None:
            return None
        names = [*self.preparation, name]
        previous = names[names.index(name) - 1]
        teacher = self.teacher
        if previous != "teacher":
            cache = self.teacher.model_dump(include={"cache", "cache_top_k", "cache_epochs", "placement"})
            teacher = TeacherConfig(model=self.preparation[previous].model, **cache)
        # The teacher service starts together with the students, after the assistants.
        own: dict[str, Any] = {"service": self.teacher.service if name == "student" else None}
        return teacher.model_copy(update=own if weights is None else {**own, "weights": weights})


def own_optimizers(optim: OptimConfig, distill: DistillConfig | None) -> OptimConfig:
    """The section with optimizers for losses that there are: no method's without `distill`, and none of a method of weight 0."""
    methods = distill.weighted if distill is not None else []
    losses = {key: own for key, own in optim.losses.items() if key == "task" or key.partition("/")[0] in methods}
    return optim.model_copy(update={"losses": losses})
