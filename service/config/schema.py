"""The schema of an experiment: everything that a user may write. Rules between sections are in `service.config.rules`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from service.config.sweep import TIME, SweepConfig
from trainables.config import (
    AssistantConfig,
    Count,
    DataConfig,
    DistillConfig,
    EvalConfig,
    OptimConfig,
    Precision,
    ScaleConfig,
    Section,
    StudentConfig,
    TeacherConfig,
    TeacherOfSeveralConfig,
    TrainConfig,
    TrainingConfig,
    WeightedConfig,
)
from trainables.rules import OF_CACHE
from trainables.rundir import expand_home

MAX_NAME = 150
"""Characters of an experiment's name: its run directories, MLflow runs and Ray jobs are called after it."""


STUDENTS = {"task_loss", "label_smoothing", "bce_threshold", "until_top1_pct", "until_s", "gradient_checkpointing", "progressive"}
"""Keys of `train` that are the student's alone: the stages before it have the defaults."""


class WrittenDataConfig(DataConfig):
    """Which images to use, and how they reach a worker."""

    # Wider than the base class, which is what workers get: `auto` is a number by then.
    global_batch_size: Count | Literal["auto"] = Field(  # type: ignore[assignment]
        128,
        description="samples per optimizer step over all workers; auto: `distill train` times batches and takes the smallest "
        "about as fast as the fastest that fits",
    )


class TrackingConfig(Section):
    """The MLflow store of the records."""

    enabled: bool = Field(True, description="record runs in MLflow")
    uri: str | None = Field(
        None, description="an MLflow server or database; absent: MLFLOW_TRACKING_URI; neither, or null: SQLite in the runs' root"
    )
    experiment: str = Field("raydistill", min_length=1, description="name of the MLflow experiment")
    log_model: bool = Field(True, description="log the student as an MLflow model")
    register_model: str | None = Field(
        None, pattern=r"^[^/:'\"]+$", description="a name in MLflow's model registry: the logged student is its next version"
    )


class Experiment(Section):
    """Everything that a user may write, validated."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)] = Field(
        "experiment", description="of run directories, MLflow runs and Ray jobs; absent from a file: the file's name"
    )
    data: WrittenDataConfig = WrittenDataConfig()
    teacher: TeacherConfig | None = None
    teachers: tuple[TeacherOfSeveralConfig, ...] = Field(
        (),
        description="several instead of `teacher`, with weights: methods on logits imitate the mean of their probabilities, "
        "others each one",
    )
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
        description="bf16, fp16: autocast; fp64: for exact comparisons; auto: bf16 if the GPUs have it and images have 224 "
        "pixels or more, else fp32",
    )
    sweep: SweepConfig = SweepConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of initial weights, order and augmentation")

    @property
    def all_teachers(self) -> tuple[WeightedConfig, ...]:
        """The teacher, or each of several."""
        return self.teachers or ((self.teacher,) if self.teacher is not None else ())

    @property
    def distillation(self) -> DistillConfig | None:
        """How the student learns from more than labels, if it does: from a teacher, or by a method that does without one."""
        method = self.distill.method
        return self.distill if method and (self.all_teachers or method != ("kd",)) else None

    @property
    def model(self) -> str:
        """The student's."""
        return self.student.model

    @property
    def weights(self) -> str | None:
        """What the student begins with."""
        return self.student.weights

    @property
    def freeze(self) -> bool:
        """Whether its classifier alone is trained."""
        return self.student.freeze

    @property
    def preparation(self) -> dict[str, TeacherConfig | AssistantConfig]:
        """The stages before the student's, in order, each with the model that it trains: the teacher, then the assistants."""
        assistants = {f"assistant{n}": assistant for n, assistant in enumerate(self.assistants, start=1)}
        return {**({"teacher": self.teacher} if self.teacher else {}), **assistants}

    @property
    def trained_before(self) -> list[str]:
        """The stages of the `preparation` that a run trains: all, but for a teacher that teaches with its weights as they are."""
        as_given = self.teacher is not None and not self.teacher.needs_training
        return [name for name in self.preparation if not (as_given and name == "teacher")]

    @property
    def stage_names(self) -> list[str]:
        """The stages that a run may have, in order; the init stages are there where their stage's methods have one."""
        return [each for name in (*self.preparation, "student") for each in (f"{name}-init", name)]

    def written_cache(self, kind: Literal["train", "sweep"]) -> Path | None:
        """The `teacher.cache` into which a run or a sweep writes, if there is one. A timing run writes none."""
        cache = self.all_teachers[0].cache if self.all_teachers else None
        if cache is None or self.distillation is None:
            return None
        timed = self.train.max_steps is not None
        if kind == "sweep":
            timed = self.sweep.timing_steps is not None and not self.sweep.is_time_to_accuracy
        return None if timed else expand_home(cache).absolute()

    def measures_teacher(self, stage: str) -> bool:
        """Whether a stage's teacher is measured: its weights were given, and the stage is a training on real images."""
        given = self.teachers or (self.teacher is not None and not self.teacher.needs_training)
        first = "assistant1" if self.assistants else "student"
        return given and stage == first and self.train.max_steps is None and self.data.path != "synthetic"

    def stage(self, name: str, output_dir: Path, labels: Mapping[str, str], weights: str | None = None) -> TrainConfig:
        """The configuration of the workers of one stage, of the `preparation` or `student`.

        `weights` are those of the stage before it. All stages but the teacher's distil alike.
        """
        own: StudentConfig | TeacherConfig | AssistantConfig = self.preparation.get(name, self.student)
        data, optim, train, scale = self.data, self.optim, self.train, self.scale
        if not isinstance(own, StudentConfig):
            scale = scale.model_copy(update={"cut": None})
            optim = optim.model_copy(update={"epochs": own.epochs or optim.epochs})
            measures_noise = train.noise_scale or self.sweep.metric == TIME
            train = train.model_copy(update={**TrainingConfig().model_dump(include=STUDENTS), "noise_scale": measures_noise})
        if isinstance(own, TeacherConfig):
            if data.mixes_unlabeled or own.head is not None:  # it learns labels alone, or classes of one set
                data = data.model_copy(update={"more": ()})
            rates: dict[str, Any] = {"lr_head": own.lr_head, "layer_decay": own.layer_decay}
            if own.lr is not None:
                losses = {key: loss.model_copy(update={"lr": None}) for key, loss in optim.losses.items()}
                rates |= {"lr": own.lr, "losses": losses}
            optim = optim.model_copy(update=rates)
        distill = self.distillation if name != "teacher" else None
        start = None if isinstance(own, AssistantConfig) or own.weights is None else own
        return TrainConfig(
            stage=name,
            output_dir=str(output_dir),
            data=data,
            model=own.model,
            weights=start and start.weights,
            weights_key=start and start.weights_key,
            freeze=isinstance(own, StudentConfig) and own.freeze,
            finetuned=start if isinstance(start, TeacherConfig) else None,
            **(self._teachers_of(name, weights) if name != "teacher" else {}),
            distill=distill,
            optim=own_optimizers(optim, distill),
            scale=scale,
            train=train,
            eval=self.eval,
            precision=self.precision,
            seed=self.seed,
            labels=dict(labels),
        )

    def _teachers_of(self, name: str, weights: str | None) -> dict[str, Any]:
        """`teacher` with `weights`, or `teachers`, of a stage after the teacher's: those written, or the assistant before it."""
        before = [*self.preparation, name]
        before = before[: before.index(name)]
        if not before:
            return {"teachers": self.teachers}
        teacher = self.teacher
        if before[-1] != "teacher":
            cache = teacher.model_dump(include={"cache", *OF_CACHE, "placement"}) if teacher else {}
            teacher = TeacherConfig(model=self.preparation[before[-1]].model, **cache)
        assert teacher is not None
        # The teacher service starts together with the students, after the assistants.
        own: dict[str, Any] = {"service": self.teacher.service if self.teacher and name == "student" else None}
        if weights is not None:
            replaced = ("finetune", "weights_key", "head", "logit_scale") if teacher.needs_training or teacher.head else ()
            trained = dict.fromkeys(replaced)
            own |= {"weights": weights, **trained}
        return {"teacher": teacher.model_copy(update=own)}


def own_optimizers(optim: OptimConfig, distill: DistillConfig | None) -> OptimConfig:
    """The section with optimizers for losses that there are: no method's without `distill`, and none of a method of weight 0."""
    methods = distill.weighted if distill is not None else []
    losses = {key: own for key, own in optim.losses.items() if key == "task" or key.partition("/")[0] in methods}
    return optim.model_copy(update={"losses": losses})
