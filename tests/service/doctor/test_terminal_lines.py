"""The doctor's words, and records read back from directories."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from service.config.experiment import load
from service.config.schema import Experiment
from service.doctor.read_run import Recording, evidence_of
from service.doctor.recorded import Clock, GpuUse, NodeUse
from service.doctor.terminal_lines import case_lines
from service.runs.run_directory import begin_run
from tests.faults.hot_gpu import hot_gpu
from tests.run_log import add, change, numbers
from tests.service.commands import run
from tests.service.doctor.runs import HEALTHY, RANK, loader, longer, run_of
from trainables.metrics.phases import PHASES
from trainables.rundir import RunDir


def step_of(**changes: float) -> dict[str, float]:
    """Metrics of a step of 100 ms, in which nothing is wrong."""
    return {f"phase/{phase}_ms": getattr(RANK, f"{phase}_ms") for phase in PHASES} | {"phase/step_ms": 100.0} | changes


def experiment(*overrides: str) -> Experiment:
    return load("digits", overrides).experiment


def test_of_a_healthy_run_the_doctor_says_that_nothing_is_to_be_gained() -> None:
    shown = case_lines([Recording("the student", HEALTHY)])
    assert shown[0] == "nothing to gain over 5%: compute-bound, the models' own work is 95% of a step"
    assert "the student: a step of 100.0 ms is backward 45%, teacher 25%, student 25%, optimizer 2%, data 1%" in shown[1]


def test_the_first_line_is_the_main_finding_and_what_to_change_follows() -> None:
    shown = case_lines([Recording("the student", run_of(longer(RANK, teacher=100)))])
    assert shown[0].startswith("teacher-bound, 62% to gain: the teacher takes 125.0 of a step's 200.0 ms")
    assert shown[1].startswith("   change: a smaller teacher")


def test_several_findings_are_numbered() -> None:
    shown = case_lines([Recording("the student", run_of(longer(RANK, h2d=60, teacher=100)))])
    assert [line[:2] for line in shown if not line.startswith(" ")][:2] == ["1.", "2."]


def test_of_a_sweep_the_best_trial_is_spoken_of_and_why_others_are_slower() -> None:
    slow = [Recording(f"trial {n}", run_of(longer(RANK, data=20.0 * n))) for n in (1, 2)]
    shown = case_lines([Recording("trial 0", HEALTHY), *slow])
    assert shown[-1] == "2 other trials, most of the difference in data: up to 40% more time per image (trial 2)"


def test_a_trial_whose_typical_step_is_no_slower_than_the_best_ones_is_not_given_a_negative_figure() -> None:
    quick = Recording("trial 1", run_of(longer(RANK, backward=-2.0)))
    shown = case_lines([Recording("trial 0", HEALTHY), quick])
    assert shown[-1] == "1 other trial with a typical step no slower than the best one's (trial 1)"


def test_every_number_of_the_records_arrives_in_the_evidence() -> None:
    metrics = step_of(
        one_image_ms=3.0,
        **{"phase/allreduce_ms": 4.0, "passes/16_images_ms": 2.0},
        peak_memory_mib=900.0,
        gpu_memory_mib=81_000.0,
    )
    for rank in (0, 1):
        metrics |= {f"rank{rank}/{name.removeprefix('phase/')}": ms + rank for name, ms in step_of().items()}
        waits_ms = {"": 5.0, "_error": 0.5}
        metrics |= {f"rank{rank}/allreduce_wait{name}_ms": ms + rank for name, ms in waits_ms.items()}
        metrics |= {f"rank{rank}/waits_for_ranks_ms": 1.0 + rank}
        metrics |= {f"rank{rank}/loader_batch_ms": 30.0 + rank, f"rank{rank}/loader_wait_ms": 0.5 + rank}
    loader = {"image_ms": 2.0, "read_ms": 1.0, "read_wait_ms": 0.8, "cpu_ms": 0.5, "core_wait_ms": 0.3, "threads": 3.0}
    metrics |= {f"loader/{name}": value for name, value in loader.items()}
    metrics |= {"node0/gpu0/sm_clock_limit_mhz": 1980.0, "node0/gpu0/throttled_pct": 25.0, "node0/gpu0/throttle_reasons": 32.0}
    metrics |= {"node1/swap_in_mib_per_s": 9.0, "train_s": 10.0, "eval_s": 3.0, "checkpoint_s": 2.0, "other_s": 1.0}
    metrics |= {
        "node0/cpu_pct": 50.0,
        "node0/disk_read_mib_per_s": 7.0,
        "node0/gpu0/sm_clock_mhz": 1400.0,
        "node1/cpu_pct": 60.0,
        "node1/cpu_cores": 8.0,
    }
    ended = {"step": 10, "metrics": step_of()}
    lines = [{"kind": "step", **ended}, {"kind": "epoch", **ended}]
    e = evidence_of(experiment("scale.num_workers=2", "optim.accumulate=2", "precision=bf16"), metrics, lines, loader_workers=3)
    assert [(rank.data_ms, rank.step_ms, rank.allreduce_wait_ms) for rank in e.ranks] == [(1.0, 100.0, 5.0), (2.0, 101.0, 6.0)]
    assert [(rank.allreduce_wait_error_ms, rank.waits_for_ranks_ms) for rank in e.ranks] == [(0.5, 1.0), (1.5, 2.0)]
    assert (e.exposed_ms, e.rank_batch, e.accumulate, e.precision, e.loader_workers) == (4.0, 32.0, 2, "bf16", 3)
    assert evidence_of(experiment("precision=auto"), metrics, precision="fp32").precision == "fp32"
    assert e.loader is not None
    slower_ms = 2.0 * 0.5 / 30.5  # of the mean of both ranks what the slower one's loader takes more
    assert astuple(e.loader) == pytest.approx((2.0 - slower_ms, 0.8 - slower_ms, 0.5, 0.3))
    assert [(rank.loader_batch_ms, rank.loader_wait_ms) for rank in e.ranks] == [(30.0, 0.5), (31.0, 1.5)]
    assert e.nodes == (NodeUse(50.0), NodeUse(60.0, 9.0, 8.0))
    assert e.gpus == (GpuUse("node0/gpu0", None, 0.0, 1400.0, 1980.0, 32, 25.0),)
    assert e.clock == Clock(10.0, 3.0, 2.0, 1.0)
    assert (e.one_image_ms, e.passes_ms, e.peak_memory_mib, e.gpu_memory_mib) == (3.0, {16: 2.0}, 900.0, 81_000.0)


def test_epochs_are_read_from_log_lines_weighted_by_their_steps() -> None:
    lines: list[dict[str, Any]] = [{"kind": "start", "step": 0, "metrics": {"steps_per_epoch": 10}}]
    for step, step_ms in ((4, 100.0), (10, 200.0)):
        lines.append({"kind": "step", "step": step, "metrics": {"train/phase/step_ms": step_ms}})
    lines.append({"kind": "epoch", "step": 10, "metrics": {"epoch/eval_s": 2.0, "val/num_images": 50.0}})
    e = evidence_of(experiment(), step_of(), lines)
    assert (e.steps_per_epoch, e.val_images) == (10, 50.0)
    assert [(epoch.step_ms, epoch.eval_s) for epoch in e.epochs] == [(160.0, 2.0)]


def test_an_epoch_that_was_evaluated_while_the_next_one_trained_has_the_times_of_its_own_steps() -> None:
    lines: list[dict[str, Any]] = [{"kind": "start", "step": 0, "metrics": {"steps_per_epoch": 10}}]
    steps = [{"kind": "step", "step": 10 * n, "metrics": {"train/phase/step_ms": 100.0 * n}} for n in (1, 2)]
    epochs = [{"kind": "epoch", "step": 10 * n, "metrics": {}} for n in (1, 2)]
    e = evidence_of(experiment(), step_of(), [*lines, *steps, *epochs])
    assert [epoch.step_ms for epoch in e.epochs] == [100.0, 200.0]


def test_of_a_run_on_a_gpu_that_gets_hot_that_is_the_first_finding() -> None:
    assert case_lines([hot_gpu(throttled=True)])[0].startswith("thermal drift, 11% to gain: an epoch's steps grew from 17")
    assert case_lines([hot_gpu(throttled=False)])[0].startswith("nothing to gain over 5%")


def test_what_gains_only_after_another_cause_and_what_gains_only_with_another_are_marked_as_such() -> None:
    reads = loader(300 / 64, read_wait=290 / 64, cpu=10 / 64)
    shown = case_lines([Recording("the student", run_of(longer(RANK, data=100, teacher=100), loader=reads))])
    assert shown[0].startswith("1. storage-bound, 34% to gain: ")
    assert shown[2].startswith("2. then teacher-bound, both together 75% to gain: ")
    even = run_of(replace(longer(RANK, teacher=100), loader_batch_ms=199.0), loader=loader(199 / 64, read_wait=199 / 64))
    shown = case_lines([Recording("the student", even)])
    assert shown[0].startswith("storage-bound and teacher-bound, 63% to gain by both together, by one alone next to nothing: ")


def test_a_node_that_swaps_is_noted_though_no_step_waits_for_it() -> None:
    shown = case_lines([Recording("the student", replace(HEALTHY, nodes=(NodeUse(60.0, 12.0),)))])
    assert shown[0].startswith("nothing to gain")
    assert "a node reads 12 MiB/s from swap space: its memory is full" in shown


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run that has begun, whose loader is slow."""
    found = RunDir(tmp_path / "run")
    found.root.mkdir()
    begin_run(load("digits", ["train.max_steps=10"]), "train", found, tmp_path)
    return found


def test_the_command_reads_a_run_that_goes_on_and_a_complete_one(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", run_dir.root)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {run_dir.root}: no step has been timed yet")
    assert err.count("\n") == 1
    slow = step_of(**{"phase/data_ms": 101.0, "phase/step_ms": 200.0, "node0/cpu_pct": 97.0})
    add(run_dir, numbers("step", "student", 5, **{f"train/{name}": ms for name, ms in slow.items()}))
    code, out, _ = run(capsys, "doctor", run_dir.root)
    assert code == 0
    assert out.startswith("data-bound, 50% to gain: ")
    add(run_dir, numbers("summary", "student", 10, **step_of()))
    code, out, _ = run(capsys, "doctor", run_dir.root)
    assert out.startswith("nothing to gain over 5%")


def test_the_command_reads_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = RunDir(tmp_path / "sweep")
    sweep.root.mkdir()
    begin_run(load("digits", ["sweep.steps=5"]), "sweep", sweep, tmp_path)
    scale = {"scale.num_workers": 1, "data.global_batch_size": 64}
    judged = {"space": {"data.loader_workers": [0, 1]}, "metric": "images_per_s", "mode": "max"}
    rows: list[dict[str, Any]] = [
        {"id": "002", "status": "failed", "params": {}, "scale": scale | {"data.loader_workers": 1}, "metrics": {}}
    ]
    for workers, metrics in enumerate((step_of(**{"phase/data_ms": 51.0, "phase/step_ms": 150.0}), step_of())):
        row = {"id": f"00{workers}", "status": "ok", "params": {"data.loader_workers": workers}, "metrics": metrics}
        rows.append(row | {"scale": scale | row["params"]})
    change(sweep, trials=rows, chosen="001", **judged)
    code, out, _ = run(capsys, "doctor", sweep.root)
    assert code == 0
    assert out.startswith("nothing to gain over 5%")
    assert "1 other trial, most of the difference in data: up to 50% more time per image (trial 000" in out


def test_a_sweep_that_has_ended_without_a_timed_step_shows_what_became_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = RunDir(tmp_path / "sweep")
    sweep.root.mkdir()
    begin_run(load("digits", ["sweep.steps=5"]), "sweep", sweep, tmp_path)
    scale = {"scale.num_workers": 1, "data.global_batch_size": 64, "data.loader_workers": 1}
    row = {"params": {}, "scale": scale, "metrics": {}}
    rows = [
        row | {"id": "000", "status": "failed", "reason": "loss is not finite"},
        row | {"id": "001", "status": "oom", "reason": "…"},
    ]
    about = {"trials": rows, "status": "failed", "space": {}, "metric": "images_per_s", "mode": "max"}
    change(sweep, **about)
    code, out, err = run(capsys, "doctor", sweep.root)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no step was timed (failed: loss is not finite); see distill report" in err


def test_set_with_a_directory_and_what_is_neither_are_one_line(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "doctor", run_dir.root, "--set", "seed=1")
    assert code == 2
    assert "--set: is for the timing run of a recipe; give the run's experiment.yaml" in err
    code, _, err = run(capsys, "doctor", "digitz")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean digits?" in err
