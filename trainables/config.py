"""The configuration of one training job: frozen, typed, checked sections. Nothing here knows Ray, files or the sweep.

`service.config.experiment` composes the same sections into the experiment that a user writes.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]

ON_DEVICE = ("gpu", "dali")
"""What `data.decoder` may be that decodes on the device, see `trainables.device.decoders`."""


def _refuse_booleans(schema: Any) -> Any:
    """A pydantic schema whose integers and floats, at any depth, refuse booleans before anything else is checked.

    Python counts true as 1; a user who writes `true` for a number has mistaken the key. Each branch of a union and each element
    of a list has its own error, which a validator of whole fields could not give. Sections inside have their own schemas.
    """
    if isinstance(schema, list):
        return [_refuse_booleans(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("int", "float"):
        check = partial(_refuse_boolean, f"{schema['type']}_type")
        return core_schema.no_info_before_validator_function(check, cast(CoreSchema, schema))
    return {key: part if key in _NO_SCHEMAS else _refuse_booleans(part) for key, part in schema.items()}


_NO_SCHEMAS = ("metadata", "serialization", "default", "config")
"""Keys of a pydantic schema whose values are no schemas."""


def _refuse_boolean(error: Any, value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError(error)
    return value


class Section(BaseModel):
    """One frozen part of an experiment; unknown keys are refused, and so are booleans, infinities and NaN for any number."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _refuse_booleans(handler(source))
        return schema


class RandAugmentConfig(Section):
    """RandAugment with torchvision's operations."""

    num_ops: Annotated[Count, Field(le=16)] = Field(2, description="operations on each image")
    magnitude: Annotated[Natural, Field(le=30)] = Field(9, description="of each operation, 0 to 30")


class ColorJitterConfig(Section):
    """How far colours may be changed: factors from 1 - value to 1 + value, hue by a part of the colour circle."""

    brightness: NonNegative = Field(0.0, description="factors from 1 - value to 1 + value")
    contrast: NonNegative = Field(0.0, description="factors from 1 - value to 1 + value")
    saturation: NonNegative = Field(0.0, description="factors from 1 - value to 1 + value")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.0, description="part of the colour circle, to either side")


class DeviceAugmentConfig(Section):
    """Training augmentation of whole batches on the device, in this order; absent or 0 is off."""

    randaugment: RandAugmentConfig | None = None
    color_jitter: ColorJitterConfig | None = None
    random_erasing: Probability = Field(0.0, description="probability that a rectangle of an image becomes the mean colour")
    mixup: NonNegative = Field(0.0, description="α of the shares of two mixed images, from Beta(α, α)")
    cutmix: NonNegative = Field(0.0, description="α of the shares of two pasted images; with mixup, each image draws which")

    @property
    def mixes(self) -> bool:
        """Whether an image may be mixed with one of another class."""
        return self.mixup > 0 or self.cutmix > 0


class DataConfig(Section):
    """Which images, and how they reach a worker."""

    path: str = Field(
        "digits", min_length=1, description="`digits`, `synthetic`, a packed set, or a folder with train/CLASS/* and val/CLASS/*"
    )
    global_batch_size: Count = Field(128, description="samples per optimizer step over all workers")
    loader_workers: Natural | Literal["auto"] = Field(
        "auto", description="decode threads that feed one worker; auto: as many as are needed; 0 decodes in the training thread"
    )
    loader: Literal["auto", "threads", "process"] = Field(
        "auto",
        description="where they live: threads of the training process, or a process of its own, which does not share its GIL; "
        "auto: a process where a GPU trains",
    )
    image_size: Annotated[Count, Field(le=4096)] = Field(
        8, description="height and width of the images that the models see, in pixels"
    )
    augment: Literal["none", "crop_flip", "pad_crop_flip"] = Field(
        "none", description="crop_flip: RandomResizedCrop + flip; pad_crop_flip: pad by 4, crop, flip, as for CIFAR"
    )
    device_augment: DeviceAugmentConfig = Field(DeviceAugmentConfig(), description="further augmentation, on the device")
    decoder: Literal["auto", "gpu", "dali"] = Field(
        "auto",
        description="what decodes JPEG; auto: the CPU, by the fastest library there is; gpu, dali: the GPU, for crop_flip alone",
    )
    fidelity: Literal["fast", "exact"] = Field(
        "fast", description="crop_flip in training: torchvision's pixels within a rounding (exact), or nearly so (fast)"
    )
    val_resize: Count | None = Field(None, description="shorter side before the centre crop; absent: image_size·256/224")
    shuffle: str = Field(
        "full", description="training order: `full`; `none`: as stored; `window(n)`: shards at random, shuffled within n samples"
    )
    last_batch: Literal["drop", "short"] = Field("drop", description="what becomes of the last, incomplete training batch")
    prefetch_batches: Count = Field(2, description="batches that a loader prepares ahead")
    max_bad: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.001, description="share of a split's images that an epoch may skip as unreadable; one may always be, unless this is 0"
    )
    stage: Annotated[str, Field(pattern=r"^(none|ram|[/~].*)$")] = Field(
        "none", description="where a node keeps its copy of a packed set: `ram`, or a folder (absolute); `none`: no copy"
    )
    cache: Literal["none", "memory"] = Field("none", description="memory: a node keeps image files that it has read in memory")
    cache_mib: Count | None = Field(
        None, description="most that `cache: memory` or the shards of a remote set take on a node; absent: by what is free"
    )
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="per-channel mean of pixels in [0, 1]")
    std: tuple[Positive, Positive, Positive] = Field(
        (0.229, 0.224, 0.225), description="per-channel deviation of pixels in [0, 1]"
    )
    synthetic_images: Count = Field(2048, description="training images of the `synthetic` source")
    synthetic_classes: Count = Field(10, description="classes of the `synthetic` source")

    @property
    def augments_at_random(self) -> bool:
        """Whether an image of the training split is augmented differently in each epoch."""
        return self.augment != "none" or self.device_augment != DeviceAugmentConfig()

    @property
    def decodes_on_device(self) -> bool:
        """Whether training's crops are decoded on the device."""
        return self.decoder in ON_DEVICE

    @model_validator(mode="after")
    def _check_device_decoder(self) -> Self:
        if self.decodes_on_device and self.augment != "crop_flip":
            raise ValueError(
                f"decoder {self.decoder} decodes what augment crop_flip cuts out, and augment is {self.augment}: "
                "write decoder auto"
            )
        return self

    @field_validator("shuffle")
    @classmethod
    def _check_shuffle(cls, shuffle: str) -> str:
        if not re.fullmatch(r"full|none|window\([1-9][0-9]{0,11}\)", shuffle):
            raise ValueError(f"must be full, none or window(n) with a number of samples n, as window(10000), not {shuffle!r}")
        return shuffle


class ModelConfig(Section):
    """A model by name."""

    model: str = Field(min_length=1, description="one of ours, torchvision's or timm's (`timm/NAME`)")


class OtherTeacherConfig(ModelConfig):
    """A further model that is imitated; it has been trained before."""

    weights: str = Field(min_length=1, description="as teacher.weights")
    share: Positive = Field(1.0, description="weight of its probabilities in the mean of all teachers'")


class TeacherConfig(ModelConfig):
    """The model that is imitated."""

    weights: str | None = Field(
        None, description="a checkpoint of ours, a torchvision or timm weight name, a state-dict file; absent: trained first"
    )
    epochs: Count | None = Field(None, description="epochs of its training; absent: optim.epochs")
    cache: str | None = Field(
        None,
        min_length=1,
        description="a folder that all nodes share, where its logits, and an assistant's, are stored for all runs",
    )
    cache_top_k: Count | None = Field(None, description="store so many classes of each image, and what the others add up to")
    cache_epochs: Count | None = Field(
        None, description="augment the images in so many ways, one epoch each, then again; absent: every epoch in its own"
    )
    service: Annotated[Count, Field(le=1024)] | None = Field(
        None, description="so many Ray actors compute its logits for all students, instead of a network in each worker"
    )
    placement: Literal["auto", "whole", "sharded"] = Field(
        "auto",
        description="its network: whole in each worker, or each has a part of its parameters; auto: whole where that fits a GPU",
    )
    share: Positive = Field(1.0, description="weight of its probabilities in the mean with `others`")
    others: tuple[OtherTeacherConfig, ...] = Field(
        (), description="further teachers: the mean of their probabilities is imitated, each counting by its `share`"
    )

    @field_validator("cache")
    @classmethod
    def _check_cache_folder(cls, cache: str | None) -> str | None:
        if cache is not None and "://" in cache:
            raise ValueError("must be a folder that all nodes mount, not a URI")
        if cache is not None and "\0" in cache:
            raise ValueError("must be a folder, and no path has the character NUL in it")
        return cache

    @model_validator(mode="after")
    def _check_cache_keys(self) -> Self:
        for name in ("cache_top_k", "cache_epochs"):
            if self.cache is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is for a teacher whose logits are cached: write cache: FOLDER, or leave it out")
        if self.cache is not None and self.others:
            raise ValueError("cache stores the logits of one teacher: leave out cache, or others")
        if self.service is not None and self.others:
            raise ValueError("service computes the logits of one teacher: leave out service, or others")
        if self.placement == "sharded" and self.logits_only is not None:
            raise ValueError(
                f"placement sharded is for a network that runs in every step, and {self.logits_only} is set: leave out one of"
                " the two"
            )
        if self.service is not None and self.cache is not None:
            raise ValueError("cache stores what service would compute: leave out one of the two")
        return self

    @property
    def logits_only(self) -> str | None:
        """The key of what gives the teacher's logits, and no more of it, in place of a network in each worker; None: neither."""
        return "teacher.cache" if self.cache is not None else "teacher.service" if self.service is not None else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Those of this teacher and the others, as parts of 1."""
        shares = (self.share, *(other.share for other in self.others))
        return tuple(share / math.fsum(shares) for share in shares)


class AssistantConfig(ModelConfig):
    """A model between teacher and student: it learns from the one before it and teaches the one after it."""

    epochs: Count | None = Field(None, description="epochs of its training; absent: optim.epochs")

    @model_validator(mode="before")
    @classmethod
    def _refuse_weights(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and "weights" in tree:
            raise ValueError("weights: an assistant is trained here: leave them out")
        return tree


class MethodOptions(Section):
    """The options of every distillation method; a method adds its own, and gives the defaults of its paper."""

    weight: NonNegative = Field(1.0, description="of the method's loss")
    warmup_epochs: NonNegative = Field(0.0, description="epochs over which the weight rises linearly from 0")
    warmup_by: Literal["step", "epoch_from_0", "epoch_from_1"] = Field(
        "step", description="when it rises: with every step, or once an epoch, to (number of the epoch)/warmup_epochs"
    )
    decay: Literal["none", "linear", "cosine"] = Field("none", description="how the weight falls to 0 at the last epoch's end")
    student_taps: tuple[str, ...] | None = Field(None, description="where the student is read; absent: the method's own points")
    teacher_taps: tuple[str, ...] | None = Field(None, description="where the teacher is read; absent: the method's own points")

    def weight_at(self, epoch: float, epochs: int) -> float:
        """The weight when `epoch` epochs of `epochs` have passed."""
        counted = {"step": epoch, "epoch_from_0": math.floor(epoch), "epoch_from_1": math.floor(epoch) + 1}[self.warmup_by]
        risen = min(counted / self.warmup_epochs, 1.0) if self.warmup_epochs else 1.0
        done = min(epoch / epochs, 1.0)
        left = {"none": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.decay]
        return self.weight * max(risen, 0.0) * left


class DistillConfig(Section):
    """How the student learns: task_weight·CE + Σ over methods of weight·(its terms)."""

    method: tuple[str, ...] = Field(
        ("kd",), description="a method's name, or several; one of your own as FILE.py:CLASS; none: the labels alone"
    )
    task_weight: NonNegative | None = Field(
        None, description="weight of the labels' cross-entropy; absent: as the methods have it by default, the largest"
    )
    options: dict[str, dict[str, Any]] = Field(
        {}, description="method → its options, such as `weight`; those of a method that is not used wait until it is"
    )

    @field_serializer("method")
    def _serialize_method(self, method: tuple[str, ...]) -> tuple[str, ...] | str:
        return method or "none"

    @field_validator("method", mode="before")
    @classmethod
    def _parse_method(cls, method: Any) -> Any:
        if isinstance(method, list | tuple) and not method:
            raise ValueError("names no method: write one, such as kd, or none")
        if not isinstance(method, str | list | tuple):
            raise ValueError(f"names a method, or a list of methods, such as kd, not {method!r}")
        return () if method == "none" else (method,) if isinstance(method, str) else method

    @field_validator("method")
    @classmethod
    def _check_unique(cls, method: tuple[str, ...]) -> tuple[str, ...]:
        keys = [name.rpartition(":")[2] for name in method]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"names {twice} twice: set its weight in distill.options.{twice}.weight instead")
        return method


class LossOptimConfig(Section):
    """An optimizer for one loss, where it differs from the section around it."""

    name: Literal["sgd", "adamw"] | None = Field(None, description="as optim.name; absent: the same")
    lr: Positive | None = Field(None, description="as optim.lr; absent: the same")
    schedule: Literal["constant", "step", "cosine"] | None = Field(None, description="as optim.schedule; absent: the same")
    milestones: tuple[Count, ...] | None = Field(None, description="as optim.milestones; absent: the same")
    gamma: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="as optim.gamma; absent: the same")
    warmup_epochs: NonNegative | None = Field(None, description="as optim.warmup_epochs; absent: the same")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="as optim.momentum; absent: the same")
    nesterov: bool | None = Field(None, description="as optim.nesterov; absent: the same")
    weight_decay: NonNegative | None = Field(None, description="as optim.weight_decay; absent: the same")


class OptimConfig(Section):
    """Optimizer, schedule and length of training."""

    name: Literal["sgd", "adamw", "dot"] = Field(
        "sgd", description="dot: the Distillation-Oriented Trainer, SGD with a momentum for the task and one for the methods"
    )
    losses: dict[str, LossOptimConfig] = Field(
        {}, description="`task`, a method or METHOD/TERM → an optimizer of its own, as what differs from this section"
    )
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.075, description="dot: the task's momentum is `momentum` less this, the methods' is `momentum` and this"
    )
    epochs: Count = Field(10, description="epochs of training")
    lr: Positive = Field(0.1, description="peak learning rate")
    lr_scaling: Literal["none", "linear"] = Field(
        "none", description="linear: lr is multiplied by global_batch_size / lr_base_batch"
    )
    lr_base_batch: Count = Field(256, description="lr_scaling linear: the global batch size for which lr is meant")
    schedule: Literal["constant", "step", "cosine"] = Field(
        "cosine", description="how the learning rate falls after the warm-up; cosine: to 0 at the end"
    )
    milestones: tuple[Count, ...] = Field((30, 60, 90), description="epochs at which the step schedule multiplies lr by gamma")
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="schedule step: factor at each milestone")
    warmup_epochs: NonNegative = Field(0.0, description="epochs over which the learning rate rises linearly to lr")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of sgd and dot")
    nesterov: bool = Field(False, description="Nesterov momentum, of sgd")
    weight_decay: NonNegative = Field(1e-4, description="of sgd and dot L2, of adamw decoupled")
    decay_norm_and_bias: bool = Field(True, description="false: no weight decay on norm layers and biases")
    accumulate: Count = Field(
        1, description="micro-batches per optimizer step, of the per-worker batch; one worker needs 2 to measure the noise_scale"
    )
    clip_grad_norm: Positive | None = Field(None, description="largest L2 norm of all gradients of a step; absent: no clipping")

    @model_validator(mode="after")
    def _check_dot(self) -> Self:
        if self.name == "dot":
            if self.nesterov or self.losses:
                raise ValueError("name dot has two momenta of its own: set nesterov to false, and leave out losses")
            if self.momentum + self.delta >= 1 or self.momentum < self.delta:
                raise ValueError(
                    f"name dot: momentum {self.momentum:g} ± delta {self.delta:g} must lie in 0 … 1: write a smaller delta"
                )
        return self

    def for_loss(self, key: str, declared: LossOptimConfig | None = None) -> OptimConfig:
        """The section as it is for one loss; what a method has `declared` for it counts where `losses` says nothing."""
        layers = (layer.model_dump(exclude_none=True) for layer in (declared, self.losses.get(key)) if layer is not None)
        own = {name: value for layer in layers for name, value in layer.items()}
        return OptimConfig.model_validate({**self.model_dump(), **own, "losses": {}})


class ScaleConfig(Section):
    """How many processes, what each has of the model, and what each reserves."""

    num_workers: Count = Field(1, description="Ray Train workers: the world size; [2, 8] sets min_workers to 2 and this to 8")
    min_workers: Count | None = Field(
        None, description="elastic: a stage goes on with as few workers where nodes are gone; absent: with num_workers alone"
    )
    pipeline_stages: Count = Field(
        1, description="workers that share one replica of the trained model, each with a part of its layers"
    )
    micro_batches: Count | Literal["auto"] = Field(
        "auto",
        description="parts of a replica's batch that flow through its pipeline stages; auto: by timing; without effect for one",
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b", description="order of the micro-batches' passes in a pipeline stage; 1f1b stores fewer activations"
    )
    cut: tuple[str, ...] | None = Field(
        None,
        description="modules with which the student's second and later pipeline stages begin; absent: planned by timing",
    )
    use_gpu: bool | Literal["auto"] = Field("auto", description="one GPU per worker; auto: where the cluster has GPUs")
    cpus_per_worker: Count = Field(1, description="compute threads of one worker, not counting its loader workers")
    sync_batch_norm: bool = Field(False, description="batch statistics over all workers")
    hang_after_s: NonNegative | Literal["auto"] = Field(
        "auto",
        description="seconds without progress after which workers hang and are restarted, and ten times as many before the "
        "second step; auto: 50 steady steps, at least 120 s (a checkpoint 600 s); 0: never",
    )
    collective_timeout_s: Count = Field(
        1800, description="seconds after which torch gives up a collective; less than hang_after_s leaves a hang unexplained"
    )

    @field_validator("pipeline_stages", mode="before")
    @classmethod
    def _check_stages_are_known(cls, value: object) -> object:
        if value == "auto":
            raise ValueError(
                "auto is for sweeps: write sweep.space: {scale.pipeline_stages: auto}, or here a number: `distill split`"
                " shows whether it helps"
            )
        return value

    max_failures: Natural = Field(
        3, description="restarts after a worker or a node has died, or a hang; an announced end is not counted"
    )
    wait_for_nodes_s: NonNegative = Field(
        1800.0, description="seconds that a stage waits for nodes where those that are there are too few; 0: it ends at once"
    )

    @model_validator(mode="before")
    @classmethod
    def _parse_range(cls, tree: Any) -> Any:
        workers = tree.get("num_workers") if isinstance(tree, dict) else None
        if not isinstance(workers, list | tuple) or len(workers) != 2:
            return tree
        return {**tree, "min_workers": workers[0], "num_workers": workers[1]}

    @property
    def num_replicas(self) -> int:
        """Copies of the model, each of which trains on its part of the global batch."""
        return self.num_workers // self.pipeline_stages

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        stages, workers = self.pipeline_stages, self.num_workers
        if self.min_workers is not None and self.min_workers > workers:
            raise ValueError(f"min_workers {self.min_workers} is more than num_workers {workers}: write at most {workers}")
        if workers % stages:
            lower = max(workers // stages, 1) * stages
            instead = f"write {lower} or {lower + stages}" if workers > stages else f"write {stages}"
            raise ValueError(f"num_workers {workers} is not divisible by pipeline_stages {stages}: {instead}")
        if self.cut is not None and len(self.cut) != stages - 1:
            raise ValueError(
                f"cut names {len(self.cut)} modules, and {stages} pipeline_stages begin with {stages - 1} besides the images: "
                "name as many, or leave cut out"
            )
        return self


class TrainingConfig(Section):
    """How the loop runs, apart from what it learns."""

    channels_last: bool = Field(False, description="models and images in channels_last memory format")
    compile: bool = Field(False, description="torch.compile the student and the teacher")
    log_every: Count = Field(20, description="steps between log lines and records")
    checkpoint_every: Count = Field(
        500, description="steps between checkpoints inside an epoch; one is written at each epoch's end too"
    )
    checkpoint_every_s: Positive = Field(
        300.0, description="seconds between checkpoints inside an epoch, where checkpoint_every steps take longer"
    )
    evaluate_every: Count = Field(
        1, description="epochs between evaluations, those of a method's init stage apart; the last epoch is always evaluated"
    )
    warmup_steps: Natural = Field(5, description="first steps that throughput and phase times leave out")
    max_steps: Count | None = Field(
        None, description="stop after so many steps past the warm-up, without evaluation: a timing run"
    )
    until_top1_pct: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="the student: stop after the first evaluated epoch whose top-1 reaches this, and record after how long"
    )
    until_s: Positive | None = Field(
        None, description="the student: stop after the epoch in which training has taken so many seconds, evaluation apart"
    )
    telemetry_every_s: Positive = Field(1.0, description="seconds between two readings of GPU and CPU telemetry")

    @model_validator(mode="after")
    def _check_timing_run(self) -> Self:
        if self.max_steps is not None and (self.until_top1_pct is not None or self.until_s is not None):
            raise ValueError("max_steps is for timing runs, which are not evaluated: leave out until_top1_pct and until_s")
        return self


class TrainConfig(Section):
    """Everything one worker needs to train one model: with `distill` it distils, without it trains on labels alone."""

    stage: str = Field("student", description="name of this stage in records: `teacher`, `assistant1` …, `student`")
    output_dir: str = Field(description="absolute stage directory on a file system that all nodes share")
    data: DataConfig
    loader_auto: bool = Field(False, description="data.loader_workers was `auto`: it is the most threads, fewer may be enough")
    model: str
    teacher: TeacherConfig | None = None
    teachers: tuple[str, ...] = Field((), description="names of the actors of `teacher.service`")
    teacher_sha256: str | None = Field(None, description="hash of the teacher whose logits are cached or requested")
    distill: DistillConfig | None = Field(None, description="absent: the labels alone are learned")
    optim: OptimConfig = OptimConfig()
    scale: ScaleConfig = ScaleConfig()
    train: TrainingConfig = TrainingConfig()
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    next_num_workers: int | None = Field(
        None,
        description="an elastic stage: it ends, to begin again with so many workers, once there is room; None: never",
    )
    report_each_epoch: bool = Field(False, description="a scheduler may stop the job after each epoch: the loop waits for Ray")
    labels: dict[str, str] = Field(default_factory=dict, description="tags of exported Ray metrics, such as the trial's name")

    @property
    def num_augmentation_epochs(self) -> int | None:
        """The number of different augmentations of an image, which epochs repeat in turn; None: every epoch has its own."""
        if self.teacher is None or self.teacher.logits_only is None:
            return None
        return self.teacher.cache_epochs if self.data.augments_at_random else 1

    @property
    def num_cached_epochs(self) -> int:
        """The number of epochs whose logits make a full cache."""
        return min(self.num_augmentation_epochs or self.optim.epochs, self.optim.epochs)


class FillConfig(TrainConfig):
    """What one worker needs to fill the cache of `teacher`: nothing is trained."""


class EvaluateConfig(Section):
    """What one worker needs to evaluate a checkpoint."""

    checkpoint: str
    output: str = Field(description="absolute path of the JSON file that the result is written to")
    data: DataConfig
    scale: ScaleConfig = ScaleConfig()
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
