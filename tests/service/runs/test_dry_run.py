"""What does not fit together is found before anything is trained, whichever point or stage of the experiment it is in."""

import sys
from pathlib import Path

import psutil
import pytest

from service.config.experiment import Resolved, load
from service.runs.dry_run import training_lengths
from service.runs.preflight import check_train
from service.sweeps.preflight import check_sweep, mark_unbuildable
from service.sweeps.trials import plan_trials
from tests.trainables.methods import own_methods
from trainables.errors import ExperimentError
from trainables.notices import notices_to
from trainables.rules import parts_have_several_images

OWN = Path(own_methods.__file__)
SMALL = ("data.image_size=16", "student.model=resnet8", "teacher.model=resnet14")


def small(*overrides: str) -> Resolved:
    return load("digits", [*SMALL, *overrides])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["student.model=mlp_small", "distill.method=fitnet"], "model mlp_small has no stage2: its stages are not declared"),
        (["teacher.model=mlp_small", "distill.method=fitnet"], "model mlp_small has no stage2"),
        (["teacher.model=wrn_16_2", "distill.method=kdsvd"], "kdsvd needs maps with equal channels, but the student's has 16"),
        (["distill.options={at: {student_taps: [stage1]}}", "distill.method=at"], "the student has 1 maps, the teacher 3"),
        (["distill.method=simkd", "teacher.model=mlp_small"], "model mlp_small has no unpooled"),
        ([f"distill.method={OWN}:UndeclaredNorm"], "UndeclaredNorm has its own batch norms: declare requires = Requirements("),
        (
            ["distill.method=[ab, ft]", "distill.options={ft: {init_lr: 0.1}}"],
            "distill.options: ab and ft share one init stage, but have init_lr None and 0.1: set the same value for each",
        ),
        (
            ["teacher.cache=kept", "teacher.cache_top_k=3", "distill.method=dkd"],
            "it keeps 3 of 10 classes apart, and dkd looks",
        ),
        (
            ["teacher.cache=kept", "teacher.cache_top_k=3", "distill.options.kd.standardize=true"],
            "teacher.cache_top_k: it keeps 3 of 10 classes apart, and distill.options.kd.standardize looks at each",
        ),
        (
            ["distill.method=dml", "distill.options={dml: {peer: nothing}}"],
            "distill.options.dml.peer: there is no model 'nothing'",
        ),
        (
            ["optim.name=AdamW"],
            "optim.name: there is no AdamW: did you mean adamw?",
        ),
        (
            ["assistants=[{model: resnet8, epochs: 5}]", "optim.losses={kd: {warmup_epochs: 8}}"],
            "optim.losses.kd.warmup_epochs 8 leaves no epoch of optim.epochs 5",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_teacher_is_trained(overrides: list[str], words: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        check_train(small(*overrides))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("method", ["ft", "fsp"])
def test_an_init_stage_has_no_end_of_a_schedule(method: str) -> None:
    init = ["distill.method=" + method, "distill.options={" + method + ": {init_epochs: 2}}"]
    check_train(small(*init, "optim.min_lr_factor=0.1", "optim.cooldown_epochs=1"))


def test_ab_trains_students_without_batch_norms() -> None:
    check_train(load("digits", ["distill.method=ab", "distill.options={ab: {init_epochs: 1}}"]))


def test_unit_wise_clipping_without_timm_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.utils.agc", None)  # Python's own way to mark a module as not importable
    with pytest.raises(ExperimentError, match=r"optim.clip_grad_agc: timm is not installed: run `pip install"):
        check_train(small("optim.clip_grad_agc=0.3712"))  # a value of its own: what was checked is remembered


@pytest.mark.parametrize("key", ["teacher.service=1", "teacher.cache=kept"])
def test_a_teacher_that_answers_with_logits_has_no_classifier_to_give(key: str) -> None:
    with pytest.raises(ExperimentError, match=r"teacher\.\w+ does not go with student.model resnet8\+resnet14"):
        small("student.model=resnet8+resnet14", key)


def test_as_many_logits_cached_as_there_are_classes_are_enough_for_every_method() -> None:
    cached = ["teacher.cache=kept", "teacher.cache_top_k=10"]
    check_train(small(*cached, "distill.method=[kd, dkd]", "distill.options={kd: {standardize: true}}"))


def test_a_method_of_ones_own_that_cannot_be_built_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from trainables.methods.contract import Method\n\nclass Own(Method):\n    terms = ('own',)\n\n"
        "    def __init__(self, options, setting):\n        super().__init__(options, setting)\n"
        "        setting.student.shapes[0]\n"
    )
    with pytest.raises(ExperimentError) as refused:
        check_train(small(f"distill.method={tmp_path}/own.py:Own"))
    message = "distill.method: Own cannot be built for these models (IndexError: tuple index out of range)"
    assert str(refused.value) == message


@pytest.mark.parametrize("kind", ["train", "sweep"])
def test_an_assistant_that_does_not_fit_is_refused_as_the_student_would_be(kind: str) -> None:
    chain = small("assistants=[{model: mlp_small}]", "distill.method=at", "sweep.space={seed: [1]}")
    with pytest.raises(ExperimentError, match="model mlp_small has no stages: its stages are not declared"):
        (check_train if kind == "train" else check_sweep)(chain)


def test_points_of_a_sweep_that_do_not_fit_are_rows_with_a_reason_and_the_others_run() -> None:
    space = "sweep.space={student.model: [mlp_small, resnet8], distill.method: [kd, at, kdsvd], data.image_size: [8, 16]}"
    resolved = small("teacher.model=wrn_16_2", space)
    check_sweep(resolved)
    trials = plan_trials(resolved)
    mark_unbuildable(trials)
    reasons = {tuple(trial.params.values()): trial.outcome.reason if trial.outcome else "" for trial in trials}
    for size in (8, 16):
        assert reasons["mlp_small", "kd", size] == reasons["resnet8", "kd", size] == reasons["resnet8", "at", size] == ""
        assert "mlp_small has no stages" in reasons["mlp_small", "at", size]
        assert "maps with equal channels" in reasons["resnet8", "kdsvd", size]


def test_a_point_whose_batch_is_larger_than_the_data_is_a_row_with_a_reason_before_a_worker_starts() -> None:
    resolved = small("sweep.space={data.global_batch_size: [64, 4096], data.last_batch: [drop, short]}")
    _, data = check_sweep(resolved)
    trials = plan_trials(resolved)
    mark_unbuildable(trials, data)
    outcomes = {tuple(trial.params.values()): trial.outcome for trial in trials}
    assert {point for point, outcome in outcomes.items() if outcome is not None} == {(4096, "drop")}
    outcome = outcomes[4096, "drop"]
    assert outcome is not None
    assert outcome.status == "infeasible"
    assert outcome.reason.startswith(
        "data.global_batch_size: 4096 is more than the 1442 training images of digits; write at most"
    )


def test_points_whose_optimizer_cannot_be_built_are_rows_with_a_reason() -> None:
    trials = plan_trials(small("sweep.space={optim.name: [adamw, adamm], optim.args: [{}, {betas: [0.9]}]}"))
    mark_unbuildable(trials)
    reasons = [trial.outcome.reason if trial.outcome else "" for trial in trials]
    assert [reason.partition(" (")[0] for reason in reasons] == [
        "",
        "optim.args: adamw does not work with these",
        "optim.name: there is no adamm: did you mean adam?",
        "optim.name: there is no adamm: did you mean adam?",
    ]


@pytest.mark.skipif(psutil.virtual_memory().total > 48e9, reason="this machine has the memory that the test means to exceed")
def test_a_point_that_is_too_large_for_this_machine_may_not_be_for_the_clusters() -> None:
    trials = plan_trials(load("digits", ["student.model=mlp_large", "sweep.space={data.image_size: [4096]}"]))
    mark_unbuildable(trials)
    assert trials[0].outcome is None


def test_a_sweep_of_which_no_point_fits_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"none of its 2 points can run; the first: .*: kdsvd needs maps"):
        check_sweep(small("teacher.model=wrn_16_2", "distill.method=kdsvd", "sweep.space={seed: [1, 2]}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.global_batch_size=2", "scale.num_workers=2"],
            "data.global_batch_size 2 gives a worker or micro-batch a single image: write at least 4;"
            " the batch norm of resnet18 cannot normalize one image",
        ),
        (
            ["data.global_batch_size=11", "data.last_batch=short"],
            "data.last_batch short gives a worker or micro-batch a single image of the last batch, which has 1 of 1442: "
            "write drop, or another data.global_batch_size; the batch norm of resnet18 cannot normalize one image",
        ),
    ],
)
def test_a_batch_norm_that_would_get_a_single_image_is_refused_before_a_teacher_is_trained(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ExperimentError) as refused:
        check_train(small("student.model=resnet18", *overrides))
    assert str(refused.value) == message
    check_train(small("student.model=resnet8", *overrides))  # whose maps have several positions
    check_train(small("student.model=resnet18", "scale.sync_batch_norm=true", *overrides[:1], "data.last_batch=drop"))


@pytest.mark.parametrize(
    ("num_images", "overrides", "refuses"),
    [
        (17, ["data.global_batch_size=8"], False),
        (17, ["data.global_batch_size=8", "data.last_batch=short"], True),
        (19, ["data.global_batch_size=8", "data.last_batch=short", "scale.num_workers=2"], True),  # 2 images and 1
        (20, ["data.global_batch_size=8", "data.last_batch=short", "scale.num_workers=2"], False),
        (20, ["data.global_batch_size=8", "data.last_batch=short", "scale.num_workers=2", "optim.accumulate=2"], True),
        (5, ["data.global_batch_size=8", "data.last_batch=short"], False),  # the only batch is the last one
    ],
)
def test_parts_of_one_image_are_those_that_the_workers_get(num_images: int, overrides: list[str], refuses: bool) -> None:
    assert (parts_have_several_images(small(*overrides).experiment, num_images) is not None) == refuses


TWO_CLASSES = ("data.path=synthetic", "data.synthetic_classes=2", "data.synthetic_images=200")


def test_standardised_logits_of_two_classes_are_refused() -> None:
    with pytest.raises(ExperimentError, match=r"^distill\.options\.kd\.standardize: .* two classes .*: write false$"):
        check_train(small(*TWO_CLASSES, "distill.options.kd.standardize=true"))


def test_what_a_method_cannot_teach_of_two_classes_is_a_notice() -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        check_train(small(*TWO_CLASSES, "distill.method=dkd"))
    assert lines == ["distill.method: dkd with two classes: nckd is 0, so only its other term teaches the student"]


def test_a_run_says_how_long_each_of_its_trainings_is() -> None:
    overrides = ["data.last_batch=short", "distill.method=[kd, ft]", "distill.options.ft.init_epochs=2", "train.until_s=60"]
    assert list(training_lengths(small(*overrides).experiment)) == [
        "teacher: 12 epochs of 1,442 images: 276 steps of 64",
        "student-init: 2 epochs of 1,442 images: 46 steps of 64",
        "student: at most 12 epochs of 1,442 images: 276 steps of 64",
    ]
    assert list(training_lengths(small("train.max_steps=50").experiment)) == ["student: 53 steps of 64 images, to time them"]
    auto = list(training_lengths(small("data.global_batch_size=auto").experiment))
    assert auto[0] == "batch: decided when the training begins; with the smallest that is tried, 8:"
    assert auto[2] == "student: 12 epochs of 1,440 images: 2,160 steps of 8"
    mixed = small("data.more=[{path: digits, share: 0.5, labels: true}]").experiment
    assert list(training_lengths(mixed))[-1] == "student: 12 epochs of 2,880 images: 540 steps of 64"
