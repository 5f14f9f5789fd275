"""The table of what does not go together: rules between the keys of a configuration, and between those and a method's needs.

The driver checks it when it reads an experiment, with rules of its own (`service.config.rules`); the worker when it builds a job,
with the same messages. A row's condition gives what is broken, for the message, or nothing; the first row that is broken counts,
so that a row may rely on those above it. A message begins with the key that it is about, and is formatted with `s`, the settings,
and `found`, what the condition gave; that of a method with `m`, the method, and `when` too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from trainables.config import (
    DataConfig,
    DistillConfig,
    EvalConfig,
    MethodOptions,
    OptimConfig,
    ScaleConfig,
    TeacherConfig,
    TeacherOfSeveralConfig,
    TrainingConfig,
    WeightedConfig,
)
from trainables.user_code import model_parts

Problem = str | None
OURS = ("sgd", "adamw")
"""The optimizers that go with pipeline stages and several losses."""


class JobSettings(Protocol):
    """What an experiment and a training job have alike."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def model(self) -> str: ...
    @property
    def weights(self) -> str | None: ...
    @property
    def freeze(self) -> bool: ...
    @property
    def teacher(self) -> TeacherConfig | None: ...
    @property
    def teachers(self) -> tuple[TeacherOfSeveralConfig, ...]: ...
    @property
    def all_teachers(self) -> tuple[WeightedConfig, ...]: ...
    @property
    def distillation(self) -> DistillConfig | None: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def scale(self) -> ScaleConfig: ...
    @property
    def train(self) -> TrainingConfig: ...
    @property
    def eval(self) -> EvalConfig: ...
    @property
    def precision(self) -> str: ...


@dataclass(frozen=True)
class Requirements:
    """What a method requires of the training, besides its taps. What cannot be met is refused before the training starts."""

    teacher: bool = True
    """There is a teacher."""
    hard_labels: bool = False
    """`labels_B` is the one class of each image."""
    whole_batch: bool = False
    """It compares samples with each other, or has batch norms of its own, so that parts of a batch would give other values."""
    all_gather: bool = False
    """It gathers the rows of all workers without comparing them: a worker may have fewer micro-batches than another."""
    reuses_classifier: bool = False
    """The student predicts with the teacher's classifier: it becomes STUDENT+TEACHER, see `models.reused_classifier`."""
    logits: bool = True
    """It reads logits. False: it reads features alone, and gets no logits of either model."""
    student_logits: bool = True
    """Its loss reaches the student's classifier, unless `logits` is False. False: it reads the logits of the teacher alone."""
    all_logits: bool = True
    """It reads the teacher's logit of every class. False: the largest and the total of the others are enough."""
    same_images: bool = False
    """Its buffers have a row for each training image: refused where a run is to go on with other data."""
    teacher_model: bool = False
    """Its forward uses the teacher's network or a part of it: not one of which each worker has a part, nor one elsewhere."""

    @property
    def reads_classes(self) -> bool:
        """Whether it reads logits, or a part of the teacher that makes them, and not features alone."""
        return self.logits or self.teacher_model or self.reuses_classifier


class MethodNeeds(Protocol):
    """What a method with its options needs, see `trainables.methods.select`."""

    @property
    def key(self) -> str: ...
    @property
    def requires(self) -> Requirements: ...
    @property
    def options(self) -> MethodOptions: ...
    @property
    def terms(self) -> tuple[str, ...]: ...
    @property
    def task_weight(self) -> float: ...
    @property
    def beyond_logits(self) -> str | None: ...
    @property
    def standardizes(self) -> bool: ...
    @property
    def whole_student(self) -> str | None: ...


Settings = TypeVar("Settings")
Rule = tuple[Callable[[Settings], object], str]
"""What is broken, the message."""
MethodRule = tuple[Callable[[Settings, int], object], Callable[[MethodNeeds, Any], object], str]
"""When the settings restrict methods, given the number of classes (0: not known), and what of a method that breaks; the message.
A method is loaded only where its settings restrict one."""


def replica_batch(settings: JobSettings) -> int:
    """Samples of one replica's batch; without pipeline stages each worker is a replica."""
    return settings.data.global_batch_size // settings.scale.num_replicas


def num_micro_batches(settings: JobSettings) -> int:
    """Parts of a replica's batch that are computed one after the other."""
    return settings.optim.accumulate * pipeline_micro_batches(settings)


def pipeline_micro_batches(settings: JobSettings) -> int:
    """Parts that flow through the pipeline stages at once, of a replica's batch or of each part by `optim.accumulate`."""
    scale, samples = settings.scale, replica_batch(settings) // settings.optim.accumulate
    if scale.pipeline_stages == 1:
        return 1
    return scale.micro_batches or max(1, min(4 * scale.pipeline_stages, samples))


def _splits(settings: JobSettings) -> tuple[str, int] | None:
    """The key that splits a replica's batch into parts, and their number."""
    parts = {"optim.accumulate": settings.optim.accumulate, "scale.micro_batches": pipeline_micro_batches(settings)}
    return next(((key, number) for key, number in parts.items() if number > 1), None)


def _batch_divisor(settings: JobSettings) -> str | None:
    batch, replicas, stages = settings.data.global_batch_size, settings.scale.num_replicas, settings.scale.pipeline_stages
    lower = max(batch // replicas, 1) * replicas
    divisor = f"scale.num_workers {replicas}" if stages == 1 else f"{replicas} replicas of {stages} scale.pipeline_stages"
    return f"{divisor}: write {lower} or {lower + replicas}" if batch % replicas else None


def _fitting_workers(settings: JobSettings) -> list[int] | None:
    """What `scale.min_workers` could be, where it does not share the batch evenly."""
    batch, scale, stages = settings.data.global_batch_size, settings.scale, settings.scale.pipeline_stages
    fitting = [workers for workers in range(stages, scale.num_workers + 1, stages) if batch % (workers // stages) == 0]
    return fitting if scale.min_workers is not None and scale.min_workers not in fitting else None


def _stage_multiples(scale: ScaleConfig) -> str | None:
    workers, stages = scale.num_workers, scale.pipeline_stages
    lower = workers // stages * stages
    return (f"{lower} or {lower + stages}" if lower else f"{stages}") if workers % stages else None


def _optimizers(optim: OptimConfig) -> dict[str, OptimConfig]:
    """The section, and what it is for each loss with an optimizer of its own."""
    return {"optim": optim, **{f"optim.losses.{key}": optim.for_loss(key) for key in optim.losses}}


def _first_set(teacher: WeightedConfig, *keys: str) -> str | None:
    return next((key for key in keys if getattr(teacher, key) is not None), None)


_OF_WEIGHTS = ("weights_key", "classes", "image_size", "mean", "std", "finetune", "head")
"""Keys of a teacher that belong to given weights."""
OF_CACHE = ("cache_top_k", "cache_epochs", "cache_feature_dtype")
"""Keys of a teacher that belong to `teacher.cache`."""


def _rows_from(settings: JobSettings) -> str | None:
    return settings.all_teachers[0].rows_from if settings.all_teachers else None


def _is_sharded(settings: JobSettings) -> bool:
    return settings.teacher is not None and settings.teacher.placement == "sharded"


def _unstaged(settings: JobSettings) -> str | None:
    """What a model that is cut into pipeline stages cannot be trained with."""
    optim, teacher = settings.optim, settings.teacher
    instead = {
        "precision fp16: its scaler would see one stage's gradients; write bf16, or fp32": settings.precision == "fp16",
        "scale.sync_batch_norm: write false": settings.scale.sync_batch_norm,
        "train.compile: write false": settings.train.compile,
        "train.gradient_checkpointing: write false": settings.train.gradient_checkpointing,
        f"data.decoder {settings.data.decoder}: write auto": settings.data.decodes_on_device,
        f"optim.name {optim.name}: write sgd or adamw": optim.name not in OURS,
        "optim.ema_decay: leave it out": optim.ema_decay,
        "optim.clip_grad_agc: write clip_grad_norm": optim.clip_grad_agc,
        "optim.losses, optimizers of single losses: leave them out": optim.losses,
        "optim.lr_head and optim.layer_decay: leave them out": optim.lr_head or optim.layer_decay,
        "teacher.lr_head and teacher.layer_decay: leave them out": teacher and (teacher.lr_head or teacher.layer_decay),
        "teacher.service: leave it out": teacher is not None and teacher.service is not None,
    }
    return next((text for text, applies in instead.items() if applies), None)


def _falls(optim: OptimConfig) -> bool:
    """Whether the learning rate falls to `min_lr_factor` of its peak, in which it stays for `cooldown_epochs`."""
    return optim.schedule in ("cosine", "wsd")


def _idle_end(optim: OptimConfig) -> str | None:
    """Keys about the end of a schedule, where no schedule has such an end."""
    written = [f"optim.{key}" for key in ("min_lr_factor", "cooldown_epochs") if getattr(optim, key)]
    return None if any(map(_falls, _optimizers(optim).values())) else " and ".join(written)


def without_epoch(optim: OptimConfig) -> str | None:
    """What leaves no epoch between warm-up and cool-down."""
    for key, own in _optimizers(optim).items():
        parts = {f"{key}.warmup_epochs": own.epochs_of_warmup, "optim.cooldown_epochs": _falls(own) * own.cooldown_epochs}
        if sum(parts.values()) >= own.epochs:
            written = [f"{name} {epochs:g}" for name, epochs in parts.items() if epochs]
            return f"{' and '.join(written)} {'leave' if len(written) > 1 else 'leaves'}"
    return None


def _unknown_loss(settings: JobSettings) -> tuple[str, str] | None:
    """A key of `optim.losses` that is of no method, and those that could be."""
    if (distill := settings.distillation) is None:
        return None
    unknown = sorted(key for key in settings.optim.losses if key != "task" and key.partition("/")[0] not in distill.keys)
    return (unknown[0], ", ".join(sorted(["task", *distill.keys]))) if unknown else None


def _task_optimizer(settings: JobSettings) -> str | None:
    """What gives the labels' loss an optimizer of its own, and what to write where that loss has no weight."""
    optim, distill = settings.optim, settings.distillation
    if optim.name == "dot":
        return "optim.name: dot has a momentum for the labels, whose loss has no weight here: write sgd"
    if "task" in optim.losses:
        return "optim.losses.task: the labels' loss has no weight here: leave it out"
    if optim.losses and distill is not None and {*distill.weighted} <= optim.losses.keys():
        return (
            "optim.losses: all losses but the labels' are in it, and the labels' has no weight here: leave one method out of it"
        )
    return None


RULES: tuple[Rule[JobSettings], ...] = (
    # Workers and their parts of a batch.
    (
        lambda s: s.scale.min_workers is not None and s.scale.min_workers > s.scale.num_workers,
        "scale.min_workers {s.scale.min_workers} is more than scale.num_workers {s.scale.num_workers}: write at most"
        " {s.scale.num_workers}",
    ),
    (
        lambda s: _stage_multiples(s.scale),
        "scale.num_workers {s.scale.num_workers} is not divisible by scale.pipeline_stages {s.scale.pipeline_stages}: write"
        " {found}",
    ),
    (
        lambda s: (
            s.scale.cut is not None
            and len(s.scale.cut) != s.scale.pipeline_stages - 1
            and (len(s.scale.cut), s.scale.pipeline_stages - 1)
        ),
        "scale.cut names {found[0]} modules, and {s.scale.pipeline_stages} pipeline_stages begin with {found[1]} besides the"
        " images: name as many, or leave cut out",
    ),
    (_batch_divisor, "data.global_batch_size {s.data.global_batch_size} is not divisible by {found}"),
    (
        _fitting_workers,
        "scale.min_workers {s.scale.min_workers} cannot share data.global_batch_size {s.data.global_batch_size} evenly: write"
        " one of {found}",
    ),
    (
        lambda s: s.scale.pipeline_stages == 1 and s.optim.accumulate > replica_batch(s) and replica_batch(s),
        "optim.accumulate {s.optim.accumulate} exceeds the {found} samples of one worker's batch",
    ),
    (
        lambda s: num_micro_batches(s) > replica_batch(s) and (pipeline_micro_batches(s), replica_batch(s)),
        "scale.micro_batches {found[0]} × optim.accumulate {s.optim.accumulate} exceed the {found[1]} samples of one replica's"
        " batch",
    ),
    (
        lambda s: s.scale.pipeline_stages > 1 and _unstaged(s),
        "scale.pipeline_stages {s.scale.pipeline_stages} does not go with {found}, or scale.pipeline_stages 1",
    ),
    (
        lambda s: s.scale.sync_batch_norm and _splits(s),
        "scale.sync_batch_norm looks at all samples of a batch, which {found[0]} {found[1]} splits: set {found[0]} to 1, or"
        " scale.sync_batch_norm to false",
    ),
    # Images.
    (lambda s: resize_covers_crop(s.data), "{found}"),
    (
        lambda s: (
            s.data.device_augment.mixes
            and replica_batch(s) % 2
            and (replica_batch(s), s.data.global_batch_size + s.scale.num_replicas)
        ),
        "data.device_augment: mixup and cutmix mix pairs, but each of {s.scale.num_replicas} workers has {found[0]} of"
        " data.global_batch_size {s.data.global_batch_size}: write {found[1]}, or set both to 0",
    ),
    (
        lambda s: s.data.device_augment.mixes and s.data.last_batch == "short",
        "data.device_augment: mixup and cutmix mix pairs, which a short last batch may part: set data.last_batch to drop, or both"
        " to 0",
    ),
    (
        lambda s: s.data.device_augment.mixes and s.teacher and s.teacher.service,
        "teacher.service: it has the teacher's outputs for each image, which mixup and cutmix mix with another: set"
        " data.device_augment.mixup and data.device_augment.cutmix to 0, or write teacher.cache in its place",
    ),
    (
        lambda s: s.data.decodes_on_device and s.data.augment != "crop_flip",
        "data.decoder {s.data.decoder} decodes what augment crop_flip cuts out, and augment is {s.data.augment}: write decoder"
        " auto",
    ),
    (
        lambda s: s.data.decodes_on_device and s.scale.use_gpu is False,
        "data.decoder {s.data.decoder} works on GPUs only: set scale.use_gpu, or data.decoder to auto",
    ),
    (
        lambda s: s.data.decodes_on_device and s.teacher is not None and s.teacher.service is not None,
        "teacher.service: it is sent images that the host has decoded, and data.decoder {s.data.decoder} decodes on each worker's"
        " GPU: set data.decoder to auto, or leave teacher.service out",
    ),
    # Several data sets.
    (
        lambda s: s.data.more and (total := sum(each.share for each in s.data.more)) >= 1 and f"{total:g}",
        "data.more: its shares add up to {found}, which leaves nothing of data.path: write less than 1 in all",
    ),
    (
        lambda s: s.data.global_batch_size <= len(s.data.more) and len(s.data.sets),
        "data.global_batch_size: {s.data.global_batch_size} has no image for each of {found} sets: write at least {found}",
    ),
    (
        lambda s: not s.data.labels and any(each.labels for each in s.data.more),
        "data.more: labels: true in it, and data.labels is false: leave labels out",
    ),
    (
        lambda s: s.data.mixes_unlabeled and (s.distillation is None or (s.teacher is not None and s.teacher.weights is None)),
        "data.more: a model that learns labels alone learns nothing of images without: write labels: true for each set in it, or"
        " teacher.model and teacher.weights",
    ),
    (
        lambda s: s.data.mixes_unlabeled and s.scale.pipeline_stages > 1,
        "data.more: scale.pipeline_stages {s.scale.pipeline_stages} does not go with images without labels among others: write"
        " labels: true for each set in it, or scale.pipeline_stages 1",
    ),
    # Images without labels.
    (
        lambda s: not s.data.labels and s.distillation is None,
        "data.labels: false leaves nothing to learn without a teacher: write teacher.model and teacher.weights",
    ),
    (
        lambda s: not s.data.labels and s.teacher is not None and s.teacher.weights is None,
        "teacher.weights: a teacher is not trained without labels, and data.labels is false: write its weights",
    ),
    (
        lambda s: not s.data.labels and s.teacher and s.teacher.finetune,
        "teacher.finetune: a teacher is not fine-tuned without labels, and data.labels is false: leave it out",
    ),
    (
        lambda s: not s.data.labels and s.optim.lr_head,
        "optim.lr_head: a student has no classifier without labels, and data.labels is false: leave it out",
    ),
    (
        lambda s: not s.data.labels and s.distillation and s.distillation.task_weight,
        "distill.task_weight: there are no labels, and data.labels is false: leave it out",
    ),
    (
        lambda s: not s.data.labels and s.scale.pipeline_stages > 1,
        "scale.pipeline_stages: a student without a classifier is trained whole, and data.labels is false: write 1",
    ),
    (
        lambda s: not s.data.labels and s.train.until_top1_pct and s.eval.path is None,
        "train.until_top1_pct: without labels there is no accuracy: write eval.path, or leave it out",
    ),
    (
        lambda s: s.data.labels and s.eval.path is not None,
        "eval.path measures the features of a student that learns no labels: write data.labels: false, or leave eval.path out",
    ),
    (
        lambda s: s.eval.best in (("cka", "cosine") if s.data.labels else ("top1_pct",)) and s.eval.path is None and s.eval.best,
        "eval.best: {found} is not measured: top1_pct needs data.labels: true or eval.path, cka and cosine data.labels: false",
    ),
    (
        lambda s: s.freeze and (s.weights is None or not s.data.labels or s.scale.pipeline_stages > 1),
        "student.freeze trains the classifier alone: it needs student.weights, data.labels: true and scale.pipeline_stages: 1",
    ),
    # The teacher.
    (
        lambda s: s.teacher and s.teacher.weights is None and _first_set(s.teacher, *_OF_WEIGHTS),
        "teacher.{found} belongs to given weights: write teacher.weights: FILE, or leave it out",
    ),
    (
        lambda s: any(each.logit_scale and not each.embeds_classes for each in s.all_teachers),
        "teacher.logit_scale scales the cosines to class embeddings: write teacher.classes: FILE.npy or teacher.head:"
        " class_means, or leave it out",
    ),
    (
        lambda s: s.teacher and s.teacher.head and not s.data.labels,
        "teacher.head: class means are of images with labels, and data.labels is false: leave it out",
    ),
    (
        lambda s: (
            s.teacher and s.teacher.head and ("classes" if s.teacher.classes else "finetune" if s.teacher.finetune else None)
        ),
        "teacher.head {s.teacher.head} gives the teacher a classifier, and so does teacher.{found}: leave out one of the two",
    ),
    (
        lambda s: any(each.classes for each in s.all_teachers) and not s.data.labels,
        "teacher.classes: there are no classes without labels, and data.labels is false: leave it out",
    ),
    (
        lambda s: s.teacher and s.teacher.classes and s.teacher.finetune,
        "teacher.finetune trains a classifier, and teacher.classes gives one: leave out one of the two",
    ),
    (
        lambda s: next(filter(None, (_first_set(each, *OF_CACHE) for each in s.all_teachers if each.cache is None)), None),
        "teacher.{found} is for a teacher whose outputs are cached: write teacher.cache: FOLDER, or leave it out",
    ),
    (
        lambda s: s.precision == "fp64" and any(each.precision for each in s.all_teachers),
        "teacher.precision: precision fp64 is for exact comparisons, of the teacher too: leave teacher.precision out",
    ),
    (
        lambda s: s.teacher and s.teachers,
        "teachers: there is also a teacher, {s.teacher.model}: write teacher: null and all of them in teachers, or leave teachers"
        " out",
    ),
    (
        lambda s: len({(each.cache, each.cache_epochs) for each in s.teachers}) > 1,
        "teachers: all see the same images, and their outputs are cached together or not at all: write the same cache and"
        " cache_epochs for each",
    ),
    (
        lambda s: s.teacher and s.teacher.cache is not None and s.teacher.service is not None,
        "teacher.cache stores what teacher.service would compute: leave out one of the two",
    ),
    (
        lambda s: _is_sharded(s) and _rows_from(s),
        "teacher.placement sharded is for a network that runs in every step, and {found} is set: leave out one of the two",
    ),
    (
        lambda s: _is_sharded(s) and not s.data.labels and s.eval.best not in (None, "top1_pct"),
        "eval.best: teacher.placement sharded has no teacher's features in a validation, and {s.eval.best} compares with them:"
        " write top1_pct with eval.path, or leave eval.best out",
    ),
    (
        lambda s: _is_sharded(s) and s.train.compile,
        "teacher.placement sharded does not go with train.compile: set train.compile to false, or teacher.placement to whole",
    ),
    (
        lambda s: (
            _is_sharded(s)
            and s.scale.min_workers
            and s.scale.min_workers < 2 * s.scale.pipeline_stages
            and 2 * s.scale.pipeline_stages
        ),
        "teacher.placement sharded needs 2 workers or more, and scale.min_workers is {s.scale.min_workers}: write at least"
        " {found}",
    ),
    (
        lambda s: len(model_parts(s.model)) > 1 and _rows_from(s),
        "{found}: it answers with outputs, and {s.model} takes in the teacher's classifier: leave it out",
    ),
    # Optimizers, losses and the loop.
    (
        lambda s: s.optim.name == "dot" and (s.optim.nesterov or s.optim.losses),
        "optim.name dot has two momenta of its own: set optim.nesterov to false, and leave out optim.losses",
    ),
    (
        lambda s: s.optim.name == "dot" and not s.optim.delta <= s.optim.momentum < 1 - s.optim.delta,
        "optim.name dot: momentum {s.optim.momentum:g} ± delta {s.optim.delta:g} must lie in 0 … 1: write a smaller delta",
    ),
    (
        lambda s: next((key for key, o in _optimizers(s.optim).items() if o.warmup_epochs and o.warmup_steps), None),
        "{found}.warmup_steps and {found}.warmup_epochs are two lengths of one warm-up: leave one of them out, or write 0",
    ),
    (
        lambda s: s.optim.name == "dot" and s.optim.args,
        "optim.args does not go with optim.name dot, whose settings are momentum and delta: leave it out",
    ),
    (lambda s: without_epoch(s.optim), "{found} no epoch of optim.epochs {s.optim.epochs}: write less"),
    (
        lambda s: next((key for key, o in _optimizers(s.optim).items() if o.nesterov and not o.momentum), None),
        "{found}.nesterov needs {found}.momentum above 0: set it, or set {found}.nesterov to false",
    ),
    (
        lambda s: [key for key in ("clip_grad_norm", "clip_grad_value", "clip_grad_agc") if getattr(s.optim, key)][1:],
        "optim.{found[0]}: gradients are clipped in one way: leave all but one of optim.clip_grad_… out",
    ),
    (
        lambda s: s.optim.losses and next((o.name for o in _optimizers(s.optim).values() if o.name not in OURS), None),
        "optim.losses: optimizers of single losses are sgd or adamw, and {found} is another one: leave optim.losses out",
    ),
    (
        lambda s: _idle_end(s.optim),
        "{found}: only the schedules cosine and wsd end so, and this is {s.optim.schedule}: leave out",
    ),
    (
        lambda s: s.optim.cooldown_epochs and not s.optim.min_lr_factor,
        "optim.cooldown_epochs trains at the lowest rate, and optim.min_lr_factor is 0: write optim.min_lr_factor above 0, or"
        " leave cooldown_epochs out",
    ),
    (
        lambda s: s.train.bce_threshold and s.train.task_loss != "bce",
        "train.bce_threshold belongs to train.task_loss bce: leave it out",
    ),
    (
        lambda s: s.train.bce_threshold and s.train.bce_threshold > 1 - s.train.label_smoothing,
        "train.bce_threshold {s.train.bce_threshold:g} is above each target that train.label_smoothing"
        " {s.train.label_smoothing:g} leaves: write a smaller one",
    ),
    (
        lambda s: not s.data.labels and (s.train.label_smoothing or s.train.task_loss != "cross_entropy"),
        "train.label_smoothing and train.task_loss: there are no labels, and data.labels is false: leave them out",
    ),
    (
        lambda s: s.data.mixes_unlabeled and s.train.task_loss == "bce",
        "train.task_loss bce needs the label of each image: write labels: true for each set in data.more, or cross_entropy",
    ),
    (_unknown_loss, "optim.losses: there is no loss {found[0]!r} here: write one of {found[1]}"),
    (
        lambda s: s.distillation and s.distillation.teacher_dropping and _splits(s),
        "distill.teacher_dropping divides by a sum over all samples of a batch, which {found[0]} {found[1]} splits: set"
        " {found[0]} to 1, or leave teacher_dropping out",
    ),
    (
        lambda s: s.distillation and s.distillation.task_weight == 0 and not s.distillation.weighted,
        "distill.task_weight: it and the weights of all methods are 0: nothing would be learned; set one above 0",
    ),
    (
        lambda s: s.distillation and (s.distillation.task_weight == 0 or not s.data.labels) and _task_optimizer(s),
        "{found}",
    ),
    (
        lambda s: s.train.deterministic and s.train.compile == "max-autotune",
        "train.deterministic does not go with train.compile max-autotune, which chooses kernels by timing: write true",
    ),
    (
        lambda s: s.train.max_steps and (s.train.until_top1_pct or s.train.until_s),
        "train.max_steps is for timing runs, which are not evaluated: leave out train.until_top1_pct and train.until_s",
    ),
)
"""What every job must keep."""


def _idle_schedule(method: MethodNeeds) -> str | None:
    """An option that changes a weight in time, of a method whose weight counts in its init stage alone."""
    defaults = MethodOptions()
    names = () if method.terms else ("warmup_epochs", "warmup_by", "decay")
    return next((name for name in names if getattr(method.options, name) != getattr(defaults, name)), None)


def _missing_loss(method: MethodNeeds, losses: Any) -> tuple[str, str] | None:
    """A key of `optim.losses` that is no loss of its method, or has no term left; and those that could be."""
    terms = {f"{method.key}/{term}" for term in method.terms}
    rest = [method.key] if terms - losses.keys() else []
    unknown = [key for key in losses if key.partition("/")[0] == method.key and key not in (*terms, *rest)]
    return (unknown[0], ", ".join(sorted(["task", *terms, *rest]))) if unknown else None


METHOD_RULES: tuple[MethodRule[JobSettings], ...] = (
    (
        lambda s, _: not s.all_teachers,
        lambda m, _: m.requires.teacher,
        "distill.method: {m.key} needs a teacher: write teacher.model",
    ),
    (
        lambda s, _: not s.data.labels,
        lambda m, _: m.requires.reads_classes or m.requires.hard_labels,
        "distill.method: {m.key} reads classes, and data.labels is false: write embed, or another method on features alone",
    ),
    (
        lambda s, _: not s.data.labels and s.eval.best == "loss",
        lambda m, _: m.requires.whole_batch or m.requires.all_gather,
        "eval.best: {m.key} compares the images of a batch, and has no loss in a validation: write cka, or leave eval.best out",
    ),
    (
        lambda s, _: not s.data.labels and s.eval.best == "loss",
        lambda m, _: getattr(m.options, "balance", False),
        "eval.best: distill.options.{m.key}.balance divides the loss by its running mean, so that those of two evaluations do not"
        " compare: write cka, or leave eval.best out",
    ),
    (
        lambda s, _: s.data.mixes_unlabeled,
        lambda m, _: m.requires.hard_labels,
        "distill.method: {m.key} needs the label of each image: write labels: true for each set in data.more, or set"
        " distill.method to kd",
    ),
    (
        lambda s, _: s.data.more,
        lambda m, _: m.requires.same_images,
        "distill.method: {m.key} remembers each image, and one of data.more may come twice in a batch: leave data.more out, or"
        " set distill.method to kd",
    ),
    (
        lambda s, _: s.data.device_augment.mixes,
        lambda m, _: m.requires.hard_labels,
        "distill.method: {m.key} needs images of one class each: set data.device_augment.mixup and data.device_augment.cutmix"
        " to 0, or set distill.method to kd",
    ),
    (
        lambda s, _: _splits(s),
        lambda m, _: m.requires.whole_batch,
        "distill.method: {m.key} looks at all samples of a batch, which {when[0]} {when[1]} splits: set {when[0]} to 1",
    ),
    (
        lambda s, _: _splits(s),
        lambda m, _: getattr(m.options, "balance", False),
        "distill.options.{m.key}.balance takes the mean of a whole batch, which {when[0]} {when[1]} splits: set {when[0]} to 1,"
        " or leave balance out",
    ),
    (
        lambda s, _: s.scale.num_replicas > 1 and _splits(s),
        lambda m, _: m.requires.all_gather,
        "distill.method: {m.key} gathers the outputs of all workers, and one of them may have fewer micro-batches of a short"
        " batch: set {when[0]} to 1, or scale.num_workers to {s.scale.pipeline_stages}",
    ),
    (
        lambda s, _: s.weights is not None,
        lambda m, _: m.requires.reuses_classifier,
        "student.weights: {m.key} changes the student's end: leave student.weights out, or take another method",
    ),
    (
        lambda s, _: s.scale.pipeline_stages > 1,
        lambda m, _: m.whole_student,
        "distill.method: {m.key} has {found}, which scale.pipeline_stages {s.scale.pipeline_stages} does not go with: take"
        " another method, or write scale.pipeline_stages 1",
    ),
    (
        lambda s, _: _is_sharded(s),
        lambda m, _: m.requires.teacher_model,
        "teacher.placement: {m.key} reads the teacher's parameters, and sharded has a part of them on each worker: write whole",
    ),
    (
        lambda s, _: next(("classes" if each.classes else "head" for each in s.all_teachers if each.embeds_classes), None),
        lambda m, _: m.requires.teacher_model or m.requires.reuses_classifier,
        "teacher.{when}: {m.key} reads the teacher's linear classifier, and it has none: take another distill.method",
    ),
    (
        lambda s, _: _rows_from(s),
        lambda m, _: m.requires.teacher_model or m.requires.reuses_classifier,
        "{when}: it gives a teacher's outputs, and {m.key} needs its network: set {when} to null, or take another distill.method",
    ),
    (
        lambda s, _: _rows_from(s),
        lambda m, _: getattr(m.options, "teacher_norm", None) == "batch",
        "distill.options.{m.key}.teacher_norm: batch makes a teacher's outputs depend on the batch, and {when} has those of"
        " single images: write running, or set {when} to null",
    ),
    (
        lambda s, _: len(s.all_teachers) > 1 and len(s.all_teachers),
        lambda m, _: m.requires.reuses_classifier,
        "distill.method: {m.key} gives the student its teacher's classifier, and there are {when} teachers: leave all but one"
        " out, or take another method",
    ),
    (
        lambda s, _: len(s.all_teachers) > 1 and s.optim.losses,
        lambda m, losses: m.beyond_logits and next((key for key in losses if key.partition("/")[0] == m.key), None),
        "optim.losses: {m.key} has a loss with each of several teachers, which share an optimizer: leave {found} out",
    ),
    (
        lambda s, _: s.distillation and s.distillation.teacher_dropping,
        lambda m, _: m.requires.teacher and not m.beyond_logits,
        "distill.teacher_dropping: {m.key} learns from the mean of the teachers' probabilities, of which none is left out: take"
        " methods on features, such as embed, or leave it out",
    ),
    (
        lambda s, classes: any(each.cache_top_k and each.cache_top_k < classes for each in s.all_teachers) and classes,
        lambda m, _: (
            m.requires.teacher
            and (
                (m.standardizes and f"distill.options.{m.key}.standardize")
                or (m.requires.logits and m.requires.all_logits and m.key)
            )
        ),
        "teacher.cache_top_k: it keeps {s.all_teachers[0].cache_top_k} of {when} classes apart, and {found} looks at each: leave"
        " it out, or set distill.method to kd, without standardize",
    ),
    (
        lambda _, classes: classes == 2,
        lambda m, _: m.standardizes,
        "distill.options.{m.key}.standardize: the standardised logits of two classes are always 0.71 and -0.71, which teaches"
        " nothing: write false",
    ),
    (
        lambda s, _: s.distillation and s.distillation.options,
        lambda m, _: _idle_schedule(m),
        "distill.options.{m.key}.{found}: {m.key} works in its init stage only, in which its weight is constant: leave {found}"
        " out",
    ),
    (
        lambda s, _: s.distillation and s.distillation.options,
        lambda m, _: m.options.warmup_by != "step" and not m.options.warmup_epochs,
        "distill.options.{m.key}.warmup_by: without warmup_epochs the weight does not rise: set warmup_epochs too, or leave"
        " warmup_by out",
    ),
    (lambda s, _: s.optim.losses, _missing_loss, "optim.losses: there is no loss {found[0]!r} here: write one of {found[1]}"),
)
"""What a method requires of the other sections."""


def first_problem(settings: Settings, rules: Iterable[Rule[Settings]]) -> Problem:
    """The message of the first of `rules` that `settings` break; None: they keep them all."""
    return next((text.format(s=settings, found=found) for rule, text in rules if (found := rule(settings))), None)


def first_problem_of_methods(
    methods: Callable[[], Iterable[MethodNeeds]],
    settings: Settings,
    classes: int,
    rules: Iterable[MethodRule[Settings]],
) -> Problem:
    """The message of the first of `rules` that one of the `methods`, which are asked for where that matters, breaks.

    `classes`: how many there are; 0: it is not known.
    """
    for condition, breaks, text in rules:
        if when := condition(settings, classes):
            for method in methods():
                if found := breaks(method, when):
                    return text.format(s=settings, m=method, when=when, found=found)
    return None


def labels_are_used(settings: JobSettings, methods: Iterable[MethodNeeds]) -> Problem:
    """Whether something trains the classifier, where there are labels."""
    distill = settings.distillation
    chosen = [] if distill is None else [each for each in methods if each.key in distill.weighted]
    if distill is None or not settings.data.labels or not chosen:
        return None
    defaults = max(each.task_weight for each in chosen)
    if distill.task_weight or (distill.task_weight is None and defaults):
        return None
    if problem := _task_optimizer(settings):
        return problem
    needs = [each.requires for each in chosen]
    if any((each.logits and each.student_logits) or each.reuses_classifier for each in needs):
        return None
    names = " and ".join(each.key for each in chosen)
    value = "0" if distill.task_weight == 0 else f"0 by default with {names}"
    return (
        f"distill.task_weight: it is {value}, and features alone train no classifier: write distill.task_weight: 1, or"
        " data.labels: false"
    )


def resize_covers_crop(data: DataConfig) -> Problem:
    resize, size = data.val_resize, data.image_size
    if resize is None or resize >= size:
        return None
    return f"data.val_resize {resize} is below data.image_size {size}: write at least {size}, or leave it out"


def enough_images(data: DataConfig, num_images: int) -> Problem:
    """`num_images`: of the training split of `data.path`."""
    batch, (own, *_) = data.global_batch_size, data.batch_parts
    if data.last_batch != "drop" or own <= num_images:
        return None
    what = f"{batch} is" if own == batch else f"the part of {data.path}, {own} of {batch}, is"
    return (
        f"data.global_batch_size: {what} more than the {num_images} training images of {data.path}; "
        f"write at most {num_images * batch // own}, or data.last_batch=short"
    )


def parts_have_several_images(settings: JobSettings, num_images: int) -> Problem:
    """For models that cannot normalize a single image. `num_images`: of the training split of `data.path`."""
    batch, replicas, splits = settings.data.global_batch_size, settings.scale.num_replicas, num_micro_batches(settings)
    smallest, own = 2 * replicas * splits, settings.data.batch_parts[0]
    if num_images >= own and batch < smallest:
        number = pipeline_micro_batches(settings)
        fewer = f", or less than {number} in scale.micro_batches" if number > 1 else ""
        return f"data.global_batch_size {batch} gives a worker or micro-batch a single image: write at least {smallest}{fewer}"
    last = num_images % own if settings.data.last_batch == "short" else 0
    last += batch - own if last else 0
    if not any(0 < part < 2 * splits for part in (last // replicas, -(-last // replicas))):
        return None
    return (
        f"data.last_batch short gives a worker or micro-batch a single image of the last batch, which has {last} of "
        f"{num_images}: write drop, or another data.global_batch_size"
    )
