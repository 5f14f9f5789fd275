"""The table of what does not go together: rules between the keys of a configuration, and between those and a method's needs.

The driver checks it when it reads an experiment, a worker when it builds a job. Most rows are pairs of settings that do not go
together (`CLASHES`), or a setting and what methods do (`METHOD_CLASHES`): their messages are made here.
Others have a condition, which gives what is broken or nothing, and a message, which is formatted with `s`, the settings, and
`found`, what the condition gave; that of a method with `m`, the method, and `when` too. A message begins with the key that it is
about. The first row that is broken counts, so that a row may rely on those above it.

Settings are a `TrainConfig`, or an experiment, which has the same sections and more. A method is a
`trainables.methods.select.SelectedMethod`, whose import costs torch.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from trainables.config import DataConfig, MethodOptions, OptimConfig, PolicyConfig, ScaleConfig, TrainConfig
from trainables.user_code import model_parts

Problem = str | None
OURS = ("sgd", "adamw")
"""The optimizers that go with pipeline stages and several losses."""


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


Rule = tuple[Callable[[Any], object], str]
"""What is broken, the message."""
MethodRule = tuple[Callable[[Any, int], object], Callable[[Any, Any], object], str]
"""When the settings restrict methods, given the number of classes (0: not known), and what of a method that breaks; the message.
A method is loaded only where its settings restrict one."""
OF_CACHE = ("cache_top_k", "cache_epochs", "cache_feature_dtype")
"""Keys of a teacher that belong to `teacher.cache`."""


def replica_batch(settings: TrainConfig) -> int:
    """Samples of one replica's batch; without pipeline stages each worker is a replica."""
    return settings.data.global_batch_size // settings.scale.num_replicas


def num_micro_batches(settings: TrainConfig) -> int:
    """Parts of a replica's batch that are computed one after the other."""
    return settings.optim.accumulate * pipeline_micro_batches(settings)


def pipeline_micro_batches(settings: TrainConfig) -> int:
    """Parts that flow through the pipeline stages at once, of a replica's batch or of each part by `optim.accumulate`."""
    scale, samples = settings.scale, replica_batch(settings) // settings.optim.accumulate
    if scale.pipeline_stages == 1:
        return 1
    return scale.micro_batches or max(1, min(4 * scale.pipeline_stages, samples))


class Setting(NamedTuple):
    """Something that is set: its words in a message, and what to write instead."""

    text: str
    instead: str


def _splits(settings: TrainConfig) -> tuple[str, int] | None:
    """The key that splits a replica's batch into parts, and their number."""
    parts = {"optim.accumulate": settings.optim.accumulate, "scale.micro_batches": pipeline_micro_batches(settings)}
    return next(((key, number) for key, number in parts.items() if number > 1), None)


SETTINGS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "mixes": (lambda s: s.data.device_augment.mixes, "data.device_augment.mixup or cutmix", "set both to 0"),
    "labeled": (lambda s: any(each.labels for each in s.data.more), "data.more with labels", "leave labels out of it"),
    "unlabeled": (lambda s: s.data.mixes_unlabeled, "data.more without labels", "write labels: true for each set in data.more"),
    "alike": (lambda s: not s.data.augments_at_random, "images that are all alike", "write data.augment: crop_flip"),
    "no task": (
        lambda s: s.distillation and s.distillation.task_weight == 0,
        "distill.task_weight 0",
        "write distill.task_weight: 0.5",
    ),
    "no method": (
        lambda s: s.distillation and not s.distillation.weighted,
        "methods whose weights are all 0",
        "set one above 0",
    ),
    "alone": (lambda s: s.distillation is None, "a student of labels alone", "write teacher.model and teacher.weights"),
    "untrained": (lambda s: s.teacher and s.teacher.weights is None, "a teacher without weights", "write teacher.weights"),
    "no embeddings": (
        lambda s: any(each.logit_scale and not each.embeds_classes for each in s.all_teachers),
        "a teacher without class embeddings",
        "write teacher.classes or teacher.head",
    ),
    "several": (lambda s: len(s.all_teachers) > 1, "several teachers", "leave all but one out"),
    "reuses": (lambda s: len(model_parts(s.model)) > 1 and s.model, "student.model {found}", "take another student"),
    "features alone": (lambda s: not s.data.labels and s.eval.path is None, "data.labels false", "write eval.path"),
    "best loss": (lambda s: not s.data.labels and s.eval.best == "loss", "eval.best loss", "write eval.best: cka"),
    "best by features": (
        lambda s: not s.data.labels and s.eval.best != "top1_pct" and s.eval.best,
        "eval.best {found}",
        "write top1_pct with eval.path",
    ),
    "splits": (_splits, "{found[0]} {found[1]}", "set {found[0]} to 1"),
    "splits on workers": (lambda s: s.scale.num_replicas > 1 and _splits(s), "{found[0]} {found[1]}", "set {found[0]} to 1"),
}
"""Settings that are not the value of one key: when they are set, in words, and what to write instead."""


def _owner(settings: Any, key: str) -> tuple[Any, str]:
    """The section that has a dotted key, and the key's name in it; of several teachers the first in which it is set."""
    section, _, name = key.rpartition(".")
    owners = {"": [settings], "student": [settings], "teacher": settings.all_teachers, "distill": [settings.distillation]}
    found = owners.get(section, [getattr(settings, section, None)])
    return next((owner for owner in found if getattr(owner, name, None)), found[0] if found else None), name


def _text(value: Any) -> str:
    """A value as it is written."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def setting(settings: Any, expression: str) -> Setting | None:
    """What an `expression` says is set; None: it is not.

    One of `SETTINGS`, or `key` (it has a value that is not false), `!key` (it has none), `key=A|B`, `key!=A|B` or `key>N`.
    """
    if expression in SETTINGS:
        holds, text, instead = SETTINGS[expression]
        return Setting(text.format(found=found), instead.format(found=found)) if (found := holds(settings)) else None
    key, operator, operand = re.split(r"(!?=|>|$)", expression.removeprefix("!"), maxsplit=1)
    owner, name = _owner(settings, key)
    value = getattr(owner, name, None)
    if expression.startswith("!"):
        return None if value else Setting(key, f"write {key}")
    values = operand.split("|")
    if not operator or value is None:
        is_set = bool(value)
    else:
        is_set = value > float(operand) if operator == ">" else (_text(value) in values) is (operator == "=")
    if not is_set:
        return None
    field = getattr(type(owner), "model_fields", {}).get(name)
    default = not value if isinstance(value, bool) else field and field.default
    other = " or ".join(values) if operator in ("!=", ">") else _text(default)
    return Setting(f"{key} {_text(value)}" if operator else key, f"write {key}: {other}")


def _clash(keys: str, others: str, why: str) -> Iterator[Rule]:
    """The rules of a row of `CLASHES`."""

    def problem(settings: Any, key: str, other: str) -> Problem:
        if (here := setting(settings, key)) is None or (there := setting(settings, other)) is None:
            return None
        verb, first, then = ("needs", there, here) if other.startswith("!") else ("does not go with", here, there)
        return f"{here.text} {verb} {there.text}{why and f', {why}'}: {first.instead}, or {then.instead}"

    pairs = product(keys.split(", "), others.split(", "))
    return ((partial(problem, key=key, other=other), "{found}") for key, other in pairs)


CLASHES = (
    # Settings, each that they do not go with (`!`: that they need), and why.
    ("precision=fp16", "scale.pipeline_stages>1", "since its scaler would see the gradients of one stage"),
    (
        "scale.sync_batch_norm, train.compile, train.gradient_checkpointing, train.progressive, data.decoder!=auto, "
        "optim.name!=sgd|adamw, optim.ema_decay, optim.clip_grad_agc, optim.losses, optim.lr_head, optim.layer_decay, "
        "teacher.lr_head, teacher.layer_decay, teacher.service, unlabeled, data.labels=false, student.freeze, eval.asynchronous",
        "scale.pipeline_stages>1",
        "where each worker has a part of the student",
    ),
    ("scale.sync_batch_norm", "splits", "since it looks at a whole batch"),
    ("mixes", "data.last_batch=short", "which may part a pair of images"),
    ("mixes", "teacher.service", "which has the teacher's outputs for each image alone"),
    ("data.decoder!=auto", "data.augment!=crop_flip", "since it decodes what crop_flip cuts out"),
    ("data.decoder!=auto", "scale.use_gpu=false", "since it decodes on GPUs"),
    ("data.decoder!=auto", "teacher.service", "which is sent images that the host has decoded"),
    ("data.repeats>1", "teacher.cache, teacher.service", "which has one output of each image in an epoch"),
    ("data.repeats>1", "data.more, alike", ""),
    ("data.repeats>1", "data.shuffle=none", "which would show the same part of the images in each epoch"),
    ("data.labels=false", "untrained", "which is not trained without labels"),
    ("data.labels=false", "labeled", ""),
    ("data.labels=false", "alone", ""),
    ("unlabeled", "alone, untrained", ""),
    ("teacher.finetune, optim.lr_head, distill.task_weight", "data.labels=false", ""),
    ("teacher.head, teacher.classes", "data.labels=false", "without which there are no classes"),
    ("train.label_smoothing, train.task_loss=bce", "data.labels=false", ""),
    ("train.task_loss=bce", "unlabeled", "since it needs the label of each image"),
    ("eval.path", "data.labels=true", "since it measures the features of a student that learns no labels"),
    ("eval.asynchronous", "data.labels=false", "whose evaluation compares with the teacher"),
    ("eval.asynchronous", "scale.min_workers", "whose workers would need the evaluator's place"),
    ("eval.asynchronous", "train.until_top1_pct", "which waits for each evaluation"),
    ("eval.best=cka|cosine", "data.labels=true", "since it is measured of a student that learns no labels"),
    ("eval.best=top1_pct", "features alone", ""),
    ("student.freeze", "!student.weights", ""),
    ("student.freeze", "data.labels=false", "without which there is no classifier to train"),
    ("teacher", "teachers", "which lists all teachers"),
    (
        "teacher.weights_key, teacher.classes, teacher.image_size, teacher.mean, teacher.std, teacher.finetune, teacher.head",
        "!teacher.weights",
        "to which it belongs",
    ),
    ("teacher.logit_scale", "no embeddings", "whose cosines it scales"),
    ("teacher.head, teacher.finetune", "teacher.classes", "which gives the teacher another classifier"),
    ("teacher.finetune", "teacher.head", "which gives the teacher another classifier"),
    (", ".join(f"teacher.{key}" for key in OF_CACHE), "!teacher.cache", ""),
    ("teacher.precision", "precision=fp64", "which is for exact comparisons, of the teacher too"),
    ("teacher.cache", "teacher.service", "whose outputs it would store"),
    ("teacher.cache, teacher.service", "teacher.placement=sharded, reuses", "which needs the network in every step"),
    ("teacher.placement=sharded", "train.compile", ""),
    ("teacher.placement=sharded", "best by features", "which compares with the features of a whole teacher"),
    ("train.until_top1_pct", "features alone", "which gives no accuracy"),
    ("optim.nesterov, optim.losses, optim.args", "optim.name=dot", "which has two momenta of its own"),
    ("optim.clip_grad_agc", "optim.clip_grad_norm, optim.clip_grad_value", ""),
    ("optim.clip_grad_value", "optim.clip_grad_norm", ""),
    ("train.bce_threshold", "train.task_loss!=bce", "since it changes the targets of bce"),
    ("train.deterministic", "train.compile=max-autotune", "which chooses kernels by timing"),
    ("train.until_top1_pct, train.until_s", "train.max_steps", "a timing run, which is not evaluated"),
    ("distill.teacher_dropping", "splits", "since it divides by a sum over all samples of a batch"),
    ("no task", "no method", "which leaves nothing to learn"),
    # Those that the driver alone has.
    ("assistants", "!teacher.model", ""),
    ("assistants", "data.labels=false", "since they learn labels too"),
    ("tracking.register_model", "tracking.log_model=false", "which logs no model to register"),
    ("sweep.points", "sweep.space, sweep.policy!=grid", "since points are all that is tried"),
    (
        "sweep.policy=guided",
        "sweep.metric!=images_per_s|epoch_s|gpu_s_per_epoch|pareto|time_to_accuracy",
        "since it looks for speed or cost",
    ),
    ("sweep.policy=asha", "sweep.metric!=top1_pct|top5_pct|cka|cosine|val_loss", "since it stops trials by their accuracy"),
    (
        "sweep.steps",
        "sweep.metric=top1_pct|best_top1_pct|top5_pct|cka|cosine|linear_top1_pct|val_loss, sweep.policy=asha",
        "which compares accuracies between epochs",
    ),
    ("features alone", "sweep.metric=top1_pct|best_top1_pct|top5_pct|linear_top1_pct|time_to_accuracy", "which needs labels"),
    ("sweep.metric=pareto", "sweep.policy!=guided", ""),
    ("sweep.budget_grid_share", "sweep.budget_gpu_h", "which bounds the search too"),
    ("sweep.metric=time_to_accuracy", "!sweep.target_pct", "the accuracy to reach"),
    ("sweep.target_pct", "sweep.metric!=time_to_accuracy", ""),
    ("sweep.metric=cka|cosine|linear_top1_pct", "data.labels=true", "since it is measured of a student that learns no labels"),
)
"""Pairs of settings that do not go together."""


def _batch_divisor(settings: TrainConfig) -> str | None:
    batch, replicas, stages = settings.data.global_batch_size, settings.scale.num_replicas, settings.scale.pipeline_stages
    lower = max(batch // replicas, 1) * replicas
    divisor = f"scale.num_workers {replicas}" if stages == 1 else f"{replicas} replicas of {stages} scale.pipeline_stages"
    return f"{divisor}: write {lower} or {lower + replicas}" if batch % replicas else None


def _fitting_workers(settings: TrainConfig) -> list[int] | None:
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


_OF_POLICY = {"num_ops": "randaugment", "magnitude": "randaugment", "magnitude_std": "randaugment", "severity": "augmix"}


def _foreign_key(policy: PolicyConfig | None) -> str | None:
    """A key of another policy that is set."""
    if policy is None:
        return None
    changed = policy.model_dump(include={*_OF_POLICY}, exclude_defaults=True)
    return next((key for key in changed if not policy.name.startswith(_OF_POLICY[key])), None)


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


def _unknown_loss(settings: TrainConfig) -> tuple[str, str] | None:
    """A key of `optim.losses` that is of no method, and those that could be."""
    if (distill := settings.distillation) is None:
        return None
    unknown = sorted(key for key in settings.optim.losses if key != "task" and key.partition("/")[0] not in distill.keys)
    return (unknown[0], ", ".join(sorted(["task", *distill.keys]))) if unknown else None


def _task_optimizer(settings: TrainConfig) -> str | None:
    """What gives the labels' loss an optimizer of its own, and what to write where that loss has no weight."""
    optim, distill = settings.optim, settings.distillation
    if optim.name == "dot":
        return "optim.name: dot has a momentum for the labels, whose loss has no weight here: write sgd"
    if "task" in optim.losses:
        return "optim.losses.task: the labels' loss has no weight here: leave it out"
    if optim.losses and distill is not None and {*distill.weighted} <= optim.losses.keys():
        return "optim.losses: only the labels' loss, which has no weight here, is not in it: leave one method out of it"
    return None


RULES: tuple[Rule, ...] = (
    # Workers and their parts of a batch, of which later rows take that they fit.
    (
        lambda s: s.scale.min_workers is not None and s.scale.min_workers > s.scale.num_workers,
        "scale.min_workers {s.scale.min_workers} is more than scale.num_workers: write at most {s.scale.num_workers}",
    ),
    (
        lambda s: _stage_multiples(s.scale),
        "scale.num_workers {s.scale.num_workers} is not divisible by scale.pipeline_stages {s.scale.pipeline_stages}: write"
        " {found}",
    ),
    (
        lambda s: s.scale.cut is not None and len(s.scale.cut) != s.scale.pipeline_stages - 1,
        "scale.cut names the modules at which all but the first of {s.scale.pipeline_stages} scale.pipeline_stages begin: write"
        " one for each, or leave it out",
    ),
    (_batch_divisor, "data.global_batch_size {s.data.global_batch_size} is not divisible by {found}"),
    (
        _fitting_workers,
        "scale.min_workers {s.scale.min_workers} cannot share data.global_batch_size {s.data.global_batch_size} evenly: write"
        " one of {found}",
    ),
    (
        lambda s: num_micro_batches(s) > replica_batch(s) and (num_micro_batches(s), replica_batch(s)),
        "optim.accumulate × scale.micro_batches is {found[0]}, and one replica's batch has {found[1]} samples: write less",
    ),
    *(rule for row in CLASHES for rule in _clash(*row)),
    # Images.
    (lambda s: resize_covers_crop(s.data), "{found}"),
    (
        lambda s: s.data.device_augment.mixes and replica_batch(s) % 2 and s.data.global_batch_size + s.scale.num_replicas,
        "data.global_batch_size {s.data.global_batch_size}: mixup and cutmix need an even number for each worker: write {found}",
    ),
    (
        lambda s: _foreign_key(s.data.device_augment.policy),
        "data.device_augment.policy.{found} is of another policy than {s.data.device_augment.policy.name}: leave it out",
    ),
    (
        lambda s: (policy := s.data.device_augment.policy) and policy.name == "randaugment_timm" and policy.magnitude > 10,
        "data.device_augment.policy.magnitude of randaugment_timm is at most 10, not {s.data.device_augment.policy.magnitude}",
    ),
    (
        lambda s: s.data.more and (total := sum(each.share for each in s.data.more)) >= 1 and f"{total:g}",
        "data.more: its shares add up to {found}, which leaves nothing of data.path: write less than 1 in all",
    ),
    (
        lambda s: s.data.global_batch_size <= len(s.data.more) and len(s.data.sets),
        "data.global_batch_size: {s.data.global_batch_size} has no image for each of {found} sets: write at least {found}",
    ),
    (
        lambda s: len({(each.cache, each.cache_epochs) for each in s.teachers}) > 1,
        "teachers: all see the same images: write the same cache and cache_epochs for each",
    ),
    (
        lambda s: (
            setting(s, "teacher.placement=sharded")
            and 0 < (s.scale.min_workers or 0) < (least := 2 * s.scale.pipeline_stages)
            and least
        ),
        "scale.min_workers {s.scale.min_workers}: teacher.placement sharded needs more: write at least {found}",
    ),
    # Optimizers, losses and the loop.
    (
        lambda s: s.optim.name == "dot" and not s.optim.delta <= s.optim.momentum < 1 - s.optim.delta,
        "optim.name dot: momentum {s.optim.momentum:g} ± delta {s.optim.delta:g} must lie in 0 … 1: write a smaller delta",
    ),
    (
        lambda s: next((key for key, o in _optimizers(s.optim).items() if o.warmup_epochs and o.warmup_steps), None),
        "{found}.warmup_steps and {found}.warmup_epochs are two lengths of one warm-up: leave one of them out, or write 0",
    ),
    (lambda s: without_epoch(s.optim), "{found} no epoch of optim.epochs {s.optim.epochs}: write less"),
    (
        lambda s: next((key for key, o in _optimizers(s.optim).items() if o.nesterov and not o.momentum), None),
        "{found}.nesterov needs {found}.momentum above 0: set it, or set {found}.nesterov to false",
    ),
    (
        lambda s: s.optim.losses and next((o.name for o in _optimizers(s.optim).values() if o.name not in OURS), None),
        "optim.losses: optimizers of single losses are sgd or adamw, and {found} is another one: leave optim.losses out",
    ),
    (
        lambda s: _idle_end(s.optim),
        "{found}: only the schedules cosine and wsd end so, and this is {s.optim.schedule}: leave out",
    ),
    *_clash("optim.cooldown_epochs", "!optim.min_lr_factor", "the rate at which it trains"),
    (
        lambda s: (total := sum(each.epochs for each in s.train.progressive)) > 1 + 1e-9 and f"{total:g}",
        "train.progressive: its shares of the epochs add up to {found}: write at most 1 in all",
    ),
    (
        lambda s: max((each.image_size for each in s.train.progressive if each.image_size >= s.data.image_size), default=None),
        "train.progressive: image_size {found} is not below data.image_size {s.data.image_size}, that of the crops: write less",
    ),
    (
        lambda s: s.train.bce_threshold and s.train.bce_threshold > 1 - s.train.label_smoothing,
        "train.bce_threshold {s.train.bce_threshold:g} is above all targets with train.label_smoothing: write a smaller one",
    ),
    (_unknown_loss, "optim.losses: there is no loss {found[0]!r} here: write one of {found[1]}"),
    (
        lambda s: s.distillation and (s.distillation.task_weight == 0 or not s.data.labels) and _task_optimizer(s),
        "{found}",
    ),
)
"""What every job must keep."""


BATCH_RULES: tuple[Rule, ...] = tuple(
    rule
    for others, why in (
        ("scale.min_workers", "since a worker's part of the batch grows where workers are lost"),
        ("train.max_steps", "a timing run, which times one batch"),
        ("assistants", "of which it is not known which batch fits"),
    )
    for rule in _clash("data.global_batch_size=auto", others, why)
)
"""What an experiment must keep whose batch is not decided yet; `RULES` are about a number."""


def _idle_schedule(method: Any) -> str | None:
    """An option that changes a weight in time, of a method whose weight counts in its init stage alone."""
    defaults = MethodOptions()
    names = () if method.terms else ("warmup_epochs", "warmup_by", "decay")
    return next((name for name in names if getattr(method.options, name) != getattr(defaults, name)), None)


def _missing_loss(method: Any, losses: Any) -> tuple[str, str] | None:
    """A key of `optim.losses` that is no loss of its method, or has no term left; and those that could be."""
    terms = {f"{method.key}/{term}" for term in method.terms}
    rest = [method.key] if terms - losses.keys() else []
    unknown = [key for key in losses if key.partition("/")[0] == method.key and key not in (*terms, *rest)]
    return (unknown[0], ", ".join(sorted(["task", *terms, *rest]))) if unknown else None


def _balances(method: Any) -> bool:
    return bool(getattr(method.options, "balance", False))


def _compares_images(method: Any) -> object:
    return method.requires.whole_batch or method.requires.all_gather


METHOD_CLASHES: tuple[tuple[Callable[[Any], object], str, str], ...] = (
    # What a method does, in words, and each setting that it does not go with.
    (lambda m: m.requires.reads_classes or m.requires.hard_labels, "distill.method: {m.key} reads classes", "data.labels=false"),
    (_compares_images, "distill.method: {m.key} compares the images of a batch", "best loss"),
    (_balances, "distill.options.{m.key}.balance divides the loss by its running mean", "best loss"),
    (lambda m: m.requires.hard_labels, "distill.method: {m.key} needs the one class of each image", "unlabeled, mixes"),
    (lambda m: m.requires.same_images, "distill.method: {m.key} remembers each image", "data.more, data.repeats>1"),
    (
        lambda m: (m.beyond_logits or "").startswith("features"),
        "distill.method: {m.key} reads features of images of one size",
        "train.progressive",
    ),
    (
        lambda m: getattr(m.options, "token", False),
        "distill.options.{m.key}.token has a head that the labels alone train",
        "no task",
    ),
    (lambda m: m.requires.whole_batch, "distill.method: {m.key} looks at all samples of a batch", "splits"),
    (_balances, "distill.options.{m.key}.balance takes the mean of a whole batch", "splits"),
    (lambda m: m.requires.all_gather, "distill.method: {m.key} gathers the outputs of all workers", "splits on workers"),
    (lambda m: m.whole_student, "distill.method: {m.key} has {found}", "scale.pipeline_stages>1"),
    (
        lambda m: m.requires.reuses_classifier,
        "distill.method: {m.key} gives the student its teacher's classifier",
        "student.weights, several, assistants",
    ),
    (lambda m: m.requires.teacher_model, "distill.method: {m.key} reads the teacher's parameters", "teacher.placement=sharded"),
    (
        lambda m: m.requires.teacher_model or m.requires.reuses_classifier,
        "distill.method: {m.key} needs the teacher's network with a linear classifier",
        "teacher.classes, teacher.head, teacher.cache, teacher.service",
    ),
    (
        lambda m: getattr(m.options, "teacher_norm", None) == "batch",
        "distill.options.{m.key}.teacher_norm batch makes a teacher's outputs depend on the batch",
        "teacher.cache, teacher.service",
    ),
)


def _method_clash(breaks: Callable[[Any], object], text: str, settings: str) -> Iterator[MethodRule]:
    def when(settings: Any, _: int, expression: str) -> Setting | None:
        return setting(settings, expression)

    instead = "or take another method" if text.startswith("distill.method") else "or leave it out"
    message = f"{text}, which does not go with {{when.text}}: {{when.instead}}, {instead}"
    return ((partial(when, expression=each), lambda m, _: breaks(m), message) for each in settings.split(", "))


METHOD_RULES: tuple[MethodRule, ...] = (
    (
        lambda s, _: not s.all_teachers,
        lambda m, _: m.requires.teacher,
        "distill.method: {m.key} needs a teacher: write teacher.model",
    ),
    *(rule for row in METHOD_CLASHES for rule in _method_clash(*row)),
    (
        lambda s, _: len(s.all_teachers) > 1 and s.optim.losses,
        lambda m, losses: m.beyond_logits and next((key for key in losses if key.partition("/")[0] == m.key), None),
        "optim.losses: {m.key} has a loss with each of several teachers, which share an optimizer: leave {found} out",
    ),
    (
        lambda s, _: s.distillation and s.distillation.teacher_dropping,
        lambda m, _: m.requires.teacher and not m.beyond_logits,
        "distill.teacher_dropping: {m.key} learns from the teachers' mean: take a method on features, or leave it out",
    ),
    (
        lambda s, classes: next(
            ((top_k, classes) for each in s.all_teachers if (top_k := each.cache_top_k) and top_k < classes), None
        ),
        lambda m, _: (
            m.requires.teacher
            and (
                (m.standardizes and f"distill.options.{m.key}.standardize")
                or (m.requires.logits and m.requires.all_logits and m.key)
            )
        ),
        "teacher.cache_top_k: it keeps {when[0]} of {when[1]} classes apart, and {found} looks at each: leave it out, or take kd",
    ),
    (
        lambda _, classes: classes == 2,
        lambda m, _: m.standardizes,
        "distill.options.{m.key}.standardize: standardized logits of two classes are always 0.71 and -0.71: write false",
    ),
    (
        lambda s, _: s.distillation and s.distillation.options,
        lambda m, _: _idle_schedule(m),
        "distill.options.{m.key}.{found}: {m.key} works in its init stage only, with a constant weight: leave {found} out",
    ),
    (
        lambda s, _: s.distillation and s.distillation.options,
        lambda m, _: m.options.warmup_by != "step" and not m.options.warmup_epochs,
        "distill.options.{m.key}.warmup_by: without warmup_epochs the weight does not rise: set both, or leave warmup_by out",
    ),
    (lambda s, _: s.optim.losses, _missing_loss, "optim.losses: there is no loss {found[0]!r} here: write one of {found[1]}"),
)
"""What a method requires of the other sections."""


def first_problem(settings: Any, rules: Iterable[Rule]) -> Problem:
    """The message of the first of `rules` that `settings` break; None: they keep them all."""
    return next((text.format(s=settings, found=found) for rule, text in rules if (found := rule(settings))), None)


def first_problem_of_methods(
    methods: Callable[[], Iterable[Any]], settings: Any, classes: int, rules: Iterable[MethodRule]
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


def trains_classifier(requires: Any) -> bool:
    """Whether a method of these Requirements trains the student's classifier, or gives it the teacher's."""
    return bool((requires.logits and requires.student_logits) or requires.reuses_classifier)


def labels_are_used(settings: Any, methods: Iterable[Any]) -> Problem:
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
    if any(trains_classifier(each.requires) for each in chosen):
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


def parts_have_several_images(settings: Any, num_images: int) -> Problem:
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
