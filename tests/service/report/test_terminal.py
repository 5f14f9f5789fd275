"""The tables as a reader sees them, from results as they lie on disk."""

import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report import end_of_run
from service.report.labels import number
from service.report.records import records_of_run, running_stage_lines
from service.report.tables import node_table, phase_table, sweep_table
from service.report.terminal import overview, report_of, summary, verdict
from service.runs.display import output
from service.runs.events import event
from service.runs.result import RunResult
from service.runs.stored.stored_runs import run_folder
from tests.run_log import add, numbers, result_of
from tests.service.report.runs import BEGAN_MS, bare_records, line, sweep_dir, typed, typed_row
from trainables.rundir import RunDir

SCALE = {"scale.num_workers": 2, "data.global_batch_size": 128, "data.loader_workers": 1}
METRICS = {
    "step_s": 0.1,
    "images_per_s": 1280.0,
    "epoch_s": 12.5,
    "epoch_projected": 1.0,
    "top1_pct": 97.25,
    "data_pct": 25.0,
    "phase/data_ms": 25.0,
    "phase/data_min_ms": 1.0,
    "phase/data_max_ms": 50.0,
    "phase/teacher_ms": 30.0,
    "phase/student_ms": 45.0,
    "phase/step_ms": 100.0,
}
STEP = numbers("step", "student", 40, **{"train/images_per_s": 12.0})


def trial(number: str, status: str, **more: Any) -> dict[str, Any]:
    return {"id": number, "params": dict(SCALE), "scale": SCALE, "status": status, "reason": "", "metrics": {}, **more}


def result() -> RunResult:
    rows = [
        trial("000", "ok", metrics=METRICS),
        trial("001", "oom", reason="rank 0: CUDA out of memory"),
        trial("002", "ok", metrics=METRICS, oversubscribed=True),
    ]
    return typed({"status": "running", "space": SCALE, "trials": rows, "use_gpu": True})


def shown(renderable: object) -> str:
    console = Console(width=170, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (closed with the process)
    console.print(renderable)
    return console.export_text()


def test_a_sweeps_row_has_what_one_compares() -> None:
    text = shown(sweep_table(result()))
    for part in ("GPUs", "batch", "0.1000", "0.0250 (0.0010–0.0500)", "1,280.0", "12.50*", "97.25", "← best"):
        assert part in text
    assert "oom: rank 0: CUDA out of memory" in text
    for gpu, unit in {True: "GPUs", False: "workers"}.items():
        columns = sweep_table(result().model_copy(update={"use_gpu": gpu})).columns
        assert columns[:5] == ["trial", "status", unit, "global batch", "loader workers"]


def test_each_teacher_has_one_line_whoever_learned_from_it_and_wherever_it_was_trained(tmp_path: Path) -> None:
    given = {"model": "resnet34", "weights": "w.pth", "top1_pct": 73.31, "num_images": 50_000, "chance_pct": 0.1}
    line = "teacher resnet34: 73.31% top-1 on 50,000 validation images, where chance is 0.10%"
    trials = [trial(number, "ok", metrics=METRICS, teachers=[given]) for number in ("000", "001")]
    swept = typed({"status": "running", "space": SCALE, "trials": trials, "use_gpu": True})
    assert overview(bare_records(RunDir(tmp_path), swept)).count(line) == 1
    stages = [
        {"stage": "teacher", "model": "resnet34", "status": "ok", "metrics": {"best_top1_pct": 71.0, "top1_pct": 70.5}},
        {"stage": "student", "model": "resnet18", "status": "ok", "metrics": {}, "teachers": [given]},
    ]
    run = typed({"kind": "train", "status": "complete", "stages": stages})
    assert overview(bare_records(RunDir(tmp_path), run))[2:] == ["teacher resnet34: 71.00% top-1, trained here", line]


def test_a_report_has_the_notices_of_a_run_and_why_it_is_not_exact(tmp_path: Path) -> None:
    run = typed({"kind": "train", "status": "complete", "notices": ["2 files left out"], "not_exact": ["resumed on other data"]})
    assert report_of(bare_records(RunDir(tmp_path), run))[1:] == [
        "note: 2 files left out",
        "note: not exact: resumed on other data",
    ]


def test_a_training_to_the_target_is_a_row_and_no_point() -> None:
    swept = result()
    further = [trial("003", "untested"), trial("000-trained", "ok", metrics=METRICS, speed_trial="000")]
    swept = swept.model_copy(update={"trials": [*swept.rows, *map(typed_row, further)]})
    table = sweep_table(swept)
    assert table.title.startswith("demo: 3 of 4 points")
    assert len(table.rows) == 4


def test_reasons_and_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    failed = trial("003", "failed", reason="no key [/data] in x[0] :cat:")
    output().print(sweep_table(typed({"name": "[demo]", "trials": [failed]})))
    printed = capsys.readouterr().out
    assert "failed: no key [/data] in x[0] :cat:" in printed
    assert printed.startswith("[demo]: 1 trial by")


def test_the_verdict_names_the_winner_and_where_its_time_goes() -> None:
    lines = verdict(result())
    assert lines[0].startswith("best: trial 000 with 2 GPUs × batch 128 × 1 loader worker: 1,280.0 images/s")
    assert lines[2] == "its step: student 45%, teacher 30%, data 25%"
    assert any("projected" in line for line in lines)
    assert any("oversubscribed" in line for line in lines)
    assert verdict(typed({"trials": []})) == ["no trial is complete: nothing to compare yet"]


def test_the_end_of_a_sweep_calls_noise_what_its_report_calls_noise(tmp_path: Path) -> None:
    space = {NUM_WORKERS: [1], GLOBAL_BATCH: [256, 512], LOADER_WORKERS: [4]}
    run_dir = sweep_dir(tmp_path / "run", space, ends={name: {"steps_s": []} for name in ("000", "001")})
    for name in ("000", "001"):
        stage = f"trials/{name}/student"
        add(run_dir, *(line("step", 1, 1, BEGAN_MS, {"train/phase/step_ms": ms}, stage) for ms in (9.0, 1.0, 300.0, 2.0)))
    records = records_of_run(run_dir.root)
    parts, lines = end_of_run.summary(run_dir, result_of(run_dir))
    assert ", within noise, than" in lines[1]
    assert lines == verdict(records.result)
    assert list(map(shown, parts)) == list(map(shown, summary(records.result)))


def test_phases_show_their_share_of_the_step() -> None:
    assert "45.0" in shown(phase_table(METRICS, "a step"))
    assert phase_table({"top1_pct": 50.0}, "a step") is None  # too short to be timed


def test_the_hardware_has_a_row_a_node_and_a_row_a_gpu_with_why_it_was_slowed() -> None:
    gpu = {"node0/gpu0/util_pct": 87.0, "node0/gpu0/util_max_pct": 100.0, "node0/gpu0/throttle_reasons": 5.0}
    nodes = {"node0/gpus": 1.0, "node0/cpu_pct": 40.0, "node0/cpu_max_pct": 99.0, "node10/cpu_pct": 1.0, "node2/cpu_pct": 1.0}
    metrics = nodes | gpu
    table = node_table(metrics, "hardware")
    assert table is not None
    assert [row[0] for row in table.rows] == ["node0", "node0/gpu0", "node2", "node10"]
    text = shown(table)
    assert "40 (99)" in text
    assert "87 (100)" in text
    assert "sw_power_cap" in text
    assert "gpu_idle" not in text
    assert node_table(METRICS, "hardware") is None


def test_a_running_runs_report_says_how_far_it_is_and_how_to_go_on(tmp_path: Path) -> None:
    add(RunDir(tmp_path), STEP | {"time_ms": int(time.time() * 1e3) - 90_000})
    (tmp_path / "experiment.yaml").write_text("base: digits\n")
    advice = f"continue it with: distill resume {tmp_path}"
    for status, may_continue in {"running": False, "interrupted": True, "failed": True, "complete": False}.items():
        standing = result().model_copy(update={"status": status})
        lines = [part for part in report_of(bare_records(RunDir(tmp_path), standing)) if isinstance(part, str)]
        progress = [line for line in lines if line.startswith("student: step 40, 12.0 images/s, last update 9")]
        assert len(progress) == (status != "complete")
        assert (lines[-1] == advice) == may_continue


def test_a_run_in_an_object_store_is_continued_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path))
    interrupted = typed({"status": "interrupted", "trials": []})
    uri = "s3://bucket/runs/one"
    assert report_of(bare_records(RunDir(run_folder(uri)), interrupted))[-1] == f"continue it with: distill resume {uri}"


def test_stages_of_trials_that_have_ended_are_not_running_and_those_of_their_next_measurements_are(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for id in ("000", "001", "002", "003"):
        add(run_dir, STEP | {"stage": f"trials/{id}/student"})
    add(run_dir, numbers("summary", "trials/000/student", 41))
    for id in ("000", "001", "003"):
        add(run_dir, event("trial_ended", trial=id, outcome={"status": "failed"}))
    add(run_dir, STEP | {"stage": "trials/000/student-2"})
    lines = running_stage_lines(bare_records(run_dir, result()))
    assert [line.partition(":")[0] for line in lines] == ["trials/002/student", "trials/000/student-2"]


def test_a_missing_number_is_a_dash() -> None:
    assert number(None) == "–"
    assert number(1234.5, 1) == "1,234.5"
