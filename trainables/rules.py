"""Rules between the keys of a configuration. Each stands here once, and is checked twice with the same message.

The driver checks them when it reads an experiment (`service.config.rules`), the worker when it builds its job. A rule returns
what is wrong and what to write instead, in one line; None: nothing is wrong.
"""

from collections.abc import Callable
from typing import Protocol

from trainables.config import DataConfig, OptimConfig, ScaleConfig, TeacherConfig, TrainingConfig

Problem = str | None


class JobSettings(Protocol):
    """The sections that an experiment and a training job have alike."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def teacher(self) -> TeacherConfig | None: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def scale(self) -> ScaleConfig: ...
    @property
    def train(self) -> TrainingConfig: ...
    @property
    def precision(self) -> str: ...


class MethodRequirements(Protocol):
    """What a method requires of the configuration, see `trainables.methods.contract.Requirements`."""

    @property
    def teacher(self) -> bool: ...
    @property
    def hard_labels(self) -> bool: ...
    @property
    def whole_batch(self) -> bool: ...
    @property
    def all_gather(self) -> bool: ...


def replica_batch(settings: JobSettings) -> int:
    """Samples of one replica's batch; without pipeline stages each worker is a replica."""
    return settings.data.global_batch_size // settings.scale.num_replicas


def batch_is_divisible(settings: JobSettings) -> Problem:
    batch, replicas = settings.data.global_batch_size, settings.scale.num_replicas
    if batch % replicas == 0:
        return None
    lower, stages = max(batch // replicas, 1) * replicas, settings.scale.pipeline_stages
    divisor = f"scale.num_workers {replicas}" if stages == 1 else f"{replicas} replicas of {stages} scale.pipeline_stages"
    return f"data.global_batch_size {batch} is not divisible by {divisor}: write {lower} or {lower + replicas}"


def fewest_workers_divide_batch(settings: JobSettings) -> Problem:
    batch, fewest, stages = settings.data.global_batch_size, settings.scale.min_workers, settings.scale.pipeline_stages
    if fewest is None or (fewest % stages == 0 and batch % (fewest // stages) == 0):
        return None
    fitting = [workers for workers in range(stages, settings.scale.num_workers + 1, stages) if batch % (workers // stages) == 0]
    return f"scale.min_workers {fewest} cannot share data.global_batch_size {batch} evenly: write one of {fitting}"


def resize_covers_crop(data: DataConfig) -> Problem:
    resize, size = data.val_resize, data.image_size
    if resize is None or resize >= size:
        return None
    return f"data.val_resize {resize} is below data.image_size {size}: write at least {size}, or leave it out"


def enough_images(data: DataConfig, num_images: int) -> Problem:
    """`num_images`: of the training split."""
    batch = data.global_batch_size
    if data.last_batch != "drop" or batch <= num_images:
        return None
    return (
        f"data.global_batch_size: {batch} is more than the {num_images} training images of {data.path}; "
        f"write at most {num_images}, or data.last_batch=short"
    )


def accumulate_fits_batch(settings: JobSettings) -> Problem:
    accumulate, batch = settings.optim.accumulate, replica_batch(settings)
    if num_micro_batches(settings) <= batch:
        return None
    if settings.scale.pipeline_stages == 1:
        return f"optim.accumulate {accumulate} exceeds the {batch} samples of one worker's batch"
    return (
        f"scale.micro_batches {pipeline_micro_batches(settings)} × optim.accumulate {accumulate} exceed the {batch} samples of"
        " one replica's batch"
    )


def num_micro_batches(settings: JobSettings) -> int:
    """Parts of a replica's batch that are computed one after the other."""
    return settings.optim.accumulate * pipeline_micro_batches(settings)


def pipeline_micro_batches(settings: JobSettings) -> int:
    """Parts that flow through the pipeline stages at once, of a replica's batch or of each part by `optim.accumulate`."""
    scale, samples = settings.scale, replica_batch(settings) // settings.optim.accumulate
    if scale.pipeline_stages == 1:
        return 1
    return scale.micro_batches or max(1, min(4 * scale.pipeline_stages, samples))


def parts_have_several_images(settings: JobSettings, num_images: int) -> Problem:
    """For models that cannot normalise a single image. `num_images`: of the training split."""
    batch, replicas, splits = settings.data.global_batch_size, settings.scale.num_replicas, num_micro_batches(settings)
    smallest = 2 * replicas * splits
    if num_images >= batch and batch < smallest:
        number = pipeline_micro_batches(settings)
        fewer = f", or less than {number} in scale.micro_batches" if number > 1 else ""
        return f"data.global_batch_size {batch} gives a worker or micro-batch a single image: write at least {smallest}{fewer}"
    last = num_images % batch if settings.data.last_batch == "short" else 0
    if not any(0 < part < 2 * splits for part in (last // replicas, -(-last // replicas))):
        return None
    return (
        f"data.last_batch short gives a worker or micro-batch a single image of the last batch, which has {last} of "
        f"{num_images}: write drop, or another data.global_batch_size"
    )


def mixing_has_pairs(settings: JobSettings) -> Problem:
    data, workers, batch = settings.data, settings.scale.num_replicas, replica_batch(settings)
    if not data.device_augment.mixes:
        return None
    if batch % 2:
        return (
            f"data.device_augment: mixup and cutmix mix pairs, but each of {workers} workers has {batch} of "
            f"data.global_batch_size {data.global_batch_size}: write {data.global_batch_size + workers}, or set both to 0"
        )
    if data.last_batch == "short":
        return (
            "data.device_augment: mixup and cutmix mix pairs, which a short last batch may part: "
            "set data.last_batch to drop, or both to 0"
        )
    return None


def mixing_has_a_network(settings: JobSettings) -> Problem:
    key = settings.teacher.logits_only if settings.teacher is not None else None
    if key is None or not settings.data.device_augment.mixes:
        return None
    return (
        f"{key}: it gives the logits of each image, which mixup and cutmix mix with another: "
        f"set data.device_augment.mixup and data.device_augment.cutmix to 0, or leave {key} out"
    )


def teacher_service_gets_images(settings: JobSettings) -> Problem:
    if settings.teacher is None or settings.teacher.service is None or not settings.data.decodes_on_device:
        return None
    return (
        f"teacher.service: it is sent images that the host has decoded, and data.decoder {settings.data.decoder} decodes on "
        "each worker's GPU: set data.decoder to auto, or leave teacher.service out"
    )


def sharded_teacher_is_not_compiled(settings: JobSettings) -> Problem:
    if settings.teacher is None or settings.teacher.placement != "sharded" or not settings.train.compile:
        return None
    return "teacher.placement sharded does not go with train.compile: set train.compile to false, or teacher.placement to whole"


def deterministic_kernels_are_not_timed(settings: JobSettings) -> Problem:
    if not settings.train.deterministic or settings.train.compile != "max-autotune":
        return None
    return "train.deterministic does not go with train.compile max-autotune, which chooses kernels by timing: write true"


def sharded_teacher_has_several_replicas(settings: JobSettings) -> Problem:
    fewest, stages = settings.scale.min_workers, settings.scale.pipeline_stages
    if settings.teacher is None or settings.teacher.placement != "sharded" or fewest is None or fewest // stages > 1:
        return None
    return f"teacher.placement sharded needs 2 workers or more, and scale.min_workers is {fewest}: write at least {2 * stages}"


def gpu_decoder_has_gpus(settings: JobSettings) -> Problem:
    if not settings.data.decodes_on_device or settings.scale.use_gpu is not False:
        return None
    return f"data.decoder {settings.data.decoder} works on GPUs only: set scale.use_gpu, or data.decoder to auto"


def warmup_leaves_an_epoch(optim: OptimConfig, epochs: int, key: str = "optim.epochs", section: str = "optim.") -> Problem:
    """`key` names the `epochs`; `section` is what stands before the name of a key of `optim`."""
    if optim.warmup_epochs < epochs:
        return None
    return f"{section}warmup_epochs {optim.warmup_epochs:g} leaves no epoch of {key} {epochs}"


def nesterov_has_momentum(optim: OptimConfig, section: str = "optim.") -> Problem:
    """`section` is what stands before the name of a key of `optim`."""
    if not optim.nesterov or optim.momentum:
        return None
    return f"{section}nesterov needs {section}momentum above 0: set it, or set {section}nesterov to false"


def pipeline_stages_support(settings: JobSettings) -> Problem:
    """What a model that is cut into pipeline stages cannot be trained with."""
    teacher, optim = settings.teacher, settings.optim
    instead = {
        "precision fp16: its scaler would see one stage's gradients; write bf16, or fp32": settings.precision == "fp16",
        "scale.sync_batch_norm: write false": settings.scale.sync_batch_norm,
        "train.compile: write false": settings.train.compile,
        f"data.decoder {settings.data.decoder}: write auto": settings.data.decodes_on_device,
        "optim.name dot: write sgd": optim.name == "dot",
        "optim.losses, optimizers of single losses: leave them out": bool(optim.losses),
        "teacher.service: leave it out": teacher is not None and teacher.service is not None,
    }
    problem = next((text for text, applies in instead.items() if applies), None)
    if settings.scale.pipeline_stages == 1 or problem is None:
        return None
    return f"scale.pipeline_stages {settings.scale.pipeline_stages} does not go with {problem}, or scale.pipeline_stages 1"


RULES: tuple[Callable[[JobSettings], Problem], ...] = (
    batch_is_divisible,
    fewest_workers_divide_batch,
    lambda settings: resize_covers_crop(settings.data),
    accumulate_fits_batch,
    mixing_has_pairs,
    mixing_has_a_network,
    teacher_service_gets_images,
    sharded_teacher_is_not_compiled,
    sharded_teacher_has_several_replicas,
    deterministic_kernels_are_not_timed,
    lambda settings: warmup_leaves_an_epoch(settings.optim, settings.optim.epochs),
    lambda settings: nesterov_has_momentum(settings.optim),
    gpu_decoder_has_gpus,
    pipeline_stages_support,
)
"""What every job must keep."""


def splits_no_batch(what: str, settings: JobSettings) -> Problem:
    """`what` looks at all samples of a batch."""
    if num_micro_batches(settings) == 1:
        return None
    accumulate, micro_batches = settings.optim.accumulate, pipeline_micro_batches(settings)
    key, number = ("optim.accumulate", accumulate) if accumulate > 1 else ("scale.micro_batches", micro_batches)
    return f"{what} looks at all samples of a batch, which {key} {number} splits: set {key} to 1"


def method_has_a_teacher(name: str, requirements: MethodRequirements, settings: JobSettings) -> Problem:
    if settings.teacher is not None or not requirements.teacher:
        return None
    return f"distill.method: {name} needs a teacher: write teacher.model"


def method_has_one_label(name: str, requirements: MethodRequirements, settings: JobSettings) -> Problem:
    if not requirements.hard_labels or not settings.data.device_augment.mixes:
        return None
    return (
        f"distill.method: {name} needs images of one class each: set data.device_augment.mixup and "
        "data.device_augment.cutmix to 0, or set distill.method to kd"
    )


def method_has_whole_batches(name: str, requirements: MethodRequirements, settings: JobSettings) -> Problem:
    return splits_no_batch(f"distill.method: {name}", settings) if requirements.whole_batch else None


def method_has_all_workers(name: str, requirements: MethodRequirements, settings: JobSettings) -> Problem:
    scale = settings.scale
    if not requirements.all_gather or num_micro_batches(settings) == 1 or scale.num_replicas == 1:
        return None
    key = "optim.accumulate" if settings.optim.accumulate > 1 else "scale.micro_batches"
    return (
        f"distill.method: {name} gathers the outputs of all workers, and one of them may have fewer micro-batches of a "
        f"short batch: set {key} to 1, or scale.num_workers to {scale.pipeline_stages}"
    )


METHOD_RULES: tuple[Callable[[str, MethodRequirements, JobSettings], Problem], ...] = (
    method_has_a_teacher,
    method_has_one_label,
    method_has_whole_batches,
    method_has_all_workers,
)
"""What each method of a job requires of the other sections."""


def first_problem(settings: JobSettings) -> Problem:
    """The problem of the first of `RULES` that `settings` do not keep."""
    return next((problem for rule in RULES if (problem := rule(settings)) is not None), None)


def first_problem_of_method(name: str, requirements: MethodRequirements, settings: JobSettings) -> Problem:
    """The problem of the first of `METHOD_RULES` that `settings` do not keep for the method of this name."""
    return next((problem for rule in METHOD_RULES if (problem := rule(name, requirements, settings)) is not None), None)
