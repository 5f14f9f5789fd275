"""Configuration of the training loop, and of a whole job that trains, fills a cache, or evaluates."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field

from trainables.config.data import DataConfig
from trainables.config.distill import DistillConfig
from trainables.config.evaluation import EvalConfig
from trainables.config.models import TeacherConfig, TeacherOfSeveralConfig, WeightedConfig
from trainables.config.optim import OptimConfig
from trainables.config.scale import ScaleConfig
from trainables.config.section import Count, ImageSize, Natural, Positive, Section

Precision = Literal["fp32", "bf16", "fp16", "fp64", "auto"]
"""`auto`: see `trainables.device.precision`."""
FEATURES_TAP = "embedding"
"""The default tap for a model's image features."""
StepPart = Literal["nothing", "loading", "teacher", "allreduce"]
Measure = Literal["accuracy", "knn", "linear", "embed"]
"""What an evaluation does: measure the accuracy of the classifier or of a feature probe, or write the features to a file."""


class ProgressiveConfig(Section):
    """A part of training in which the student sees smaller crops."""

    epochs: Annotated[float, Field(gt=0, le=1)] = Field(description="share of the epochs")
    image_size: ImageSize = Field(description="height and width in pixels; crops of data.image_size are resized to it")


class TrainingConfig(Section):
    """The training loop, and the loss on the labels."""

    task_loss: Literal["cross_entropy", "bce"] = Field(
        "cross_entropy",
        description="loss on the labels; bce: binary cross-entropy, mean over classes: with a teacher, raise distill.task_weight",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="student: share of each label that is spread over all classes"
    )
    bce_threshold: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="task_loss bce: mixed or smoothed targets above this become 1, others 0; absent: unchanged"
    )

    progressive: tuple[ProgressiveConfig, ...] = Field(
        (), description="student: smaller images in the first parts of training; evaluations use data.image_size"
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="channels_last memory format; auto: in bf16 and fp16, and on a CPU in fp32"
    )
    deterministic: bool = Field(False, description="on a GPU: bitwise identical results in every run and after a resume; slower")
    compile: bool | Literal["reduce-overhead", "max-autotune"] = Field(
        False, description="torch.compile the student and the teacher; a name is a mode of torch.compile"
    )
    gradient_checkpointing: bool = Field(
        False,
        description="student of timm or transformers: recompute activations in the backward pass to save memory",
    )
    log_every: Count = Field(20, description="steps between log lines, at most 30 s apart")
    checkpoint_every: Count = Field(500, description="steps between checkpoints within an epoch; each epoch also ends with one")
    checkpoint_every_s: Positive = Field(300.0, description="seconds between checkpoints within an epoch, if that is sooner")
    evaluate_every: Count = Field(1, description="epochs between evaluations; the last epoch is always evaluated")
    warmup_steps: Natural = Field(5, description="first steps, excluded from throughput and phase times")
    max_steps: Count | None = Field(
        None,
        description="timing run: stop so many steps after the warm-up, without evaluation and teacher training",
    )
    until_top1_pct: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="student: stop after the first evaluation whose top-1 accuracy reaches this"
    )
    until_s: Positive | None = Field(
        None, description="student: stop after the epoch in which training time (without evaluations) reaches this"
    )
    noise_scale: bool = Field(
        False, description="measure the gradient noise scale; until_top1_pct and time_to_accuracy always do"
    )
    telemetry_every_s: Positive = Field(1.0, description="seconds between readings of GPU and CPU telemetry")


class RunStore(Section):
    """A run in an object store."""

    uri: str = Field(description="URI of the run, or of the sweep")
    folder: str = Field(description="absolute folder on each node for the node's local files of the run")
    checkpoints: dict[str, str] = Field(
        default_factory=dict, description="names in the store of the newest `last` and `best` checkpoint of the current stage"
    )


class SplitIdentity(Section):
    """Identifies the images of a split and their order; hashes are hexadecimal."""

    num_images: int
    labels: str
    order: str
    contents: str
    """A hash of a few images, or of all checksums in a packed set's index, see `trainables.data.identity`."""


class DataIdentity(Section):
    """Identifies the data that a stage is trained on."""

    classes: tuple[str, ...]
    train: SplitIdentity
    val: SplitIdentity


class TrainConfig(Section):
    """Everything one worker needs to train one model; without `distill` it trains on labels only."""

    stage: str = Field("student", description="name of the stage: `teacher`, `assistant1` …, `student-init`, `student`")
    init_stage: bool = Field(False, description="an init stage: optimize the methods' `init_loss`")
    init_checkpoint: str | None = Field(None, description="checkpoint of the preceding init stage to start from")
    output_dir: str = Field(description="absolute stage directory; without a run_store, on a file system that all nodes share")
    run_store: RunStore | None = Field(None, description="the run's object store; None if the run is in a folder")
    data: DataConfig
    accepted_data: DataIdentity | None = Field(
        None, description="data on which the stage may continue although its checkpoint was trained on other data"
    )
    model: str
    weights: str | None = Field(None, description="as student.weights")
    weights_key: str | None = Field(None, description="as student.weights_key")
    freeze: bool = Field(False, description="as student.freeze")
    finetuned: TeacherConfig | None = Field(None, description="pretrained teacher that the stage fine-tunes, on its own input")
    teacher: TeacherConfig | None = None
    teachers: tuple[TeacherOfSeveralConfig, ...] = ()
    teacher_actors: tuple[str, ...] = Field((), description="names of the actors of `teacher.service`")
    teacher_records: str | None = Field(
        None, description="folder or URI with the accuracies of pretrained teachers; None: do not measure the teacher"
    )
    teacher_sha256: str | None = Field(None, description="hash of the teacher whose outputs are cached or requested")
    distill: DistillConfig | None = Field(None, description="absent: train on labels only")
    optim: OptimConfig = OptimConfig()
    scale: ScaleConfig = ScaleConfig()
    train: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    precision: Precision = "fp32"
    precision_reason: str = Field("", description="why `auto` chose this precision")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    next_num_workers: int | None = Field(
        None,
        description="elastic: end and restart with this many workers once the cluster has room; None: never",
    )
    omitted: StepPart | None = Field(None, description="timing run: the part of each step to leave out")
    report_each_epoch: bool = Field(False, description="wait for Ray after each epoch, since a scheduler may stop the job")
    labels: dict[str, str] = Field(default_factory=dict, description="tags of exported Ray metrics, such as the trial's name")

    @property
    def distillation(self) -> DistillConfig | None:
        return self.distill

    @property
    def all_teachers(self) -> tuple[WeightedConfig, ...]:
        """All teachers: none, one, or several."""
        return self.teachers or ((self.teacher,) if self.teacher is not None else ())

    @property
    def shares(self) -> tuple[float, ...]:
        """The weights of `all_teachers`, normalized to sum to 1."""
        shares = [each.share for each in self.teachers] or [1.0]
        return tuple(share / math.fsum(shares) for share in shares)

    @property
    def rows_from(self) -> str | None:
        """See `WeightedConfig.rows_from`: the same for all teachers."""
        return self.all_teachers[0].rows_from if self.all_teachers else None

    def of_teacher(self, number: int) -> TrainConfig:
        """The job with one of its teachers alone."""
        if not self.teachers:
            return self
        teacher = TeacherConfig.model_validate(self.teachers[number].model_dump(exclude={"share"}))
        return self.model_copy(update={"teacher": teacher, "teachers": ()})

    @property
    def measures_noise(self) -> bool:
        """Whether to measure the gradient noise scale, which predictions of the time to an accuracy need."""
        return self.train.noise_scale or self.train.until_top1_pct is not None

    def train_image_size(self, epoch: int) -> int | None:
        """Return the crop size of an epoch; None for the size of evaluations, which a timing run always uses."""
        shares = () if self.train.max_steps is not None or self.init_stage else self.train.progressive
        ends = accumulate(each.epochs * self.optim.epochs for each in shares)
        return next((each.image_size for each, end in zip(shares, ends, strict=True) if epoch < end - 1e-9), None)

    @property
    def num_augmentation_epochs(self) -> int | None:
        """The number of different augmentations of an image, which epochs repeat in turn; None: every epoch has its own."""
        if self.rows_from is None:
            return None
        return self.all_teachers[0].cache_epochs if self.data.augments_at_random else 1


class FillConfig(TrainConfig):
    """Everything one worker needs to fill the cache of `teacher`; nothing is trained."""

    publish: bool = Field(False, description="the cache becomes a reinforced data set: see `trainables.teachers.cache.publish`")


class EvaluateConfig(Section):
    """Everything one worker needs to evaluate a checkpoint, or to write its features."""

    checkpoint: str = Field(description="a file; with a model, as teacher.weights")
    model: str | None = Field(None, description="model of weights that do not name it; None: a checkpoint of this project")
    weights_key: str | None = Field(None, description="as teacher.weights_key")
    measure: Measure = "accuracy"
    tap: str = Field(FEATURES_TAP, description="the tap of the model that gives its features")
    run_store: RunStore | None = Field(None, description="object store of the checkpoint's run; None if the run is in a folder")
    output: str = Field(description="absolute path or object store URI of the JSON file with the result")
    data: DataConfig
    scale: ScaleConfig = ScaleConfig()
    precision: Precision = "fp32"
    precision_reason: str = Field("", description="why `auto` chose this precision")

    @property
    def features_file(self) -> str:
        """The Parquet file next to `output` that `embed` writes the features to."""
        return f"{self.output.removesuffix('.json')}.parquet"
