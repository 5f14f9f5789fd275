"""The experiment: recipes and files, bases and overrides, and the one line that each mistake gets."""

import math
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from service.config import strict_yaml
from service.config.experiment import Resolved, load, read_resolved
from service.config.files import recipes
from service.config.messages import known_keys, nearest
from service.config.other_names import OTHER_NAMES
from service.config.paths import absolute_paths
from service.config.rules import needs_teacher
from service.config.schema import Experiment
from service.config.sweep import SweepConfig
from trainables.config import DistillConfig, MethodOptions, Section
from trainables.errors import ExperimentError
from trainables.methods.registry import METHODS
from trainables.methods.select import select_methods

KEYS = list(known_keys(Experiment))


def refusal(*overrides: str, recipe: str = "digits") -> str:
    """The text of the error that the overrides meet."""
    with pytest.raises(ExperimentError) as caught:
        load(recipe, overrides)
    return str(caught.value)


def written(folder: Path, text: str | bytes, name: str = "mine.yaml") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# What is right


def test_the_promised_recipes_ship_with_a_line_about_each() -> None:
    assert {"digits", "cifar10", "imagenet_r34_r18", "synthetic"} <= recipes().keys()
    assert all(20 < len(text) < 160 for text in recipes().values())


@pytest.mark.parametrize("name", ["rsb_a1", "rsb_a3", "vanillakd_a2_r50", "deit_distilled", "tinyvit_21m", "funmatch_r50"])
def test_the_line_of_a_published_recipe_has_its_paper_and_its_accuracy(name: str) -> None:
    assert re.search(r"\(\d{4}\.\d{5}\).*published \d\d\.\d", recipes()[name])


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_loads_under_its_own_name(name: str) -> None:
    resolved = load(name)
    assert resolved.experiment.name == name
    assert resolved.experiment.all_teachers or not resolved.experiment.distill.method
    assert resolved.experiment.sweep.space


@pytest.mark.parametrize("name", recipes())
def test_a_resolved_recipe_reads_back_as_the_same_experiment(name: str, tmp_path: Path) -> None:
    resolved = load(name, ["seed=7", "data.mean=[0.1, 0.2, 0.3]"])
    path = Path(written(tmp_path, resolved.to_yaml(), "experiment.yaml"))
    assert read_resolved(path).experiment == resolved.experiment


def test_a_text_that_looks_like_a_number_reads_back_as_text(tmp_path: Path) -> None:
    resolved = load("digits", ['name="1e5"'])
    assert read_resolved(Path(written(tmp_path, resolved.to_yaml()))).experiment.name == "1e5"


def test_imagenet_is_the_published_recipe() -> None:
    e = load("imagenet_r34_r18").experiment
    assert e.teacher is not None
    assert (e.teacher.model, e.teacher.weights, e.student.model) == ("resnet34", "IMAGENET1K_V1", "resnet18")
    assert (e.optim.epochs, e.data.global_batch_size, e.optim.lr, e.optim.milestones) == (100, 256, 0.1, (30, 60, 90))


def test_each_stage_of_a_chain_learns_from_the_one_before_it() -> None:
    experiment = load("digits", ["assistants=[{model: resnet14, epochs: 7}, {model: resnet8}]"]).experiment
    assert list(experiment.preparation) == ["teacher", "assistant1", "assistant2"]
    stage_config = [
        experiment.stage(name, Path("/run"), {}, "before.safetensors") for name in (*experiment.preparation, "student")
    ]
    assert [(stage.model, stage.optim.epochs) for stage in stage_config] == [
        ("convnet_large", 12),
        ("resnet14", 7),
        ("resnet8", 12),
        ("convnet_small", 12),
    ]
    assert stage_config[0].teacher is None
    assert stage_config[0].distill is None
    teachers = [stage.teacher for stage in stage_config[1:] if stage.teacher is not None]
    assert [(teacher.model, teacher.weights) for teacher in teachers] == [
        ("convnet_large", "before.safetensors"),
        ("resnet14", "before.safetensors"),
        ("resnet8", "before.safetensors"),
    ]
    assert all(stage.distill == experiment.distill for stage in stage_config[1:])


def test_the_labels_loss_and_gradient_checkpointing_are_the_students_alone() -> None:
    own = ["train={task_loss: bce, bce_threshold: 0.2, label_smoothing: 0.1, gradient_checkpointing: true}"]
    experiment = load("digits", [*own, "assistants=[{model: resnet8}]"]).experiment
    keys = ("task_loss", "bce_threshold", "label_smoothing", "gradient_checkpointing")
    for name in experiment.preparation:
        train = experiment.stage(name, Path("/run"), {}, "before.safetensors").train
        assert [getattr(train, key) for key in keys] == ["cross_entropy", None, 0.0, False]
    assert experiment.stage("student", Path("/run"), {}).train == experiment.train
    plain = load("digits", [*own, "teacher=null", "distill.method=none"]).experiment
    assert plain.stage("student", Path("/run"), {}).train == plain.train


def test_the_first_stage_of_a_chain_learns_from_several_teachers_and_the_next_from_that() -> None:
    teachers = "teachers=[{model: mlp_large, weights: one.pt}, {model: resnet20, weights: two.pt, share: 3}]"
    experiment = load("digits", ["teacher=null", teachers, "assistants=[{model: resnet8}]"]).experiment
    assert list(experiment.preparation) == ["assistant1"]
    first = experiment.stage("assistant1", Path("/run"), {})
    assert (first.teacher, [each.weights for each in first.all_teachers]) == (None, ["one.pt", "two.pt"])
    assert first.shares == (0.25, 0.75)
    student = experiment.stage("student", Path("/run"), {}, "before.safetensors")
    assert [(each.model, each.weights) for each in student.all_teachers] == [("resnet8", "before.safetensors")]
    assert student.shares == (1.0,)
    alone = load("digits", ["teacher=null", teachers]).experiment
    assert alone.stage("student", Path("/run"), {}).teachers == alone.teachers
    assert alone.measures_teacher("student")


def test_method_none_among_methods_of_a_sweep_is_the_labels_alone() -> None:
    experiment = load("digits", ["distill.method=none"]).experiment
    student = experiment.stage("student", Path("/s"), {}, "weights")
    assert student.distill is None
    assert experiment.distill.method == ()
    assert Experiment.model_validate(experiment.model_dump(mode="json")) == experiment


@pytest.mark.parametrize(("weight", "losses"), [(0, {"task"}), (0.5, {"task", "at"})])
def test_a_sweep_over_a_methods_weight_may_hold_0_where_its_loss_has_an_optimizer(weight: float, losses: set[str]) -> None:
    own = "optim.losses={task: {lr: 0.2}, at: {lr: 0.01}}"
    resolved = load("digits", ["distill.method=[kd, at]", own, "sweep.space={distill.options.at.weight: [0, 0.5]}"])
    trial = resolved.override({"distill.options.at.weight": weight}, "trial").experiment
    stage_config = trial.stage("student", Path("/s"), {}, "weights")
    assert stage_config.distill is not None
    assert set(stage_config.optim.losses) == losses
    assert losses <= {"task", *(method.key for method in select_methods(stage_config.distill))}


def test_a_teachers_optimizer_is_that_of_its_labels_alone() -> None:
    stage_config = load("digits", ["optim.losses={task: {lr: 0.2}, kd: {lr: 0.01}}"]).experiment.stage("teacher", Path("/s"), {})
    assert set(stage_config.optim.losses) == {"task"}


def test_a_teacher_is_needed_only_by_methods_that_read_one() -> None:
    def needs_teacher_of(*sets: str) -> bool:
        experiment = load("digits", sets).experiment
        return needs_teacher(experiment.distill, experiment.sweep.axes)

    assert needs_teacher_of()
    assert needs_teacher_of("distill.method=[dml, sp]")
    assert not needs_teacher_of("distill.method=dml")
    assert not needs_teacher_of("distill.method=[pskd, dml]")
    assert needs_teacher_of("distill.method=dml", "sweep.space={distill.method: [dml, kd]}")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("optim.lr=2", "optim.lr", 2.0),
        ("data.loader_workers=auto", "data.loader_workers", "auto"),
        ("data.loader_workers=0", "data.loader_workers", 0),
        ("optim.epochs=010", "optim.epochs", 10),
        ("optim.epochs=1_000", "optim.epochs", 1000),
        ("seed=0x10", "seed", 16),
        ("data.path=1:30", "data.path", "1:30"),
        ("optim.nesterov=yes", "optim.nesterov", True),
        ("scale.use_gpu=off", "scale.use_gpu", False),
        ("scale.use_gpu=auto", "scale.use_gpu", "auto"),
        ("scale.use_gpu=false", "scale.use_gpu", False),
        ("teacher=null", "teacher", None),
        ("optim.milestones=[3, 5]", "optim.milestones", (3, 5)),
        ("data={path: synthetic, image_size: 16}", "data.image_size", 16),
        ("tracking.uri=http://127.0.0.1:5000?a=b", "tracking.uri", "http://127.0.0.1:5000?a=b"),
    ],
)
def test_an_override_sets_one_value(override: str, key: str, value: Any) -> None:
    resolved = load("digits", [override])
    found: Any = resolved.experiment
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert resolved.sources[key] == "--set"


def test_later_overrides_win() -> None:
    assert load("digits", ["seed=1", "seed=2"]).experiment.seed == 2


def test_under_the_space_of_a_sweep_the_rest_of_the_key_is_one_key() -> None:
    e = load("digits", ["sweep.space.optim.lr=[0.1, 0.2]"]).experiment
    assert e.sweep.space["optim.lr"] == [0.1, 0.2]
    assert "data.loader_workers" in e.sweep.space


def test_a_file_is_named_after_itself_and_says_where_each_value_is_from(tmp_path: Path) -> None:
    path = written(tmp_path, "base: digits\noptim: {lr: 1e-2}\n", "my try.yaml")
    resolved = load(path, ["seed=3"])
    assert resolved.experiment.name == "my-try"
    assert (resolved.experiment.optim.lr, resolved.experiment.optim.epochs) == (0.01, 12)
    assert (resolved.sources["optim.lr"], resolved.sources["optim.epochs"]) == (f"{path}:2:9", "recipe digits")
    assert resolved.sources["seed"] == "--set"
    assert "precision" not in resolved.sources
    assert resolved.sources.get("name") is None
    own = written(tmp_path, f"base: {path}\nname: own\n", "second.yaml")
    assert load(own).experiment.name == "own"
    assert load(written(tmp_path, f"base: {own}\n", "third.yaml")).experiment.name == "third"
    assert len(load(written(tmp_path, "base: digits\n", f"{'x' * 200}.yaml")).experiment.name) <= 150


def test_no_number_of_a_section_takes_a_boolean_also_not_in_a_method_of_the_users_own(tmp_path: Path) -> None:
    from pydantic import TypeAdapter, ValidationError

    def numbers(annotation: Any) -> bool:
        return annotation in (int, float) or any(map(numbers, getattr(annotation, "__args__", ())))

    def subclasses(kind: type) -> list[type]:
        return [kind, *(each for below in kind.__subclasses__() for each in subclasses(below))]

    class Own(MethodOptions):
        margin: float = 1.0
        several: tuple[int, ...] = ()
        switch: bool | int = False

    select_methods(DistillConfig(method=tuple(METHODS)))  # loads the options of all methods
    tried = 0
    for section in subclasses(Section):
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            if numbers(field.annotation) and name != "switch":
                for value in (True, [True], {"a": True}):
                    with pytest.raises(ValidationError) as caught:
                        section.model_validate({name: value})  # type: ignore[attr-defined]
                    assert any(error["loc"][0] == name for error in caught.value.errors()), (section, name, value)
                tried += 1
    assert tried > 100
    assert Own(switch=True).switch is True
    assert TypeAdapter(Own).validate_python({"several": [1, 2], "margin": 2}).several == (1, 2)
    with pytest.raises(ValidationError, match="finite"):
        Own(margin=float("nan"))


def test_a_base_is_found_in_the_folder_of_the_file_that_names_it(tmp_path: Path) -> None:
    written(tmp_path, "base: digits\nseed: 5\n", "below.yaml")
    (tmp_path / "sub").mkdir()
    above = written(tmp_path / "sub", "base: ../below.yaml\nname: above\n", "above.yaml")
    resolved = load(above)
    assert (resolved.experiment.name, resolved.experiment.seed) == ("above", 5)
    assert resolved.experiment.data.path == "digits"


def test_a_point_of_a_sweep_is_the_experiment_with_its_values() -> None:
    base = load("digits")
    point = base.override({"data.global_batch_size": 32, "optim.lr": "1e-3"}, "trial")
    assert isinstance(point, Resolved)
    assert (point.experiment.data.global_batch_size, point.experiment.optim.lr) == (32, 0.001)
    assert point.sources["optim.lr"] == "trial"
    assert base.experiment.data.global_batch_size == 64


def test_known_keys_are_what_the_user_was_promised() -> None:
    promised = """data.path data.global_batch_size data.loader_workers data.image_size teacher.model teacher.weights student.model
        distill.method distill.task_weight distill.options optim.lr
        scale.num_workers scale.use_gpu precision sweep.space sweep.policy sweep.metric tracking.uri seed"""
    assert set(promised.split()) <= set(KEYS)


@pytest.mark.parametrize(
    ("sweep", "steps"),
    [({}, None), ({"steps": 5}, 5), ({"policy": "guided"}, 60), ({"policy": "guided", "steps": 5}, 5)],
)
def test_a_timing_sweep_has_its_steps_or_those_of_a_guided_one(sweep: dict[str, Any], steps: int | None) -> None:
    assert SweepConfig(**sweep).timing_steps == steps


# Near names


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("teacher.pretrained", "teacher.weights"),
        ("lr-scheduler", "optim.schedule"),
        ("data.global_batchsize", "data.global_batch_size"),
        ("distil.method", "distill.method"),
        ("distill.taskweight", "distill.task_weight"),
        ("methods", "distill.method"),
        ("lr", "optim.lr"),
        ("data.num_workers", "data.loader_workers"),
        ("scale.num_worker", "scale.num_workers"),
        ("teacher.weight", "teacher.weights"),
        ("sed", "seed"),
        ("size", "data.global_batch_size"),
        ("the_precision_of_numbers", "precision"),
        ("zzz", None),
    ],
)
def test_a_key_that_does_not_exist_is_answered_with_the_nearest(wrong: str, right: str | None) -> None:
    hint = nearest(wrong, KEYS)
    assert hint == (f"; did you mean {right}?" if right else "")
    assert "no such key" in refusal(f"{wrong}=3")


def test_every_name_of_another_project_leads_to_a_key_that_exists_or_to_a_sentence() -> None:
    for name, other in OTHER_NAMES.items():
        target = other.partition(",")[0]
        assert target in KEYS or " " in target, name
        assert name not in KEYS
        named = [word for word in re.findall(r"[a-z]+\.[a-z_.]*[a-z]", other) if not word.startswith("distill.options.")]
        assert set(named) <= set(KEYS), name
    load("digits", ["distill.options.kd.temperature=2", "distill.options.kd.weight=2"])


# What is wrong, each in one line that says what, where and what instead


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.global_batch_size=abc", '--set: data.global_batch_size: must be an integer or auto, not "abc"'),
        ("data.global_batch_size=64.5", "--set: data.global_batch_size: must be an integer or auto, not 64.5"),
        ("data.global_batch_size=true", "--set: data.global_batch_size: must be an integer or auto, not true"),
        ("data.global_batch_size=null", "--set: data.global_batch_size: must be an integer or auto, not null"),
        ("data.global_batch_size=0", "--set: data.global_batch_size: must be at least 1 or auto, not 0"),
        ("data.global_batch_size=[64]", "--set: data.global_batch_size: must be an integer or auto, not [64]"),
        (
            "data.global_batch_size=" + "9" * 30,
            f"--set: data.global_batch_size: must be below 2147483648 or auto, not {'9' * 30}",
        ),
        ("data.loader_workers=abc", '--set: data.loader_workers: must be an integer or auto, not "abc"'),
        ("data.shuffle=true", "--set: data.shuffle: must be text, not true"),
        (
            "data.shuffle=window(0)",
            "--set: data.shuffle: must be full, none or window(n) with n samples, such as window(10000), not 'window(0)'",
        ),
        ("data.max_bad=100", "--set: data.max_bad: must be below 1, not 100"),
        ("data.max_bad_images=100", "--set: data.max_bad_images: no such key; did you mean data.max_bad?"),
        ("data.loader_workers=-1", "--set: data.loader_workers: must be at least 0 or auto, not -1"),
        ("data.loader_workers=true", "--set: data.loader_workers: must be an integer or auto, not true"),
        ("scale.use_gpu=maybe", '--set: scale.use_gpu: must be true or false or auto, not "maybe"'),
        ("data=3", "--set: data: must be a section of keys, not 3"),
        ("student=null", "--set: student: must be a section of keys, not null"),
        ("student={}", "--set: student.model: missing: write it"),
        ("data.mean=[0.1, 0.2]", "--set: data.mean: must be a list of 3, not [0.1, 0.2]"),
        ("data.mean=[0.1307]", "--set: data.mean: images have three channels: write mean: [0.1307, 0.1307, 0.1307]"),
        ("data.std=0.5", "--set: data.std: images have three channels: write std: [0.5, 0.5, 0.5]"),
        (
            "data.mean=[123.675, 116.28, 103.53]",
            "--set: data.mean: pixels are in [0, 1], not [0, 255]: divide mean and std by 255: write mean: [0.485, 0.456, 0.406]",
        ),
        (
            "data.std=[58.395, 57.12, 57.375]",
            "--set: data.std: pixels are in [0, 1], not [0, 255]: divide mean and std by 255: write std: [0.229, 0.224, 0.225]",
        ),
        ("data.mean=[300, 1, 1]", "--set: data.mean[0]: must be at most 1, not 300"),
        ("data.std=0", "--set: data.std: must be a list, not 0"),
        ("student=resnet18", '--set: student: must be a section of keys, not "resnet18"; did you mean student.model?'),
        (
            "steps=5",
            "--set: steps: no such key; write train.max_steps for a timing run, sweep.steps for a timing sweep, or optim.epochs",
        ),
        ("optim.sched=cosine", "--set: optim.sched: no such key; did you mean optim.schedule?"),
        ("batch_size=3", "--set: batch_size: no such key; did you mean data.global_batch_size, of all workers together?"),
        ("student.pretrained=IMAGENET1K_V1", "--set: student.pretrained: no such key; did you mean student.weights?"),
        (
            "teachers=[{model: resnet18, weights: x, pretrained: true}]",
            "--set: teachers[0].pretrained: no such key; did you mean teachers[0].weights?",
        ),
        (
            "teachers=[{model: resnet18, weights: x}, {model: resnet18, weights: x, service: 1}]",
            "--set: teachers[1].service: no such key; one teacher alone has it: write teacher, not teachers",
        ),
        ("data.mean=[1, 2, 3, 4]", "--set: data.mean: must be a list of 3, not [1, 2, 3, 4]"),
        ("data.mean=[0.1, x, 0.3]", '--set: data.mean[1]: must be a number, not "x"'),
        ("data.std=[1, 0, 1]", "--set: data.std[1]: must be above 0, not 0"),
        ("optim.milestones=[1, 0]", "--set: optim.milestones[1]: must be at least 1, not 0"),
        ("optim.milestones=3", "--set: optim.milestones: must be a list, not 3"),
        ("data.path=2020", """--set: data.path: must be text, not 2020: write "2020", after --set '"2020"'"""),
        ("data.path=''", '--set: data.path: must be text that is not empty, not ""'),
        ("teacher.weights=''", '--set: teacher.weights: must be text that is not empty, not ""'),
        ("data.augment=flip", '--set: data.augment: must be none, crop_flip or pad_crop_flip, not "flip"'),
        ("precision=fp8", '--set: precision: must be fp32, bf16, fp16, fp64 or auto, not "fp8"'),
        ("distill.options.kd.temperature=0", "--set: distill.options.kd.temperature: must be above 0, not 0"),
        ("distill.options.kd.temperature=.nan", "--set: distill.options.kd.temperature: must be a finite number, not NaN"),
        ("distill.options.kd.temprature=4", "--set: distill.options.kd.temprature: no such key; did you mean temperature?"),
        ("distill.options.dkd.beta=-2", "--set: distill.options.dkd.beta: must be at least 0, not -2"),
        ("distill.options.kdd.weight=1", "--set: distill.options.kdd: there is no method 'kdd'; did you mean kd?"),
        ("distill.method=[kd, kd]", "--set: distill.method: names kd twice: set its weight in distill.options.kd.weight instead"),
        ("distill.method=[]", "--set: distill.method: names no method: write one, such as kd, or none"),
        (
            "distill.method=no.py:Mine",
            "--set: distill.method: there is no file no.py: give the path of a Python file, as FILE.py:CLASS",
        ),
        ("optim.lr=.inf", "--set: optim.lr: must be a finite number, not Infinity"),
        ("optim.lr=false", "--set: optim.lr: must be a number, not false"),
        ("optim.momentum=1", "--set: optim.momentum: must be below 1, not 1"),
        ("seed=-1", "--set: seed: must be at least 0, not -1"),
        ("seed=true", "--set: seed: must be an integer, not true"),
        ("sweep.reduction_factor=true", "--set: sweep.reduction_factor: must be an integer, not true"),
        ("optim.milestones=[3, true]", "--set: optim.milestones[1]: must be an integer, not true"),
        ("optim.lr=on", '--set: optim.lr: must be a number, not "on"'),
        ("optim={on: 2}", "--set: optim.on: no such key"),
        ("on=2", "--set: on: no such key"),
        ("name=" + "x" * 200, f'--set: name: must be text of at most 150 characters, not "{"x" * 56}…'),
        (
            "base=digits",
            "--set: base: no such key; write it in the file, or give the base in place of the file",
        ),
        ("name=../x", '--set: name: must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$, not "../x"'),
        ("student.model=resnet18x", "--set: student.model: there is no model 'resnet18x'; did you mean resnet18?"),
        ("student.model=ResNet8", "--set: student.model: there is no model 'ResNet8'; did you mean resnet8?"),
        ("teacher.model=convnet_larg", "--set: teacher.model: there is no model 'convnet_larg'; did you mean convnet_large?"),
        ("distill.method=kdd", "--set: distill.method: there is no method 'kdd'; did you mean kd?"),
        ("distill.method=5", "--set: distill.method: must be a method or a list of methods, such as kd, not 5"),
        ("optim.losses={task: {lr: -1}}", "--set: optim.losses.task.lr: must be above 0, not -1"),
        ("optim.losses={task: {lrr: 1}}", "--set: optim.losses.task.lrr: no such key; did you mean optim.losses.task.lr?"),
        ("distill.options.kd=4", "--set: distill.options.kd: must be a section of keys, not 4"),
        ("teacher.cache=s3://logits", "--set: teacher.cache: must be a folder that all nodes mount, not a URI"),
        ("assistants=[{model: resnet9}]", "--set: assistants[0].model: there is no model 'resnet9'; did you mean resnet8?"),
        (
            "assistants=[{model: resnet8, weights: x}]",
            "--set: assistants[0].weights: no such key; an assistant is trained here: leave it out",
        ),
        ("data.path.x=3", "--set data.path.x=3: data.path is a value, not a section"),
        ("optim.lr=2023-02-31", '--set: optim.lr: must be a number, not "2023-02-31"'),
        ("sweep.policy=guess", '--set: sweep.policy: must be grid, random, asha or guided, not "guess"'),
        ("sweep.space=3", "--set: sweep.space: must be a section of keys, not 3"),
    ],
)
def test_a_wrong_value_gets_one_line(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.global_batch_size=63", "scale.num_workers=2"], "is not divisible by scale.num_workers 2: write 62 or 64"),
        (["data.global_batch_size=1", "scale.num_workers=2"], "write 2 or 4"),
        (["distill.task_weight=0", "distill.options.kd.weight=0"], "which leaves nothing to learn"),
        (["optim.warmup_epochs=12"], "leaves no epoch of optim.epochs 12"),
        (["optim.warmup_epochs=2", "teacher.epochs=2"], "leaves no epoch of teacher.epochs 2"),
        (["data.val_resize=7"], "is below data.image_size 8: write at least 8, or leave it out"),
        (["optim.accumulate=65"], "is 65, and one replica's batch has 64 samples: write less"),
        (["optim.accumulate=33", "scale.num_workers=2"], "is 33, and one replica's batch has 32 samples: write less"),
        (["optim.nesterov=true", "optim.momentum=0"], "needs optim.momentum above 0"),
        (
            ["data.decoder=gpu", "data.augment=crop_flip", "scale.use_gpu=false"],
            "data.decoder gpu does not go with scale.use_gpu false",
        ),
        (["data.decoder=gpu"], "data.decoder gpu does not go with data.augment none"),
        (["teacher=null", "distill.method=dkd"], "dkd needs a teacher: write teacher.model"),
        (["teacher=null", "assistants=[{model: resnet8}]"], "assistants needs teacher.model"),
        (["assistants=[{model: resnet9}]"], "assistants[0].model: there is no model 'resnet9'; did you mean resnet8?"),
        (["assistants=[{epochs: 3}]"], "assistants[0].model: missing: write it"),
        (["assistants=[{model: resnet8, epoch: 3}]"], "assistants[0].epoch: no such key; did you mean assistants[0].epochs?"),
        (["optim.warmup_epochs=2", "assistants=[{model: resnet8, epochs: 2}]"], "leaves no epoch of assistants[0].epochs 2"),
        (
            ["assistants=[{model: resnet8}]", "distill.method=simkd"],
            "distill.method: simkd gives the student its teacher's classifier, which does not go with assistants",
        ),
        (
            ["optim.accumulate=2", "distill.method=sp"],
            "distill.method: sp looks at all samples of a batch, which does not go with optim.accumulate 2",
        ),
        (["optim.accumulate=2", "distill.method=pskd", "scale.num_workers=2"], "pskd gathers the outputs of all workers"),
        (
            ["optim.name=dot", "optim.nesterov=false", "distill.method=none"],
            "one for methods, and there are no methods: write sgd",
        ),
        (["optim.losses={at/maps: {lr: 0.1}}"], "optim.losses: there is no loss 'at/maps' here: write one of kd, task"),
        (["optim.losses={task/ce: {lr: 0.1}}"], "optim.losses: there is no loss 'task/ce' here: write one of kd, task"),
        (["teachers=[{model: resnet8}]"], "teachers[0].weights: missing: write it"),
        (["teacher=null", "teachers=[{model: resnet9, weights: x}]"], "teachers[0].model: there is no model 'resnet9'"),
        (["sweep.metric=speed"], "trials have no 'speed'"),
        (["sweep.metric=top1"], "did you mean top1_pct?"),
        (["sweep.metric=top1_pct", "sweep.steps=5"], "sweep.steps does not go with sweep.metric top1_pct, which compares"),
        (["sweep.policy=asha", "sweep.metric=top1_pct", "sweep.steps=5"], "write sweep.steps: null"),
        (["sweep.policy=asha"], "write sweep.metric: top1_pct"),
        (
            ["sweep.policy=asha", "sweep.metric=linear_top1_pct", "sweep.steps=null"],
            "sweep.policy asha does not go with sweep.metric linear_top1_pct, since it stops trials by their accuracy",
        ),
        (
            ["sweep.policy=asha", "sweep.metric=top1_pct", "sweep.grace_epochs=3", "train.evaluate_every=2"],
            "sweep.grace_epochs 3: asha compares trials after so many epochs first, and train.evaluate_every 2 leaves that one "
            "without an accuracy: write 4, or train.evaluate_every 1",
        ),
        (
            ["sweep.policy=guided", "sweep.metric=top1_pct"],
            "since it looks for speed or cost: write sweep.policy: grid, or write",
        ),
        (["sweep.metric=pareto"], "or write sweep.policy: guided"),
        (["sweep.budget_gpu_h=1", "sweep.budget_grid_share=0.3"], "sweep.budget_grid_share does not go with sweep.budget_gpu_h"),
        (["sweep.metric=time_to_accuracy"], "sweep.metric time_to_accuracy needs sweep.target_pct"),
        (["sweep.target_pct=90"], "sweep.target_pct does not go with sweep.metric images_per_s"),
        (["sweep.metric=time_to_accuracy", "sweep.target_pct=90", "sweep.steps=9"], "or set sweep.policy to guided"),
        (
            ["sweep.metric=time_to_accuracy", "sweep.target_pct=90", "sweep.policy=asha"],
            "sweep.policy asha does not go with sweep.metric time_to_accuracy",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused(overrides: list[str], words: str) -> None:
    text = refusal(*overrides)
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(("num_workers", "accumulate"), [(1, 64), (2, 32)])
def test_a_workers_batch_is_cut_into_as_many_micro_batches_as_it_has_samples(num_workers: int, accumulate: int) -> None:
    overrides = ["data.global_batch_size=64", f"scale.num_workers={num_workers}", f"optim.accumulate={accumulate}"]
    assert load("digits", overrides).experiment.optim.accumulate == accumulate


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("scale: {num_workers: 2}", ["data.global_batch_size=63"], "--set: data.global_batch_size 63 is not divisible"),
        ("data: {image_size: 32}", ["data.decoder=gpu"], "--set: data.decoder gpu does not go with data.augment none"),
        ("sweep: {space: {optim.lr: [1]}}", ["sweep.space.optim.lr=3"], "--set: sweep.space: optim.lr: write a list"),
        ("sweep: {space: {optim.lr: [1]}}", ["sweep.space.optim.rl=[3]"], "--set: sweep.space: optim.rl: no such key"),
        (
            "sweep: {space: {optim.lr: {uniform: [1, 2]}}, policy: random}",
            ["sweep.policy=grid"],
            "--set: sweep.space: optim.lr: grid",
        ),
        ("distill: {options: {kd: {weight: 0}}}", ["distill.task_weight=0"], "--set: distill.task_weight 0 does not go with"),
        ("optim: {losses: {task: {lr: 1}}}", ["optim.losses.at.lr=1"], "--set: optim.losses: there is no loss 'at'"),
        ("scale: {num_workers: 3}", ["seed=1"], "mine.yaml:2:9: data.global_batch_size 64 is not divisible"),
        ("scale: {num_workers: 3}", ["seed=x"], "--set: seed: must be an integer"),
        ("seed: x", ["optim.lr=1"], "mine.yaml:2:1: seed: must be an integer"),
    ],
)
def test_what_is_wrong_only_with_an_override_is_blamed_on_it(
    text: str, overrides: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, f"base: digits\n{text}\n")
    assert refusal(*overrides, recipe="mine.yaml").startswith(words)


MARGIN = """
from trainables.config import MethodOptions
from trainables.methods.contract import Method


class Margin(Method):
    class Options(MethodOptions):
        margin: float = 1.0

    terms = ("apart",)
"""


@pytest.mark.parametrize(
    ("space", "points"),
    [
        ("{{distill.method: [kd, {0}]}}", "[]"),
        ("{{distill.method: [[kd, {0}], none]}}", "[]"),
        ("{{}}", "[{{distill.method: kd}}, {{distill.method: [{0}]}}]"),
    ],
)
def test_a_method_that_a_sweep_chooses_may_be_given_options(space: str, points: str, tmp_path: Path) -> None:
    name = written(tmp_path, MARGIN, "own.py") + ":Margin"
    searched = [f"sweep.space={space.format(name)}", f"sweep.points={points.format(name)}"]
    resolved = load("digits", [*searched, "distill.options={Margin: {margin: 2}}"])
    assert resolved.override({"distill.method": "kd"}, "trial").experiment.distill.options == {"Margin": {"margin": 2}}
    message = "--set: distill.options.Margin.margn: no such key; did you mean margin?"
    assert refusal(*searched, "distill.options.Margin.margn=2") == message
    assert "there is no method 'Other'" in refusal(*searched, "distill.options={Other: {margin: 2}}")


@pytest.mark.parametrize("options", [[], ["distill.options.Margin.weight=2"]])
def test_a_required_option_that_is_missing_is_named(options: list[str], tmp_path: Path) -> None:
    name = written(tmp_path, MARGIN.replace(" = 1.0", ""), "own.py") + ":Margin"
    problem = refusal(f"distill.method={name}", *options)
    assert problem.endswith("distill.options.Margin.margin: missing: write it")
    assert load("digits", [f"distill.method={name}", *options, "distill.options.Margin.margin=2"])


def test_a_searched_method_whose_file_is_not_there_is_named_where_it_is_searched() -> None:
    text = refusal("sweep.space={distill.method: [kd, no.py:Margin]}", "distill.options={Margin: {weight: 2}}")
    assert text.startswith("--set: sweep.space.distill.method: there is no file no.py")


@pytest.mark.parametrize("space", ["[3, [4]]", "{range: [1, 2]}", "5"])
def test_options_with_a_space_that_names_no_methods_are_checked_all_the_same(space: str) -> None:
    assert "there is no method 'Margin'" in refusal(f"sweep.space={{distill.method: {space}}}", "distill.options={Margin: {}}")


@pytest.mark.parametrize("text", ["", "optim.lr", "optim.lr=", "=3", ".=3", "optim..lr=3"])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    assert refusal(text) == f"--set {text}: write --set key=value"


def test_spaces_around_the_equals_sign_of_an_override_are_no_part_of_it() -> None:
    assert load("digits", ["optim.epochs = 3"]).experiment.optim.epochs == 3


def test_many_mistakes_take_six_lines_at_most() -> None:
    lines = refusal(*(f"wrong{i}=1" for i in range(9))).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "… and 4 more"


def test_a_mistake_in_a_file_is_reported_with_the_files_name(tmp_path: Path) -> None:
    path = written(tmp_path, "base: digits\noptim: {lr: -1}\n")
    assert refusal(recipe=path) == f"{path}:2:9: optim.lr: must be above 0, not -1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\n", ":2:1: not YAML: expected ',' or ']'"),
        ("a: b: c\n", ":1:5: not YAML: mapping values are not allowed here"),
        ("\tseed: 1\n", ":1:1: not YAML:"),
        (b"\x00\x01abc", "not YAML: special characters are not allowed"),
        (b"\x89PNG\r\n\x1a\n", "not YAML: special characters are not allowed"),
        ("- a\n- b\n", "an experiment is a mapping, such as `data: {path: digits}`"),
        ("", "an experiment is a mapping"),
        ("just words", "an experiment is a mapping"),
        ("base: digits\nseed: 1\nseed: 2\n", ":3:1: seed is written twice: keep one"),
        ("base: digits\noptim:\n  lr: 1\n  'lr': 2\n", ":4:3: lr is written twice: keep one"),
        ("base: digits\n1: 2\n", "1: no such key"),
        ("base: digits\ndata: {1: 2}\n", "data.1: no such key"),
        ("base: 3\n", "base: give one recipe or file"),
        ("base: digitz\n", "digitz: neither a recipe nor a file; did you mean digits?"),
        ("base: none.yaml\n", "none.yaml: neither a recipe nor a file; recipes: backbone, cifar10"),
        ("base: digits\non: 2\n", "mine.yaml:2:1: on: no such key"),
        ("base: digits\noptim: {on: 2}\n", "mine.yaml:2:9: optim.on: no such key"),
        ("base: digits\noptim.lr: 2\n", "mine.yaml:2:1: optim.lr: no such key: write it in its section, optim: {lr: …}"),
        (
            "base: digits\ndata: {device_augment.mixup: 2}\n",
            "data.device_augment.mixup: no such key: write it in its section, data: {device_augment: {mixup: …}}",
        ),
        (f"base: digits\n{'k' * 1000}: 2\n", f"mine.yaml:2:1: {'k' * 20}"),
        ("base: mine.yaml\n", "`base` leads back to itself (mine.yaml → mine.yaml)"),
        ("!!python/object/apply:os.system ['true']", ":1:1: `!` begins a YAML tag: leave it out, or quote the text"),
        ("a: &a [*a]\n", "nested more than 50 deep"),
        ("[" * 4000, "nested more than 50 deep"),
        ("seed: " + "9" * 5000, "a value cannot be read"),
        ("seed: !!int x1", ":1:7: `!` begins a YAML tag"),
        ("student:\n  model: !net\n", ":2:10: `!` begins a YAML tag"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_in_one_line(text: str | bytes, words: str, tmp_path: Path) -> None:
    message = refusal(recipe=written(tmp_path, text))
    assert words in message
    assert message.startswith(f"{tmp_path}/mine.yaml:")
    assert "\n" not in message
    assert len(message) < 1500


def bomb(open_bracket: str = "[", close: str = "]", width: int = 9, levels: int = 9) -> str:
    """YAML of a few hundred bytes whose aliases stand for width ** levels values."""
    lines = [f"a0: &a0 {open_bracket}{', '.join(f'k{n}: 1' if close == '}' else 'lol' for n in range(width))}{close}"]
    for level in range(1, levels):
        parts = [f"k{n}: *a{level - 1}" if close == "}" else f"*a{level - 1}" for n in range(width)]
        lines.append(f"a{level}: &a{level} {open_bracket}{', '.join(parts)}{close}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(),
        bomb("{", "}"),
        f"{bomb('{', '}')}\noptim: {{<<: *a8}}\n",
        "a: &a {x: 1}\n" + "\n".join(f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}' if n else '*a'] * 9)}]}}" for n in range(9)),
    ],
)
def test_aliases_that_stand_for_more_than_a_file_could_say_are_refused_at_once(text: str, tmp_path: Path) -> None:
    began = time.process_time()
    message = refusal(recipe=written(tmp_path, text))
    assert "mine.yaml: its aliases (`*name`) repeat 100,000 values: write out what is meant" in message
    assert refusal(f"optim={{{bomb().replace(chr(10), ', ')}}}").startswith("--set optim=")
    assert time.process_time() - began < 1


def test_aliases_may_repeat_what_an_experiment_repeats(tmp_path: Path) -> None:
    text = "base: digits\noptim: {losses: {task: &own {lr: 0.1, momentum: 0.5}, kd: *own}}\n"
    optim = load(written(tmp_path, text)).experiment.optim
    assert optim.losses["task"] == optim.losses["kd"]


def test_a_key_that_is_merged_into_a_mapping_is_from_the_line_that_wins(tmp_path: Path) -> None:
    kd, task = "    kd: &own {lr: 0.1, momentum: 0.5}\n", "    task:\n      <<: *own\n      lr: 0.2\n"
    path = written(tmp_path, f"base: digits\noptim:\n  losses:\n{kd}{task}")
    sources = load(path).sources
    assert sources["optim.losses.task.momentum"] == sources["optim.losses.kd.momentum"] == f"{path}:4:24"
    assert sources["optim.losses.task.lr"] == f"{path}:7:7"


def test_a_file_that_powershell_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes("base: digits  # é\r\nname: mine\r\n".encode("utf-16"))
    assert load(str(path)).experiment.name == "mine"


def test_a_file_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    assert refusal(recipe=str(path)) == f"{path}: larger than 16 MiB, as no experiment is: give a YAML file"


@pytest.mark.parametrize(
    "override",
    ["student.model={}", "{}=3", "data.shuffle={}", "distill.method={}", "sweep.metric={}", "distill.options.kd.{}=1", "{}"],
)
def test_a_message_quotes_the_beginning_and_the_end_of_what_is_long(override: str, tmp_path: Path) -> None:
    def cpu_s(long: str) -> float:
        began_s = time.process_time()
        message = refusal(override.format(long))
        taken_s = time.process_time() - began_s
        assert len(message) < 6500
        assert "k" * 20 in message or "k k" in message
        return taken_s

    for word in ("k", "k "):
        # The shorter of two: a garbage collection may come in between.
        short_s, long_s = (min(cpu_s(word * number + "end") for _ in range(2)) for number in (10_000, 80_000))
        assert long_s < 20 * short_s  # 8 times the length: a time that grew with its square would be 64 times as long


@pytest.mark.parametrize("text", ["1:30.5", "1:30", "0b11", "on", "-1:2.", ".", "+.", "1e", "._1", "e5"])
def test_what_yaml_1_2_takes_for_text_is_text(text: str) -> None:
    assert strict_yaml.parse(text, "here") == text
    assert strict_yaml.parse(strict_yaml.dump(text), "here") == text


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.5", 1.5), ("-.5", -0.5), ("1.", 1.0), ("1e-4", 1e-4), ("+1.5E3", 1500.0), (".inf", math.inf), ("-.Inf", -math.inf)],
)
def test_what_yaml_1_2_takes_for_a_number_is_one(text: str, number: float) -> None:
    assert strict_yaml.parse(text, "here") == number
    assert strict_yaml.parse(strict_yaml.dump(number), "here") == number
    assert math.isnan(strict_yaml.parse(strict_yaml.dump(math.nan), "here"))


def test_pythons_none_is_null_and_in_quotes_text() -> None:
    read = strict_yaml.parse("teacher: {cache: None, weights: null}\nname: 'None'\n", "here")
    assert read == {"teacher": {"cache": None, "weights": None}, "name": "None"}
    assert strict_yaml.parse(strict_yaml.dump(read), "here") == read


def test_merge_keys_of_yaml_may_repeat_what_they_merge(tmp_path: Path) -> None:
    assert strict_yaml.parse("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", "here")["b"] == {"x": 3, "y": 2}


def test_bases_that_lead_back_to_themselves_are_refused_however_they_are_written(tmp_path: Path) -> None:
    first = written(tmp_path, "base: second.yaml\n", "first.yaml")
    written(tmp_path, "base: first.yaml\n", "second.yaml")
    assert "`base` leads back to itself (first.yaml → second.yaml → first.yaml)" in refusal(recipe=first)
    itself = written(tmp_path / "sub", "base: ../sub/itself.yaml\n", "itself.yaml")
    assert "leads back to itself" in refusal(recipe=itself)


def test_a_folder_or_a_wrong_name_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    assert "is a folder: give a YAML file in it" in refusal(recipe=str(tmp_path))
    assert "did you mean digits?" in refusal(recipe="digit")
    assert "neither a recipe nor a file; recipes: backbone, cifar10, cifar100, deit_distilled, digits" in refusal(
        recipe=str(tmp_path / "nothing.yaml")
    )
    assert "neither a recipe nor a file" in refusal(recipe="x" * 5000)


# The space of a sweep


@pytest.mark.parametrize(
    "space",
    [
        "{optim.lr: [0.1, 0.2]}",
        "{data.loader_workers: {range: [2, 8, 2]}}",
        "{data.loader_workers: {range: [1, 4]}}",
        "{}",
    ],
)
def test_lists_and_ranges_make_a_grid(space: str) -> None:
    assert load("digits", [f"sweep.space={space}"]).experiment.sweep.policy == "grid"


@pytest.mark.parametrize(
    "spec", ["{uniform: [0.1, 1]}", "{loguniform: [1e-4, 1e-1]}", "{randint: [1, 4]}", "[1, 2]", "{range: [1, 3]}"]
)
def test_distributions_are_drawn_by_the_policy_random(spec: str) -> None:
    assert load("digits", ["sweep.policy=random", f"sweep.space={{optim.lr: {spec}}}"]).experiment.sweep.space


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("{optim.lr: []}", "the list is empty"),
        ("{optim.lr: 3}", "write a list, {range: [first, last, step]}, or one of uniform, loguniform, randint"),
        ("{optim.lr: {range: [1]}}", "write a list"),
        ("{optim.lr: {range: [1, true]}}", "write a list"),
        ("{optim.lr: {range: [1, .inf]}}", "write a list"),
        ("{optim.lr: {range: [3, 1]}}", "needs first ≤ last and step > 0"),
        ("{optim.lr: {range: [1, 3, 0]}}", "needs first ≤ last and step > 0"),
        ("{optim.lr: {range: [0, 1000000000]}}", "more than 10000: give it a larger step"),
        ("{optim.lr: {normal: [0, 1]}}", "write a list"),
        ("{optim.lr: {uniform: [1, 0]}}", "needs low ≤ high"),
        ("{optim.lr: {loguniform: [0, 1]}}", "low > 0"),
        ("{optim.lr: {uniform: [0, 1]}}", "set sweep.policy to random"),
        ("{opt.lr: [1]}", "opt.lr: no such key to search over; did you mean optim.lr?"),
        ("{sweep.steps: [1]}", "sweep.steps: no such key to search over"),
        ("{teacher.model: [resnet8]}", "one teacher is prepared and shared by all trials"),
        ("{assistants: [[]]}", "one teacher is prepared and shared by all trials"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(space: str, words: str) -> None:
    policy = ["sweep.policy=random"] if "needs low" in words or "low >" in words else []
    text = refusal(*policy, f"sweep.space={space}")
    assert words in text
    assert "sweep.space: " in text
    assert "\n" not in text


def test_a_metric_is_maximised_unless_less_is_better() -> None:
    for metric, mode in (("images_per_s", "max"), ("epoch_s", "min"), ("val_loss", "min"), ("phase/data_ms", "min")):
        assert load("digits", [f"sweep.metric={metric}"]).experiment.sweep.mode == mode


def test_a_run_that_is_only_read_may_break_a_rule_between_keys(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text("{base: digits, data: {val_resize: 7}}")
    assert read_resolved(file, reading=True).experiment.data.val_resize == 7
    with pytest.raises(ExperimentError, match=r"data\.val_resize 7 is below data\.image_size 8"):
        read_resolved(file)


# A teacher's cached logits


CACHE = "teacher.cache=/logits"


def test_what_a_cache_cannot_hold_is_refused_in_one_line() -> None:
    network = refusal(CACHE, "distill.method=srrl")
    assert "srrl needs the teacher's network with a linear classifier, which does not go with teacher.cache: write" in network
    assert "teacher.cache_top_k needs teacher.cache: write teacher.cache" in refusal("teacher.cache_top_k=5")
    assert "\n" not in network


@pytest.mark.parametrize("logits", [CACHE, "teacher.service=1"])
def test_logits_that_come_from_elsewhere_have_no_sharded_network(logits: str) -> None:
    text = refusal(logits, "teacher.placement=sharded")
    key = logits.partition("=")[0]
    assert f"{key} does not go with teacher.placement sharded" in text


def test_what_a_service_cannot_answer_is_refused_in_one_line() -> None:
    served = "teacher.service=1"
    problem = {
        refusal(
            served, "data.device_augment.mixup=0.2", "data.global_batch_size=64"
        ): "mixup or cutmix does not go with teacher.service",
        refusal(served, "distill.method=srrl"): "srrl needs the teacher's network with",
        refusal(served, CACHE): "teacher.cache does not go with teacher.service",
        refusal(served, "data.decoder=gpu", "data.augment=crop_flip"): "data.decoder gpu does not go with teacher.service",
        refusal("teacher.service=0"): "teacher.service",
    }
    assert all(part in line and "teacher" in line and "\n" not in line for line, part in problem.items()), problem
    assert load("digits", [served]).experiment.stage("student", Path("/"), {}).num_augmentation_epochs == 1


def test_mlflows_own_variable_names_the_store_where_the_experiment_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    resolved = load("digits")
    assert resolved.experiment.tracking.uri == "http://127.0.0.1:5000"
    assert resolved.sources["tracking.uri"] == "MLFLOW_TRACKING_URI"
    assert load("digits", ["tracking.uri=null"]).experiment.tracking.uri is None
    assert load("digits", ["tracking.uri=http://other:5000"]).experiment.tracking.uri == "http://other:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    assert load("digits", ["tracking.enabled=false"]).experiment.tracking.uri is None
    with pytest.raises(ExperimentError, match=r"MLFLOW_TRACKING_URI: tracking\.uri: 'mlruns' is not a store"):
        load("digits")


def test_methods_on_logits_may_read_a_cache_of_mixed_images_too() -> None:
    mixed = ["data.device_augment.mixup=0.2", "data.global_batch_size=64"]
    assert load("digits", [CACHE, *mixed]).experiment.written_cache("train") == Path("/logits")
    experiment = load("digits", [CACHE, "distill.method=[kd, dkd]", "teacher.cache_epochs=2"]).experiment
    assert experiment.teacher is not None
    assert experiment.teacher.cache_epochs == 2


def test_variables_in_paths_have_their_values_and_one_that_is_not_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.delenv("NO_DATA", raising=False)
    experiment = load("digits", ["data.path=$DATA", "teacher.cache=${DATA}/logits"]).experiment
    assert experiment.data.path == str(tmp_path)
    assert experiment.teacher is not None
    assert experiment.teacher.cache == str(tmp_path / "logits")
    says = "--set: $NO_DATA/logits: there is no environment variable $NO_DATA: set it, or write the whole path"
    assert refusal("teacher.cache=$NO_DATA/logits") == says


def test_paths_of_an_experiment_are_absolute_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("images", "digits", "home/images", "base"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("t.pth", "text.npy", "own.py", "net.py"):
        (tmp_path / file).touch()
    written(tmp_path / "base", "base: digits\nteacher: {cache: cache}\n", "base.yaml")
    text = """
        base: base/base.yaml
        data: {path: ~/images, stage: ~/stage}
        teacher: {model: "net.py:Net", args: {width: 6}, weights: t.pth, classes: text.npy}
        student: {model: "net.py:Net"}
        assistants: [{model: "net.py:Net"}]
        distill: {method: own.py:Own}
        tracking: {uri: "sqlite:///mlflow.db"}
        sweep: {space: {data.path: [images, digits, ./digits]}}
    """
    path = written(tmp_path, textwrap.dedent(text))
    experiment = load(path, method_files="ignore").experiment
    assert experiment.data.path == f"{tmp_path}/home/images"
    assert experiment.data.stage == f"{tmp_path}/home/stage"
    assert experiment.teacher is not None
    assert (experiment.teacher.model, experiment.student.model) == (f"{tmp_path}/net.py:Net(width=6)", f"{tmp_path}/net.py:Net")
    assert experiment.assistants[0].model == f"{tmp_path}/net.py:Net"
    assert (experiment.teacher.weights, experiment.teacher.cache) == (f"{tmp_path}/t.pth", f"{tmp_path}/cache")
    assert experiment.teacher.classes == f"{tmp_path}/text.npy"
    assert experiment.distill.method == (f"{tmp_path}/own.py:Own",)
    assert experiment.tracking.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert experiment.sweep.space == {"data.path": [f"{tmp_path}/images", "digits", f"{tmp_path}/digits"]}
    teachers = "teachers=[{model: mlp_small, weights: t.pth, classes: text.npy}, {model: mlp_small, weights: DEFAULT}]"
    several = load("digits", ["teacher=null", teachers]).experiment.teachers
    assert [each.weights for each in several] == [f"{tmp_path}/t.pth", "DEFAULT"]
    assert [each.classes for each in several] == [f"{tmp_path}/text.npy", None]
    (tmp_path / "net.py").unlink()
    with pytest.raises(ExperimentError, match=r"student\.model: .*net\.py cannot be read \(No such file or directory\)"):
        load("digits", ["student.model=net.py:Net"])


@pytest.mark.parametrize(("student", "size"), [("resnet18", 224), ("inception_v3", 299), ("resnet20", 32), ("convnet_small", 8)])
def test_crops_of_image_files_have_the_size_that_the_student_is_made_for(tmp_path: Path, student: str, size: int) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"data: {{path: {tmp_path}}}\nstudent: {{model: {student}}}\n")
    resolved = load(str(file))
    assert resolved.experiment.data.image_size == size
    assert resolved.sources.get("data.image_size") == (None if student == "convnet_small" else f"{student}'s own")
    assert load(str(file), ["data.image_size=64"]).experiment.data.image_size == 64
    assert load("digits").experiment.data.image_size == 8


def test_the_folder_of_a_models_name_is_absolute() -> None:
    names = {"student.model": "local-dir:models/a", "student.weights": "local-dir:models/b"}
    assert absolute_paths(names) == {key: f"local-dir:{Path.cwd() / name.partition(':')[2]}" for key, name in names.items()}
    assert absolute_paths({"student.model": "resnet18"}) == {}
