"""How the loop runs, and the whole configuration of one job: to train, to fill a cache, to evaluate."""

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
"""The tap that is a model's features of an image, where none is named."""
StepPart = Literal["nothing", "loading", "teacher", "allreduce"]
Measure = Literal["accuracy", "knn", "linear", "embed"]
"""An evaluation's result: the accuracy of the model's own classes or of a probe of its features, or these in a file."""


class ProgressiveConfig(Section):
    """A part of the training in which the student sees its crops at a smaller size."""

    epochs: Annotated[float, Field(gt=0, le=1)] = Field(description="share of the epochs")
    image_size: ImageSize = Field(description="height and width in pixels, to which crops of data.image_size are resized")


class TrainingConfig(Section):
    """How the loop runs, and the labels' loss."""

    task_loss: Literal["cross_entropy", "bce"] = Field(
        "cross_entropy",
        description="of the student's labels; bce: binary cross-entropy of each class, its mean over classes: beside a teacher "
        "write a larger distill.task_weight",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="the student: the share of a label that is spread over all classes, in training"
    )
    bce_threshold: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="task_loss bce: targets of mixed or smoothed labels above this are 1, others 0; absent: as they are"
    )

    progressive: tuple[ProgressiveConfig, ...] = Field(
        (), description="the student: smaller images in the first parts of training; later and in evaluations data.image_size"
    )
    channels_last: bool | Literal["auto"] = Field(
        "auto", description="channels_last memory format; auto: in bf16 and fp16, and on a CPU in fp32"
    )
    deterministic: bool = Field(False, description="on a GPU: the same bits in every run and after a resume; slower")
    compile: bool | Literal["reduce-overhead", "max-autotune"] = Field(
        False, description="torch.compile student and teacher; a name is one of torch's modes"
    )
    gradient_checkpointing: bool = Field(
        False,
        description="the student: compute activations again in the backward pass, for less memory; models of timm, transformers",
    )
    log_every: Count = Field(20, description="steps between log lines and records; sooner after 30 s")
    checkpoint_every: Count = Field(500, description="steps between checkpoints inside an epoch; each epoch ends with one too")
    checkpoint_every_s: Positive = Field(300.0, description="seconds between checkpoints inside an epoch, if that is sooner")
    evaluate_every: Count = Field(1, description="epochs between evaluations; the last epoch is always evaluated")
    warmup_steps: Natural = Field(5, description="first steps, left out of throughput and phase times")
    max_steps: Count | None = Field(
        None,
        description="a timing run: stop this many steps after the warm-up, without evaluation and without training a teacher",
    )
    until_top1_pct: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="the student: stop after the first evaluated epoch whose top-1 reaches this"
    )
    until_s: Positive | None = Field(
        None, description="the student: stop after the epoch in which training has taken this many seconds, without evaluations"
    )
    noise_scale: bool = Field(
        False, description="measure the gradient noise scale; until_top1_pct and time_to_accuracy always do"
    )
    telemetry_every_s: Positive = Field(1.0, description="seconds between readings of GPU and CPU telemetry")


class RunStore(Section):
    """A run in an object store."""

    uri: str = Field(description="of the run, or the sweep")
    folder: str = Field(description="absolute folder, on each node, for what the node has of it")
    checkpoints: dict[str, str] = Field(
        default_factory=dict, description="the newest `last` and `best` of the stage that is trained, by their names there"
    )


class SplitIdentity(Section):
    """The images of a split, in their order; hashes in hexadecimal."""

    num_images: int
    labels: str
    order: str
    contents: str
    """A hash of a few images, or of an index's checksums of all: see `trainables.data.identity`."""


class DataIdentity(Section):
    """What a stage is trained on."""

    classes: tuple[str, ...]
    train: SplitIdentity
    val: SplitIdentity


class TrainConfig(Section):
    """Everything one worker needs to train one model: with `distill` it distils, without it trains on labels alone."""

    stage: str = Field("student", description="its name in records: `teacher`, `assistant1` …, `student-init`, `student`")
    init_stage: bool = Field(False, description="it trains what methods train before a stage, by their `init_loss`")
    init_checkpoint: str | None = Field(None, description="of the init stage before this one, which begins with what it trained")
    output_dir: str = Field(description="absolute stage directory; without a run_store on a file system that all nodes share")
    run_store: RunStore | None = Field(None, description="where the run is, if not in its folder")
    data: DataConfig
    accepted_data: DataIdentity | None = Field(
        None, description="data with which the stage goes on although its checkpoint was trained on other data; None: with none"
    )
    model: str
    weights: str | None = Field(None, description="as student.weights")
    weights_key: str | None = Field(None, description="as student.weights_key")
    freeze: bool = Field(False, description="as student.freeze")
    finetuned: TeacherConfig | None = Field(None, description="the given teacher that the stage fine-tunes, on its own input")
    teacher: TeacherConfig | None = None
    teachers: tuple[TeacherOfSeveralConfig, ...] = ()
    teacher_actors: tuple[str, ...] = Field((), description="names of the actors of `teacher.service`")
    teacher_records: str | None = Field(
        None, description="folder or URI of the accuracies of teachers that were given; None: the teacher's is not measured"
    )
    teacher_sha256: str | None = Field(None, description="hash of the teacher whose outputs are cached or requested")
    distill: DistillConfig | None = Field(None, description="absent: the labels alone are learned")
    optim: OptimConfig = OptimConfig()
    scale: ScaleConfig = ScaleConfig()
    train: TrainingConfig = TrainingConfig()
    eval: EvalConfig = EvalConfig()
    precision: Precision = "fp32"
    precision_reason: str = Field("", description="why it is this one, where precision was `auto`")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    next_num_workers: int | None = Field(
        None,
        description="an elastic stage: it ends, to begin again with so many workers, once there is room; None: never",
    )
    omitted: StepPart | None = Field(None, description="a timing run: the part of its steps that is left out")
    report_each_epoch: bool = Field(False, description="a scheduler may stop the job after each epoch: the loop waits for Ray")
    labels: dict[str, str] = Field(default_factory=dict, description="tags of exported Ray metrics, such as the trial's name")

    @property
    def distillation(self) -> DistillConfig | None:
        return self.distill

    @property
    def all_teachers(self) -> tuple[WeightedConfig, ...]:
        """The teacher, or each of several."""
        return self.teachers or ((self.teacher,) if self.teacher is not None else ())

    @property
    def shares(self) -> tuple[float, ...]:
        """Those of `all_teachers`, as parts of 1."""
        shares = [each.share for each in self.teachers] or [1.0]
        return tuple(share / math.fsum(shares) for share in shares)

    @property
    def measures_noise(self) -> bool:
        """Whether the noise of the gradients is measured, as predictions of the time to an accuracy need it."""
        return self.train.noise_scale or self.train.until_top1_pct is not None

    def train_image_size(self, epoch: int) -> int | None:
        """The size at which the model sees the crops of an epoch; None: as in evaluations, and so in a timing run."""
        shares = () if self.train.max_steps is not None or self.init_stage else self.train.progressive
        ends = accumulate(each.epochs * self.optim.epochs for each in shares)
        return next((each.image_size for each, end in zip(shares, ends, strict=True) if epoch < end - 1e-9), None)

    @property
    def num_augmentation_epochs(self) -> int | None:
        """The number of different augmentations of an image, which epochs repeat in turn; None: every epoch has its own."""
        if self.teacher is None or self.teacher.rows_from is None:
            return None
        return self.teacher.cache_epochs if self.data.augments_at_random else 1


class FillConfig(TrainConfig):
    """What one worker needs to fill the cache of `teacher`: nothing is trained."""


class EvaluateConfig(Section):
    """What one worker needs to evaluate a checkpoint, or to write its features."""

    checkpoint: str = Field(description="a file; with a model, as teacher.weights")
    model: str | None = Field(None, description="of weights that do not name it; None: the checkpoint is one of ours")
    weights_key: str | None = Field(None, description="as teacher.weights_key")
    measure: Measure = "accuracy"
    tap: str = Field(FEATURES_TAP, description="the point of the model whose values are its features")
    run_store: RunStore | None = Field(None, description="where the checkpoint's run is, if not in a folder")
    output: str = Field(description="absolute path, or URI in an object store, of the JSON file that the result is written to")
    data: DataConfig
    scale: ScaleConfig = ScaleConfig()
    precision: Precision = "fp32"
    precision_reason: str = Field("", description="why it is this one, where precision was `auto`")

    @property
    def features_file(self) -> str:
        """Next to `output`, the Parquet file of features that `embed` writes."""
        return f"{self.output.removesuffix('.json')}.parquet"
