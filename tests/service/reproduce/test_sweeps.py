"""What a part of a table comes to: its sweeps, its points, and what the command line may change."""

from pathlib import Path

import pytest

from service.config.experiment import load
from service.reproduce.sweeps import PlannedSweep, Request, changes, compose
from service.reproduce.table import Table, read_table
from service.sweeps.trials import plan_trials
from tests.service.commands import run
from tests.service.reproduce.test_table import SMALL
from trainables.errors import ExperimentError


@pytest.fixture(scope="module")
def cifar100() -> Table:
    return read_table("cifar100")


def parts(
    table: Table,
    pairs: str,
    methods: str | None = None,
    seeds: str = "0",
    sets: tuple[str, ...] = (),
    teachers: Path | None = None,
) -> list[PlannedSweep]:
    return compose(table, Request.of(table, pairs, methods, seeds), sets, None, teachers)


def test_students_alone_are_one_sweep_and_each_teacher_is_another(cifar100: Table) -> None:
    found = parts(cifar100, "resnet56-resnet20,resnet110-resnet20,resnet110-resnet32", "student,kd", "3,4")
    assert [(part.name, part.teacher, len(part.resolved.experiment.sweep.points)) for part in found] == [
        ("students", None, 4),
        ("teacher-resnet56", "resnet56", 2),
        ("teacher-resnet110", "resnet110", 4),
    ]
    assert found[2].rows == {("resnet20", "kd"): range(2), ("resnet32", "kd"): range(2, 4)}
    assert found[0].resolved.experiment.teacher is None
    assert [part.num_runs for part in found] == [4, 3, 5]
    assert found[1].num_epochs == 3 * 240


def test_a_warm_up_stage_counts_among_the_epochs(cifar100: Table) -> None:
    assert parts(cifar100, "resnet56-resnet20", "ab")[0].num_epochs == 240 + 30 + 240


def test_a_cell_has_the_settings_of_its_student_its_column_and_its_pair(cifar100: Table) -> None:
    (part,) = parts(cifar100, "vgg13_cifar-mobilenetv2_half_cifar", "dkd")
    (trial,) = plan_trials(part.resolved)
    assert trial.resolved is not None
    experiment = trial.resolved.experiment
    assert experiment.student.model == "mobilenetv2_half_cifar"
    assert (experiment.optim.lr, experiment.optim.epochs, experiment.optim.milestones) == (0.01, 240, (150, 180, 210))
    assert experiment.distill.options["dkd"] == {
        "weight": 1.0,
        "alpha": 1.0,
        "beta": 6.0,
        "temperature": 4.0,
        "warmup_epochs": 20.0,
        "warmup_by": "epoch_from_1",
    }
    assert part.resolved.experiment.optim.lr == 0.05  # the teacher's


def test_what_is_set_counts_more_than_the_table(cifar100: Table) -> None:
    (part,) = parts(cifar100, "vgg13_cifar-mobilenetv2_half_cifar", "dkd", sets=("optim.lr=0.2", "optim.epochs=2"))
    (trial,) = plan_trials(part.resolved)
    assert trial.resolved is not None
    assert (trial.resolved.experiment.optim.lr, trial.resolved.experiment.optim.epochs) == (0.2, 2)


def test_what_makes_another_training_is_distinguished_from_what_only_runs_faster() -> None:
    assert changes(["data.loader_workers=4", "tracking.enabled=false", "sweep.max_concurrent=8", "train.compile=true"]) == ()
    assert changes(["optim.epochs=2", "precision=bf16", "scale.num_workers=2"]) == (
        "optim.epochs",
        "precision",
        "scale.num_workers",
    )


@pytest.mark.parametrize("key", ["teacher.model", "student.model", "distill.method", "seed", "sweep.space", "sweep.metric"])
def test_what_the_table_decides_cannot_be_set(key: str) -> None:
    with pytest.raises(ExperimentError, match="the table decides it"):
        changes([f"{key}=1"])


@pytest.mark.parametrize(
    ("pairs", "methods", "seeds", "message"),
    [
        ("resnet56-resnet2", None, "0", "did you mean resnet56-resnet20?"),
        (None, "ddk", "0", "did you mean dkd?"),
        (None, None, "0,a", "write numbers"),
        (None, None, "-1", "write numbers from 0"),
        ("wrn_40_2-wrn_40_1", "fsp", "0", "no number of it"),
    ],
)
def test_what_the_table_does_not_have_is_refused(
    cifar100: Table, pairs: str | None, methods: str | None, seeds: str, message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        Request.of(cifar100, pairs, methods, seeds)
    assert message in str(caught.value)


def test_published_checkpoints_are_found_by_their_folders(cifar100: Table, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"no resnet56_vanilla/ckpt_epoch_240\.pth"):
        parts(cifar100, "resnet56-resnet20", "kd", teachers=tmp_path)
    path = tmp_path / "resnet56_vanilla" / "ckpt_epoch_240.pth"
    path.parent.mkdir()
    path.touch()
    (part,) = parts(cifar100, "resnet56-resnet20", "kd", teachers=tmp_path)
    assert part.resolved.experiment.teacher is not None
    assert part.resolved.experiment.teacher.weights == str(path)
    assert part.num_runs == 1


def test_listed_points_are_a_sweeps_trials_and_a_space_in_addition_is_refused() -> None:
    points = "sweep.points=[{seed: 1, optim.lr: 0.1}, {seed: 2}]"
    resolved = load("digits", ["sweep.space={}", points])
    assert [trial.params for trial in plan_trials(resolved)] == [{"seed": 1, "optim.lr": 0.1}, {"seed": 2}]
    assert resolved.experiment.sweep.axes == {"seed": [1, 2], "optim.lr": [0.1]}
    with pytest.raises(ExperimentError, match=r"write sweep.space: \{\}"):
        load("digits", [points])
    with pytest.raises(ExperimentError, match=r"no such key to search over; did you mean optim\.lr"):
        load("digits", ["sweep.space={}", "sweep.points=[{optim.lrr: 0.1}]"])
    with pytest.raises(ExperimentError, match="one teacher is prepared"):
        load("digits", ["sweep.space={}", "sweep.points=[{teacher.model: mlp_large}]"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "{method: kd}",
            "{method: kd, options: {kd: {weigth: 0.9}}}",
            "pairs.large-small.kd of the table: distill.options.kd.weigth: no such key; did you mean weight?",
        ),
        (
            "top1_pct: {kd: 98}",
            "top1_pct: {kd: 98}, settings: {kd: {distill: {options: {kd: {weight: much}}}}}",
            'pairs.large-small.kd of the table: distill.options.kd.weight: must be a number, not "much"',
        ),
        (
            "{top1_pct: 97}",
            "{top1_pct: 97, settings: {optim: {lrr: 0.1}}}",
            "pairs.large-small.student of the table: optim.lrr: no such key; did you mean optim.lr?",
        ),
        ("{method: kd}", "{method: kdd}", "pairs.large-small.kd of the table: distill.method: there is no method 'kdd'"),
    ],
)
def test_a_cells_wrong_setting_is_one_line_before_a_plan_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, before: str, after: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace(before, after))
    code, out, err = run(capsys, "reproduce", path, "--dry-run")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, message, _ = run(
        capsys,
        "reproduce",
        "cifar100",
        "--pairs",
        "resnet56-resnet20",
        "--methods",
        "kd,dkd",
        "--runs",
        tmp_path / "runs",
        "--dry-run",
    )
    assert code == 0
    assert "resnet56: trained first" in message
    assert "7 runs, 1,680 epochs of 50,000 images" in message
    assert not (tmp_path / "runs").exists()
