"""A teacher of other classes than the data's is fine-tuned on these first, where a method reads its logits: decided once."""

from pathlib import Path

import pytest

from service.config.experiment import Resolved, load, read_resolved
from service.report import end_of_run
from service.runs.finetuning import OTHER_CLASSES, with_finetuning
from service.runs.preflight import check_train
from service.runs.run_directory import begin_run, check_same
from service.runs.session import open_session
from service.runs.stages.run_stages import untrained_teacher
from service.runs.teacher_cache import fill_cache
from tests.trainables.jobs import train, write_teacher
from trainables.distributed.group import Group
from trainables.engine import checkpoint
from trainables.errors import CheckpointError, DistillError, ExperimentError
from trainables.models.model_input import teacher_input
from trainables.notices import notices_to
from trainables.rundir import RunDir

DIGITS = tuple("0123456789")


def teacher_of(path: Path, classes: tuple[str, ...]) -> str:
    """A checkpoint of ours of these classes."""
    write_teacher(path, num_classes=len(classes))
    tensors, about = checkpoint.read(path)
    checkpoint.write_tensors(path, tensors, {**about, "classes": classes, "mean": [0.1] * 3, "std": [0.9] * 3})
    return str(path)


def experiment(weights: str, *overrides: str) -> Resolved:
    return load("digits", [f"teacher={{model: mlp_large, weights: {weights}}}", "tracking.enabled=false", *overrides])


def decided(resolved: Resolved) -> tuple[bool | None, list[str]]:
    """The `teacher.finetune`, and the notices of it."""
    lines: list[str] = []
    with notices_to(lines.append):
        teacher = with_finetuning(resolved, DIGITS).experiment.teacher
    assert teacher is not None
    return teacher.finetune, lines


@pytest.mark.parametrize("classes", [tuple("abcdefghijkl"), (*"012345678", "ten")])
def test_a_teacher_of_other_classes_is_fine_tuned_and_one_line_says_so(tmp_path: Path, classes: tuple[str, ...]) -> None:
    resolved = experiment(teacher_of(tmp_path / "t.safetensors", classes), "teacher.epochs=3", "teacher.lr=0.01")
    finetune, lines = decided(resolved)
    assert finetune is True
    assert lines == [
        f"teacher mlp_large: its {len(classes)} classes are not the data's: it is fine-tuned on the data's 10 classes before it "
        "teaches, for 3 epochs with learning rate 0.01 (teacher.epochs, teacher.lr)"
    ]
    assert with_finetuning(resolved, DIGITS).sources["teacher.finetune"] == OTHER_CLASSES


def test_a_teacher_is_fine_tuned_without_the_images_that_have_no_labels(tmp_path: Path) -> None:
    more = "data.more=[{path: digits, share: 0.25, labels: false}]"
    resolved = experiment(teacher_of(tmp_path / "t.safetensors", tuple("abc")), more, "teacher.epochs=1", "optim.warmup_epochs=0")
    assert "is fine-tuned on the data's 10 classes, without data.more, before it teaches" in decided(resolved)[1][0]
    job = with_finetuning(resolved, DIGITS).experiment.stage("teacher", tmp_path / "teacher", {"run": "r"})
    job = job.model_copy(update={"data": job.data.model_copy(update={"loader_workers": 0})})
    assert train(Group(), job)["progress"].epoch == 1


def test_a_teacher_of_the_datas_classes_teaches_as_it_is(tmp_path: Path) -> None:
    weights = teacher_of(tmp_path / "t.safetensors", (*reversed(DIGITS), "ten"))
    assert decided(experiment(weights))[0] is None
    finetune, lines = decided(experiment(weights, "teacher.lr_head=1"))
    assert finetune is None
    assert lines[-1].startswith("teacher.lr_head: the teacher is not trained")
    finetune, lines = decided(experiment(weights, "teacher.finetune=true"))
    assert finetune is True
    assert lines == [
        "teacher mlp_large: it is fine-tuned on the data's 10 classes before it teaches, for 12 epochs with learning rate "
        "0.05 (teacher.epochs, teacher.lr)"
    ]


def test_methods_on_features_need_no_fine_tuned_teacher_but_those_of_a_sweep_may(tmp_path: Path) -> None:
    weights = teacher_of(tmp_path / "t.safetensors", ("a", "b"))
    assert decided(experiment(weights, "distill.method=sp"))[0] is None
    assert decided(experiment(weights, "distill.method=sp", "sweep.space={distill.method: [sp, dkd]}"))[0] is True
    assert decided(experiment(weights, "distill.method=dml"))[0] is None
    assert decided(experiment(weights, "distill.method=dml", "teacher.finetune=true"))[1] == []  # nothing reads it


def test_names_that_do_not_tell_the_classes_are_refused_unless_it_is_to_be_fine_tuned(tmp_path: Path) -> None:
    """1000 numbers that were sorted as text are ImageNet's classes in another order, and no others."""
    resolved = load("imagenet_r34_r18", ["tracking.enabled=false"])
    classes = tuple(sorted(map(str, range(1000))))
    with pytest.raises(CheckpointError, match="has its classes in another order"):
        with_finetuning(resolved, classes)
    written = resolved.override({"teacher.finetune": True}, "test")
    assert with_finetuning(written, classes) == written


def test_a_run_goes_on_as_it_has_decided_whatever_file_is_there_then(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    resolved = experiment(teacher_of(path, ("a", "b")))
    run_dir = RunDir(tmp_path / "run")
    begin_run(with_finetuning(resolved, DIGITS), "train", run_dir, tmp_path)
    teacher_of(path, DIGITS)
    begun = read_resolved(run_dir.experiment)
    assert begun.experiment.trained_before == ["teacher"]
    assert decided(begun)[0] is True
    check_same("train", resolved, run_dir.root)  # `train … --continue` with the file of before
    with pytest.raises(DistillError, match=r"another teacher\.lr"):
        check_same("train", experiment(str(path), "teacher.lr=1"), run_dir.root)


def test_the_stage_begins_with_the_weights_and_what_comes_after_it_takes_its_checkpoint(tmp_path: Path) -> None:
    sets = (
        "teacher.lr=0.01",
        "teacher.lr_head=0.1",
        "optim.lr_head=0.3",
        "optim.layer_decay=0.5",
        "teacher.weights_key=model",
        "optim.losses={task: {lr: 2, momentum: 0.5}}",
    )
    made = with_finetuning(experiment(teacher_of(tmp_path / "t.safetensors", ("a", "b")), "teacher.finetune=true", *sets), DIGITS)
    stage = made.experiment.stage("teacher", tmp_path, {})
    assert stage.weights is not None
    assert (stage.weights, stage.weights_key) == (str(tmp_path / "t.safetensors"), "model")
    assert (stage.optim.for_loss("task").lr, stage.optim.lr_head, stage.optim.layer_decay) == (0.01, 0.1, None)
    student = made.experiment.stage("student", tmp_path, {}, "best.safetensors")
    assert student.teacher is not None
    assert (student.teacher.weights, student.teacher.weights_key, student.teacher.finetune) == ("best.safetensors", None, None)
    assert not made.experiment.measures_teacher("student")  # its training has


def test_a_teacher_with_class_means_is_a_stage_of_its_own_and_not_fine_tuned(tmp_path: Path) -> None:
    weights = teacher_of(tmp_path / "t.safetensors", ("a", "b"))
    head, more = ("teacher.head=class_means", "teacher.logit_scale=20"), "data.more=[{path: digits, share: 0.25}]"
    made = experiment(weights, *head, more)
    assert decided(made) == (
        None,
        [
            "teacher mlp_large: its classifier is the mean feature of each of the data's 10 classes, computed from the training "
            "images before it teaches (teacher.head)"
        ],
    )
    assert made.experiment.trained_before == []
    stage = made.experiment.stage("teacher", tmp_path, {})
    assert (stage.weights, stage.data.more, stage.finetuned) == (weights, (), made.experiment.teacher)
    student = made.experiment.stage("student", tmp_path, {}, "best.safetensors").teacher
    assert student is not None
    assert (student.weights, student.head, student.logit_scale) == ("best.safetensors", None, None)
    assert made.experiment.measures_teacher("student")
    check_train(experiment(weights, *head))
    with pytest.raises(ExperimentError, match=r"^teacher.head: no distill.method reads the teacher's logits: leave it out$"):
        check_train(experiment(weights, *head, "distill.method=sp"))
    with pytest.raises(DistillError, match="not trained on these classes yet"):
        fill_cache(experiment(weights, *head, f"teacher.cache={tmp_path}"), tmp_path / "runs")


@pytest.mark.parametrize("head", ["null", "class_means"])
def test_a_timing_run_times_an_untrained_teacher_of_the_same_input(tmp_path: Path, head: str) -> None:
    sets = ("train.max_steps=5", f"teacher.head={head}")
    resolved = with_finetuning(experiment(teacher_of(tmp_path / "t.safetensors", ("a", "b")), *sets), DIGITS)
    run_dir = RunDir(tmp_path / "run")
    begin_run(resolved, "train", run_dir, tmp_path)
    with open_session(resolved, run_dir, end_of_run) as session:
        weights = untrained_teacher(session)
    student, teacher = resolved.experiment.stage("student", tmp_path, {}, weights), resolved.experiment.teacher
    assert student.teacher is not None
    assert teacher is not None
    assert teacher_input(student.teacher, student.data) == teacher_input(teacher, student.data)
    assert teacher_input(teacher, student.data).mean == (0.1, 0.1, 0.1)


def test_a_cache_is_not_filled_by_a_teacher_that_is_still_to_be_fine_tuned(tmp_path: Path) -> None:
    weights = teacher_of(tmp_path / "t.safetensors", (*DIGITS, "ten"))
    cached = experiment(weights, "teacher.finetune=true", f"teacher.cache={tmp_path}")
    with pytest.raises(DistillError, match="not trained on these classes yet"):
        fill_cache(cached, tmp_path / "runs")


def test_a_teacher_that_may_not_be_fine_tuned_is_refused(tmp_path: Path) -> None:
    weights = teacher_of(tmp_path / "t.safetensors", ("a", "b"))
    with pytest.raises(DistillError, match="has 2 classes, none of them '0'"):
        check_train(experiment(weights, "teacher.finetune=false"))
