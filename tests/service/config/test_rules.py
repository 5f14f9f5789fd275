"""The rules between keys: the driver refuses an experiment, and a worker its job, with the same message."""

from pathlib import Path
from typing import Any

import pytest

from service.config.dotted import put
from service.config.experiment import load, parse_override
from service.config.sweep import ACCURACIES
from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import DataConfig, DistillConfig, TrainConfig
from trainables.distributed.group import Group
from trainables.engine.train import build
from trainables.errors import ExperimentError
from trainables.methods.registry import METHODS
from trainables.methods.select import SelectedMethod, select_methods
from trainables.rules import CLASHES, METHOD_RULES, RULES, enough_images, first_problem, first_problem_of_methods

MORE = "data.more=[{path: synthetic, share: 0.25}]"
WEIGHTS = "teacher.weights=teacher.safetensors"
STAGES = ("scale.num_workers=4", "scale.pipeline_stages=2")
UNLABELED = ("data.labels=false", WEIGHTS, "distill.method=embed")
REPEATS = ("data.augment=pad_crop_flip", "data.repeats=3")
HALVES = ("train.progressive=[{epochs: 0.5, image_size: 4}, {epochs: 0.25, image_size: 6}]",)
GPU = ("data.augment=crop_flip", "data.decoder=gpu")
DOT = ("optim.name=dot", "optim.nesterov=false")
SEVERAL = ("teacher=null", "teachers=[{model: resnet8, weights: x}, {model: resnet20, weights: y}]")
DROPPING = (*SEVERAL, "distill.method=[embed]", "distill.teacher_dropping=0.5")


def refused_by_the_driver(overrides: tuple[str, ...]) -> str:
    with pytest.raises(ExperimentError) as refused:
        load("digits", overrides)
    return str(refused.value).removeprefix("--set: ")


def refused_by_a_worker(overrides: tuple[str, ...], folder: Path) -> str:
    """What a worker says of a job that no driver has checked."""
    tree: dict[str, Any] = load("digits").experiment.stage("student", folder, {}, None).model_dump(mode="json")
    tree["data"]["loader_workers"] = 1
    for text in overrides:
        put(tree, dict([parse_override(text)]), text)
    with pytest.raises(ExperimentError) as refused:
        build(TrainConfig.model_validate(tree), Group(), Recorded(), no_telemetry)
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("scale.num_workers=3",), "data.global_batch_size 64 is not divisible by scale.num_workers 3: write 63 or 66"),
        (("data.val_resize=7",), "data.val_resize 7 is below data.image_size 8: write at least 8, or leave it out"),
        (
            ("optim.accumulate=65",),
            "optim.accumulate × scale.micro_batches is 65, and one replica's batch has 64 samples: write less",
        ),
        (
            ("optim.accumulate=33", "scale.num_workers=2"),
            "optim.accumulate × scale.micro_batches is 33, and one replica's batch has 32 samples: write less",
        ),
        (
            ("data.device_augment.mixup=0.2", "data.global_batch_size=63"),
            "data.global_batch_size 63: mixup and cutmix need an even number for each worker: write 64",
        ),
        (
            ("data.device_augment.cutmix=0.2", "data.last_batch=short"),
            "data.device_augment.mixup or cutmix does not go with data.last_batch short",
        ),
        (
            ("data.device_augment.mixup=0.2", "teacher.service=1"),
            "data.device_augment.mixup or cutmix does not go with teacher.service",
        ),
        (("data.repeats=3",), "data.repeats 3 does not go with images that are all alike: write data.repeats: 1, or"),
        (
            (*REPEATS, "teacher.service=1"),
            "data.repeats 3 does not go with teacher.service, which has one output of each image in",
        ),
        ((*REPEATS, "teacher.cache=/tmp/rows"), "data.repeats 3 does not go with teacher.cache, which has one output of each"),
        ((*REPEATS, "data.shuffle=none"), "would show the same part of the images in each epoch: write data.repeats: 1"),
        ((*REPEATS, "data.more=[{path: digits, share: 0.5}]"), "data.repeats 3 does not go with data.more: write"),
        (
            (*REPEATS, "distill.method=[crd]"),
            "distill.method: crd remembers each image, which does not go with data.repeats 3",
        ),
        (
            ("train.progressive=[{epochs: 0.5, image_size: 4}, {epochs: 0.7, image_size: 6}]",),
            "train.progressive: its shares of the epochs add up to 1.2: write at most 1 in all",
        ),
        ((*HALVES, "data.image_size=6"), "train.progressive: image_size 6 is not below data.image_size 6, that of the crops"),
        ((*HALVES, *STAGES), "train.progressive does not go with scale.pipeline_stages 2"),
        ((*HALVES, "distill.method=[fitnet]"), "distill.method: fitnet reads features of images of one size, which does not go"),
        (("teacher.placement=sharded", "train.compile=true"), "teacher.placement sharded does not go with train.compile"),
        (
            (WEIGHTS, "teacher.logit_scale=10"),
            "teacher.logit_scale does not go with a teacher without class embeddings, whose cosines it scales: write",
        ),
        ((WEIGHTS, "teacher.classes=t.npy", "teacher.finetune=true"), "teacher.finetune does not go with teacher.classes"),
        ((WEIGHTS, "teacher.head=class_means", "teacher.finetune=true"), "teacher.finetune does not go with teacher.head"),
        ((WEIGHTS, "teacher.precision=bf16", "precision=fp64"), "teacher.precision does not go with precision fp64"),
        (
            ("distill.task_weight=0", *DOT),
            "optim.name: dot has a momentum for the labels, whose loss has no weight here: write sgd",
        ),
        ((*UNLABELED, *DOT), "optim.name: dot has a momentum for the labels, whose loss has no weight here: write sgd"),
        ((*UNLABELED, "optim.losses={task: {lr: 1}}"), "optim.losses.task: the labels' loss has no weight here: leave it out"),
        (
            (*UNLABELED, "optim.losses={embed: {lr: 1}}"),
            "optim.losses: only the labels' loss, which has no weight here, is not in it: leave one method out of it",
        ),
        (("optim.clip_grad_norm=1", "optim.clip_grad_agc=0.01"), "optim.clip_grad_agc does not go with optim.clip_grad_norm"),
        (("optim.name=lamb", "optim.losses={kd: {lr: 1}}"), "optimizers of single losses are sgd or adamw, and lamb is another"),
        (("optim.schedule=step", "optim.cooldown_epochs=1"), "optim.cooldown_epochs: only the schedules cosine and wsd end so"),
        (("optim.cooldown_epochs=12",), "optim.cooldown_epochs 12 leaves no epoch of optim.epochs 12: write less"),
        (
            ("optim.cooldown_epochs=8", "optim.min_lr_factor=0.1", "optim.losses={task: {warmup_epochs: 4}}"),
            "optim.losses.task.warmup_epochs 4 and optim.cooldown_epochs 8 leave no epoch of optim.epochs 12: write less",
        ),
        (("optim.cooldown_epochs=2",), "optim.cooldown_epochs needs optim.min_lr_factor"),
        ((*DOT, "optim.args={eps: 1}"), "optim.args does not go with optim.name dot"),
        (
            ("train.task_loss=bce", "train.label_smoothing=0.2", "train.bce_threshold=0.9"),
            "train.bce_threshold 0.9 is above all targets with train.label_smoothing: write a smaller one",
        ),
        (("train.bce_threshold=0.2",), "train.bce_threshold does not go with train.task_loss cross_entropy"),
        ((*UNLABELED, "train.label_smoothing=0.1"), "train.label_smoothing does not go with data.labels false"),
        ((*STAGES, "optim.name=lamb"), "optim.name lamb does not go with scale.pipeline_stages 2"),
        ((*STAGES, "optim.ema_decay=0.9"), "optim.ema_decay does not go with scale.pipeline_stages 2"),
        (("teacher.head=class_means",), "teacher.head needs teacher.weights"),
        ((*UNLABELED, "teacher.head=class_means"), "teacher.head does not go with data.labels false"),
        (("train.deterministic=true", "train.compile=max-autotune"), "train.deterministic does not go with train.compile max"),
        (
            (*UNLABELED, "teacher.placement=sharded", "eval.best=cosine"),
            "teacher.placement sharded does not go with eval.best cosine, which compares with the features of a whole",
        ),
        (
            ("teacher.placement=sharded", "scale.num_workers=[1, 2]"),
            "scale.min_workers 1: teacher.placement sharded needs more: write at least 2",
        ),
        (("teacher.service=1", *GPU), "data.decoder gpu does not go with teacher.service"),
        ((*GPU, "scale.use_gpu=false"), "data.decoder gpu does not go with scale.use_gpu false"),
        (
            ("optim.warmup_epochs=1", "optim.warmup_steps=9"),
            "optim.warmup_steps and optim.warmup_epochs are two lengths of one warm-up: leave one of them out",
        ),
        (("optim.warmup_epochs=12",), "optim.warmup_epochs 12 leaves no epoch of optim.epochs 12: write less"),
        (("optim.nesterov=true", "optim.momentum=0"), "optim.nesterov needs optim.momentum above 0"),
        (
            ("optim.accumulate=2", "distill.method=[sp]"),
            "distill.method: sp looks at all samples of a batch, which does not go with optim.accumulate 2",
        ),
        (
            ("optim.accumulate=2", "distill.method=[pskd]", "scale.num_workers=2"),
            "distill.method: pskd gathers the outputs of all workers",
        ),
        (
            ("data.device_augment.mixup=0.2", "distill.method=[dkd]"),
            "distill.method: dkd needs the one class of each image, which does not go with data.device_augment.mixup or",
        ),
        (("teacher=null", "distill.method=[dkd]"), "distill.method: dkd needs a teacher: write teacher.model"),
        ((*STAGES, "data.global_batch_size=63"), "63 is not divisible by 2 replicas of 2 scale.pipeline_stages: write 62 or 64"),
        (
            (*STAGES, "scale.micro_batches=9", "optim.accumulate=4"),
            "optim.accumulate × scale.micro_batches is 36, and one replica's batch has 32 samples: write less",
        ),
        ((*STAGES, "precision=fp16"), "precision fp16 does not go with scale.pipeline_stages 2"),
        ((*STAGES, "scale.sync_batch_norm=true"), "scale.sync_batch_norm does not go with scale.pipeline_stages 2"),
        ((*STAGES, "train.compile=true"), "train.compile does not go with scale.pipeline_stages 2"),
        ((*STAGES, "optim.name=dot", "optim.nesterov=false"), "optim.name dot does not go with scale.pipeline_stages 2"),
        ((*STAGES, "optim.losses={task: {lr: 0.1}}"), "optim.losses does not go with scale.pipeline_stages 2"),
        ((*STAGES, "teacher.service=1"), "teacher.service does not go with scale.pipeline_stages 2"),
        ((*STAGES, *GPU), "data.decoder gpu does not go with scale.pipeline_stages 2"),
        ((*STAGES, "eval.asynchronous=true"), "eval.asynchronous does not go with scale.pipeline_stages 2"),
        (
            ("eval.asynchronous=true", "scale.num_workers=[1, 2]"),
            "eval.asynchronous does not go with scale.min_workers, whose workers would need the evaluator's place: write"
            " eval.asynchronous: false, or write scale.min_workers: null",
        ),
        (
            ("eval.asynchronous=true", "train.until_top1_pct=90"),
            "eval.asynchronous does not go with train.until_top1_pct, which waits for each evaluation: write",
        ),
        (("eval.asynchronous=true", *UNLABELED), "eval.asynchronous does not go with data.labels false, whose evaluation"),
        (("scale.min_workers=2",), "scale.min_workers 2 is more than scale.num_workers: write at most 1"),
        (("scale.sync_batch_norm=true", "optim.accumulate=2"), "scale.sync_batch_norm does not go with optim.accumulate 2"),
        (("teacher.mean=[0.5, 0.5, 0.5]",), "teacher.mean needs teacher.weights"),
        (("teacher.cache_epochs=2",), "teacher.cache_epochs needs teacher.cache"),
        (SEVERAL[1:], "teacher does not go with teachers, which lists all teachers: write teacher: null, or"),
        (
            ("teacher=null", "teachers=[{model: mlp_small, weights: x, cache: /c}, {model: mlp_small, weights: x}]"),
            "teachers: all see the same images: write the same cache and cache_epochs for each",
        ),
        (
            ("teacher=null", "teachers=[{model: mlp_small, weights: x, cache: /c}, {model: mlp_small, weights: x, cache: /d}]"),
            "write the same cache and cache_epochs for each",
        ),
        (
            ("teacher=null", "teachers=[{model: mlp_small, weights: x}, {model: mlp_small, weights: x, cache_top_k: 2}]"),
            "teacher.cache_top_k needs teacher.cache",
        ),
        (
            ("teacher.cache=/c", "teacher.service=1"),
            "whose outputs it would store: write teacher.cache: null, or write teacher.service: null",
        ),
        (("teacher.cache=/c", "teacher.placement=sharded"), "teacher.cache does not go with teacher.placement sharded"),
        (
            ("teacher.cache=/c", "distill.method=[srrl]"),
            "distill.method: srrl needs the teacher's network with a linear classifier, which does not go with",
        ),
        ((*DROPPING, "optim.accumulate=2"), "distill.teacher_dropping does not go with optim.accumulate 2"),
        (
            ("teacher.placement=sharded", "distill.method=[srrl]"),
            "distill.method: srrl reads the teacher's parameters, which does not go with teacher.placement sharded:",
        ),
        (("optim.name=dot",), "optim.nesterov does not go with optim.name dot"),
        ((*DOT, "optim.momentum=0.95"), "optim.name dot: momentum 0.95 ± delta 0.075 must lie in 0 … 1: write a smaller delta"),
        (("optim.losses={task: {momentum: 0}}",), "optim.losses.task.nesterov needs optim.losses.task.momentum above 0"),
        (
            ("optim.losses={kd: {warmup_epochs: 100}}",),
            "optim.losses.kd.warmup_epochs 100 leaves no epoch of optim.epochs 12: write less",
        ),
        (("optim.losses={at: {}}",), "optim.losses: there is no loss 'at' here: write one of kd, task"),
        (
            ("distill.method=[dkd]", "optim.losses={dkd: {}, dkd/tckd: {}, dkd/nckd: {}}"),
            "optim.losses: there is no loss 'dkd' here: write one of dkd/nckd, dkd/tckd, task",
        ),
        (("distill.method=[ab]", "optim.losses={ab: {}}"), "optim.losses: there is no loss 'ab' here: write one of task"),
        (
            ("distill.task_weight=0", "distill.options.kd.weight=0"),
            "distill.task_weight 0 does not go with methods whose weights are all 0, which leaves nothing to learn",
        ),
        (("train.max_steps=9", "train.until_s=1"), "train.until_s does not go with train.max_steps"),
        (("data.decoder=gpu",), "data.decoder gpu does not go with data.augment none"),
        (("distill.options.kd.warmup_by=epoch_from_1",), "distill.options.kd.warmup_by: without warmup_epochs the weight does"),
        (("distill.method=[ab]", "distill.options.ab.decay=linear"), "distill.options.ab.decay: ab works in its init stage only"),
    ],
)
def test_a_rule_is_checked_on_the_driver_and_again_by_the_worker(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    refused = refused_by_the_driver(overrides)
    assert message in refused
    assert refused_by_a_worker(overrides, tmp_path) == refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*STAGES, "distill.method=[sp]"),
            "distill.method: sp looks at all samples of a batch, which does not go with scale.micro_batches 8",
        ),
        (
            (*STAGES, "distill.method=[pskd]"),
            "distill.method: pskd gathers the outputs of all workers, which does not go with scale.micro_batches 8",
        ),
        (
            ("scale.num_workers=3", "scale.pipeline_stages=2"),
            "num_workers 3 is not divisible by scale.pipeline_stages 2: write 2 or 4",
        ),
        (
            (*STAGES, "distill.method=[ab]", "scale.micro_batches=1"),
            "distill.method: ab has an init stage, which does not go with scale.pipeline_stages 2",
        ),
        (
            (*SEVERAL, "distill.method=[simkd]"),
            "distill.method: simkd gives the student its teacher's classifier, which does not go with several teachers:",
        ),
        (
            (*SEVERAL, "distill.method=[at]", "optim.losses={at: {}}"),
            "optim.losses: at has a loss with each of several teachers, which share an optimizer: leave at out",
        ),
        ((*DROPPING, "distill.method=[kd]"), "distill.teacher_dropping: kd learns from the teachers' mean"),
        (
            ("teacher=null", "teachers=[{model: resnet8, weights: x}]", "distill.method=[embed]", "distill.teacher_dropping=0.5"),
            "distill.teacher_dropping: the student has one teacher: write several in teachers, without assistants, or leave",
        ),
        ((*DROPPING, "assistants=[{model: resnet8}]"), "distill.teacher_dropping: the student has one teacher"),
        (("scale.pipeline_stages=2",), "num_workers 1 is not divisible by scale.pipeline_stages 2: write 2"),
        (
            (WEIGHTS, "data.more=[{path: a, share: 0.5}, {path: b, share: 0.5}]"),
            "data.more: its shares add up to 1, which leaves",
        ),
        (
            (MORE, WEIGHTS, "data.global_batch_size=1"),
            "data.global_batch_size: 1 has no image for each of 2 sets: write at least 2",
        ),
        (
            ("data.labels=false", "data.more=[{path: synthetic, share: 0.25, labels: true}]"),
            "data.labels false does not go with a teacher without weights, which is not trained without labels: write",
        ),
        ((MORE, "teacher=null", "distill.method=none"), "data.more without labels does not go with a student of labels alone"),
        ((MORE,), "data.more without labels does not go with a teacher without weights: write labels: true"),
        ((MORE, WEIGHTS, *STAGES), "data.more without labels does not go with scale.pipeline_stages 2"),
        (
            (MORE, WEIGHTS, "distill.method=dkd"),
            "distill.method: dkd needs the one class of each image, which does not go with data.more without labels:",
        ),
        (
            (MORE.replace("}", ", labels: true}"), "distill.method=pskd", "teacher=null"),
            "distill.method: pskd remembers each image, which does not go with data.more",
        ),
        (
            (*UNLABELED, "eval.best=top1_pct"),
            "eval.best top1_pct does not go with data.labels false: write eval.best: null, or write eval.path",
        ),
        (
            (*UNLABELED, "sweep={metric: top5_pct, steps: null}"),
            "data.labels false does not go with sweep.metric top5_pct, which needs labels: write eval.path, or write",
        ),
        (
            (*UNLABELED, "sweep={metric: time_to_accuracy, target_pct: 50, steps: null}"),
            "data.labels false does not go with sweep.metric time_to_accuracy, which needs labels",
        ),
        (
            ("eval.best=cka",),
            "eval.best cka does not go with data.labels true, since it is measured of a student that learns no labels",
        ),
        (("sweep={metric: linear_top1_pct, steps: null}",), "sweep.metric linear_top1_pct does not go with data.labels true"),
        (
            (*UNLABELED, "eval.path=digits", "sweep={metric: linear_top1_pct, policy: asha, steps: null}"),
            "sweep.policy asha does not go with sweep.metric linear_top1_pct, since it stops trials by their accuracy",
        ),
        (
            (*STAGES, "scale.cut=[layer2, layer3]"),
            "scale.cut names the modules at which all but the first of 2 scale.pipeline_stages begin: write one for each",
        ),
        (
            (WEIGHTS, "teacher.classes=t.npy", "distill.method=[srrl]"),
            "distill.method: srrl needs the teacher's network with a linear classifier, which does not go with",
        ),
        (
            (WEIGHTS, "distill.method=embed", "distill.options.embed={balance: true}", "optim.accumulate=2"),
            "distill.options.embed.balance takes the mean of a whole batch, which does not go with optim.accumulate 2:",
        ),
        (
            (WEIGHTS, "distill.method=embed", "optim.losses={task: {lr: 1}}"),
            "optim.losses.task: the labels' loss has no weight here: leave it out",
        ),
        ((WEIGHTS, "distill.method=[embed, queue]", *DOT), "optim.name: dot has a momentum for the labels, whose loss has no"),
        (
            (WEIGHTS, "distill.method=[embed, queue]"),
            "distill.task_weight: it is 0 by default with embed and queue, and features alone train no classifier: write",
        ),
        ((WEIGHTS, "distill.method=fitnet", "distill.task_weight=0"), "distill.task_weight: it is 0, and features alone train"),
        ((WEIGHTS, "distill.method=crd", "distill.task_weight=0"), "distill.task_weight: it is 0, and features alone train"),
        ((WEIGHTS, "distill.method=srrl", "distill.task_weight=0"), "distill.task_weight: it is 0, and features alone train"),
        (
            ("teacher.epochs=3", "optim.min_lr_factor=0.1", "optim.cooldown_epochs=4"),
            "optim.cooldown_epochs 4 leaves no epoch of teacher.epochs 3: write less",
        ),
        (
            (*UNLABELED, "distill.options.embed={balance: true}", "eval.best=loss"),
            "distill.options.embed.balance divides the loss by its running mean, which does not go with eval.best loss:",
        ),
        (
            (WEIGHTS, "teacher.head=class_means", "distill.method=[srrl]"),
            "distill.method: srrl needs the teacher's network with a linear classifier, which does not go with",
        ),
    ],
)
def test_stages_that_workers_or_methods_do_not_fit_are_refused(overrides: tuple[str, ...], message: str) -> None:
    assert message in refused_by_the_driver(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("scale.num_workers=2", "data.global_batch_size=62"),
        ("data.val_resize=8",),
        ("optim.accumulate=32", "scale.num_workers=2"),
        ("data.device_augment.mixup=0.2", "data.global_batch_size=62"),
        ("data.global_batch_size=63", "data.last_batch=short"),
        ("data.device_augment.mixup=0.2", "distill.method=kd"),
        ("data.device_augment.mixup=0.2", "distill.method=at"),
        ("teacher.service=1", "data.global_batch_size=63"),
        GPU,
        (*GPU, "scale.use_gpu=true"),
        ("optim.warmup_epochs=11.9",),
        ("optim.nesterov=false", "optim.momentum=0"),
        ("optim.accumulate=2", "distill.method=pskd"),
        ("distill.method=pskd", "scale.num_workers=2"),
        ("distill.method=sp",),
        (*SEVERAL, "distill.method=[kd, sp, srrl]"),
        (*DROPPING, "distill.task_weight=1", "optim.losses={task: {}}"),
        (*STAGES, "distill.method=sp", "scale.micro_batches=1"),
        (*STAGES, "precision=bf16", "scale.micro_batches=32"),
        ("scale.micro_batches=100", "precision=fp16"),
        ("teacher=null", "distill.method=pskd"),
        (MORE, WEIGHTS),
        (*UNLABELED, "sweep={metric: cka, steps: null}", "eval.best=cka"),
        (*UNLABELED, "sweep={metric: linear_top1_pct, steps: null}", "eval={best: top1_pct, path: digits}"),
        (MORE.replace("}", ", labels: true}"), "distill.method=dkd"),
        (MORE.replace("}", ", labels: true}"), *STAGES),
        ("sweep.policy=asha", "sweep.metric=top1_pct", "sweep.steps=null", "sweep.grace_epochs=4", "train.evaluate_every=2"),
        ("sweep.grace_epochs=3", "train.evaluate_every=2"),
        ("assistants=[{model: resnet8, epochs: 3}]", "optim.warmup_epochs=2", "teacher.epochs=3"),
        ("optim.name=dot", "optim.nesterov=false"),
        ("optim.schedule=constant", "optim.min_lr_factor=0.1", "optim.losses={kd: {schedule: cosine}}"),
        ("optim.min_lr_factor=0.1", "optim.cooldown_epochs=2", "optim.losses={kd: {schedule: constant, warmup_epochs: 11}}"),
        ("distill.method=simkd", "distill.task_weight=0"),
        ("distill.method=fitnet", "distill.task_weight=0", "sweep.space={distill.task_weight: [0.5, 1]}"),
        ("distill.method=fitnet", "distill.task_weight=0", "sweep.space={distill.method: [kd, dkd]}"),
        ("optim.name=dot", "optim.nesterov=false", "distill.method=none", "sweep.space.distill.method=[kd]"),
    ],
)
def test_what_is_just_within_a_rule_is_taken(overrides: tuple[str, ...]) -> None:
    load("digits", overrides)


def test_rows_of_all_workers_are_gathered_where_batches_are_whole() -> None:
    load("digits", ["scale.num_workers=2", "distill.method=pskd"])


def test_asha_needs_an_accuracy_after_its_grace_epochs() -> None:
    asha = ("sweep.policy=asha", "sweep.metric=top1_pct", "sweep.steps=null")
    refused = refused_by_the_driver((*asha, "sweep.grace_epochs=2", "train.evaluate_every=3"))
    assert refused.endswith("write 3, or train.evaluate_every 1")


def test_a_batch_is_as_large_as_the_training_split_at_most() -> None:
    assert enough_images(DataConfig(global_batch_size=10), 10) is None
    assert enough_images(DataConfig(global_batch_size=11, last_batch="short"), 10) is None
    assert enough_images(DataConfig(global_batch_size=11), 10) == (
        "data.global_batch_size: 11 is more than the 10 training images of digits; write at most 10, or data.last_batch=short"
    )


@pytest.mark.parametrize(
    ("batch", "shares", "parts"),
    [
        (128, [0.25], (96, 32)),
        (100, [0.29], (71, 29)),
        (10, [0.125, 0.125], (8, 1, 1)),
        (100, [1 / 3, 1 / 3], (34, 33, 33)),
        (10, [0.001, 0.97], (1, 1, 8)),
    ],
)
def test_shares_of_a_batch_are_counts_by_the_largest_remainder_of_at_least_one(
    batch: int, shares: list[float], parts: tuple[int, ...]
) -> None:
    more = [{"path": "synthetic", "share": share} for share in shares]
    data = DataConfig.model_validate({"global_batch_size": batch, "more": more})
    assert data.batch_parts == parts
    assert enough_images(data, parts[0]) is None
    assert f"data.global_batch_size: the part of digits, {parts[0]} of {batch}, is more than the" in str(
        enough_images(data, parts[0] - 1)
    )


def test_the_recipe_keeps_every_rule() -> None:
    experiment = load("digits").experiment
    assert first_problem(experiment, RULES) is None
    methods = select_methods(DistillConfig(method=tuple(METHODS)))
    assert first_problem_of_methods(lambda: methods, experiment, 10, METHOD_RULES) is None


def test_the_accuracies_of_a_rule_are_all_that_there_are() -> None:
    assert f"sweep.metric={'|'.join(ACCURACIES)}, sweep.policy=asha" in [second for _, second, _ in CLASHES]


def test_no_method_is_loaded_where_the_settings_restrict_none() -> None:
    def load_them() -> tuple[SelectedMethod, ...]:
        raise AssertionError

    assert first_problem_of_methods(load_them, load("digits").experiment, 0, METHOD_RULES) is None
