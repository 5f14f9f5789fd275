"""What the finished trials of a table's sweeps come to."""

import math
from pathlib import Path

import pytest

from service.reproduce.run_table import Reproduction, TeacherAccuracy, cells, check_begun, prepare, teachers_of
from service.reproduce.sweeps import Request, changes, compose
from service.reproduce.table import read_table
from service.reproduce.verdict import MeanAccuracy
from service.runs.run_directory import begin_run
from tests.run_log import change, write_log
from tests.service.commands import run
from tests.service.report.runs import typed, typed_row
from tests.service.reproduce.test_table import SMALL
from trainables.errors import DataError, ExperimentError


def test_a_cell_is_judged_by_the_runs_that_its_own_number_is_the_mean_of(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("top1_pct: {kd: 98}", "top1_pct: {kd: 98}, num_runs: {us: 4}"))
    table = read_table(str(path))
    request = Request.of(table, None, "kd", "0,1")
    job = Reproduction(table, request, compose(table, request, [], None, None), (), tmp_path / "out", tmp_path)
    run_dir = job.run_dir(job.sweeps[0])
    run_dir.root.mkdir(parents=True)
    rows = [
        typed_row({"id": f"00{seed}", "status": "ok", "metrics": {"top1_pct": top1_pct, "best_top1_pct": top1_pct}})
        for seed, top1_pct in enumerate([96.0, 100.0])
    ]
    write_log(run_dir, typed({"trials": rows}))
    (cell,) = cells(job)
    assert cell.verdict.tolerance == 2 * table.tolerance_pct  # 2·√8·√(1/2 + 1/4) = 4.90, which twice the least bounds
    rows[1].metrics.update(top1_pct=98.0, best_top1_pct=98.0)
    write_log(run_dir, typed({"trials": rows}))
    assert cells(job)[0].verdict.tolerance == 2 * math.sqrt(2) * math.sqrt(1 / 2 + 1 / 4)


@pytest.mark.parametrize(("epoch", "ours"), [("last", 96.0), ("best", 99.0)])
def test_the_epoch_that_was_published_is_the_one_compared(epoch: str, ours: float, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("epoch: last", f"epoch: {epoch}"))
    table = read_table(str(path))
    request = Request.of(table, None, "kd", "0")
    job = Reproduction(table, request, compose(table, request, [], None, None), (), tmp_path / "out", tmp_path)
    run_dir = job.run_dir(job.sweeps[0])
    run_dir.root.mkdir(parents=True)
    row = typed_row({"id": "000", "status": "ok", "metrics": {"top1_pct": 96.0, "best_top1_pct": 99.0}})
    write_log(run_dir, typed({"trials": [row]}))
    (cell,) = cells(job)
    assert cell.verdict.ours == MeanAccuracy(ours, None, 1)
    assert cell.verdict.difference == ours - 98


def test_a_teacher_is_as_accurate_as_its_own_training_or_else_the_first_trial_found_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("checkpoint: large.pth", "weights: large.safetensors"))
    table = read_table(str(path))
    request = Request.of(table, None, "kd", "0")
    job = Reproduction(table, request, compose(table, request, [], None, None), (), tmp_path / "out", tmp_path)
    run_dir = job.run_dir(job.sweeps[0])
    run_dir.root.mkdir(parents=True)
    assert teachers_of(job) == {"convnet_large": None}
    rows = [typed_row({"id": "000", "status": "ok", "metrics": {"top1_pct": 95.0, "teacher_top1_pct": 97.0}})]
    write_log(run_dir, typed({"trials": rows}))
    assert teachers_of(job) == {"convnet_large": TeacherAccuracy(97.0, "large.safetensors")}
    stage = {"stage": "teacher", "model": "convnet_large", "status": "ok", "checkpoint": "teacher/best.safetensors"}
    write_log(run_dir, typed({"trials": rows, "stages": [{**stage, "metrics": {"best_top1_pct": 98.5}}]}))
    assert teachers_of(job) == {"convnet_large": TeacherAccuracy(98.5, "teacher/best.safetensors")}


def test_without_out_a_plan_is_of_a_folder_of_its_own_whatever_an_earlier_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL)
    table = read_table(str(path))
    request = Request.of(table, None, None, "7")
    earlier = Reproduction(table, request, compose(table, request, [], None, None), (), tmp_path / "reproduce-mine", tmp_path)
    for part in earlier.sweeps:
        begin_run(part.resolved, "sweep", earlier.run_dir(part), tmp_path)
    monkeypatch.setenv("RAYDISTILL_RUNS", str(tmp_path))
    assert run(capsys, "reproduce", path, "--seeds", "0", "--dry-run")[0] == 0
    assert run(capsys, "reproduce", path, "--seeds", "0", "--dry-run", "--out", earlier.out)[0] == 2


def test_a_reproduction_does_not_go_on_with_other_data_than_it_was_begun_with(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL)
    table = read_table(str(path))
    request = Request.of(table, None, "student", "0")
    job = Reproduction(table, request, compose(table, request, [], None, None), (), tmp_path / "out", tmp_path)
    (planned,) = job.sweeps
    begin_run(planned.resolved, "sweep", run_dir := job.run_dir(planned), tmp_path)
    data = prepare(job)
    assert data is not None
    change(run_dir, data=data.model_dump(mode="json"))
    assert prepare(job) == data
    fewer = data.train.model_copy(update={"num_images": 1000})
    change(run_dir, data=data.model_copy(update={"train": fewer}).model_dump(mode="json"))
    with pytest.raises(DataError, match=f"^{run_dir.root} was trained on other data: .* restore the data"):
        prepare(job)


@pytest.mark.parametrize(
    ("seeds", "overrides"), [("0", []), ("1,2", []), ("0,1", ["optim.epochs=2"])], ids=["fewer", "others", "shorter"]
)
def test_a_folder_of_other_runs_is_refused_before_its_numbers_stand_for_these(
    seeds: str, overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(SMALL)
    table = read_table(str(tmp_path / "mine.yaml"))

    def job(seeds: str, overrides: list[str]) -> Reproduction:
        request = Request.of(table, None, None, seeds)
        parts = compose(table, request, overrides, None, None)
        return Reproduction(table, request, parts, changes(overrides), tmp_path / "out", tmp_path)

    whole = job("0,1", [])
    for part in whole.sweeps:
        run_dir = whole.run_dir(part)
        run_dir.root.mkdir(parents=True)
        begin_run(part.resolved, "sweep", run_dir, tmp_path)
    check_begun(whole)
    with pytest.raises(ExperimentError, match=r"out/students has a run with another .*, or choose another --out"):
        check_begun(job(seeds, overrides))
