"""Where a training ends: at its epochs, at the accuracy asked for, or when its time is up; and which terms it reports."""

import contextlib
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from service.config.experiment import load
from tests.trainables.jobs import Recorded, config, equal, no_telemetry, train, write_teacher
from tests.trainables.methods import own_methods
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.engine.train import build, run_job
from trainables.errors import TrainingError
from trainables.methods.init_stage import with_init_stage
from trainables.metrics import peak_memory
from trainables.metrics.peak_memory import PeakMemory
from trainables.rules import RULES, first_problem
from trainables.rundir import StageDir

LONG: dict[str, Any] = {"teacher": None, "model": "mlp_small", "precision": "fp32", "optim": {"epochs": 6, "lr": 0.05}}


def until(folder: Path, **train_section: Any) -> TrainConfig:
    return config(folder, **LONG, train=train_section)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_training_ends_after_the_epoch_that_reaches_its_target(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    result = ranks.run(world_size, train, until(tmp_path, until_top1_pct=80))[0]
    history, summary = result["progress"].history, result["calls"][-1][2]
    assert [row["val/top1_pct"] >= 80 for row in history] == [False] * (len(history) - 1) + [True]
    assert len(history) < 6
    assert summary["steps_to_accuracy"] == summary["steps"] == 15 * len(history)
    assert summary["time_to_accuracy_s"] == summary["train_s"] > 0


def test_a_target_out_of_reach_leaves_no_time_to_it(ranks: RankPool, tmp_path: Path) -> None:
    result = ranks.run(1, train, until(tmp_path, until_top1_pct=100))[0]
    assert len(result["progress"].history) == 6
    assert not {"time_to_accuracy_s", "steps_to_accuracy"} & result["calls"][-1][2].keys()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_training_whose_time_is_up_ends_with_its_epoch(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    result = ranks.run(world_size, train, until(tmp_path, until_top1_pct=100, until_s=1e-3))[0]
    assert len(result["progress"].history) == 1
    assert result["calls"][-1][2]["train_s"] > 1e-3
    assert "time_to_accuracy_s" not in result["calls"][-1][2]


@pytest.mark.parametrize("kind", ["step", "epoch"])
def test_time_before_a_death_counts_once_it_is_in_a_checkpoint(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    whole = ranks.run(2, train, until(tmp_path / "whole", until_top1_pct=80, checkpoint_every=8))[0]
    places = [place for place, (name, *_) in enumerate(whole["calls"], start=1) if name == kind]
    settings = until(tmp_path / "pieces", until_top1_pct=80, checkpoint_every=8)
    died = ranks.run(2, train, settings, places[-1])[0]
    pieces = ranks.run(2, train, settings)[0]
    last = pieces["calls"][-1][2]
    assert died["died"]
    assert last["steps_to_accuracy"] == whole["calls"][-1][2]["steps_to_accuracy"]
    if kind == "epoch":  # its checkpoint stood: all that is left is to say so
        assert [name for name, *_ in pieces["calls"]] == ["start", "epoch", "summary"]
        assert last["time_to_accuracy_s"] == died["calls"][-1][2]["epoch/time_to_accuracy_s"]
    else:
        before = [metrics["epoch/train_s"] for name, _, metrics in died["calls"] if name == "epoch"]
        assert last["time_to_accuracy_s"] > sum(before)


def evaluated(calls: list[tuple[str, int, dict[str, float]]]) -> list[int]:
    """The epochs that have a validation accuracy on record."""
    epochs = [metrics for kind, _, metrics in calls if kind == "epoch"]
    return [number for number, metrics in enumerate(epochs, start=1) if "val/top1_pct" in metrics]


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4, 6]), (9, [6])])
def test_epochs_between_evaluations_and_always_the_last_one(tmp_path: Path, every: int, epochs: list[int]) -> None:
    result = train(Group(), until(tmp_path, evaluate_every=every))
    summary, history = result["calls"][-1][2], result["progress"].history
    assert evaluated(result["calls"]) == epochs
    assert summary["skipped_images"] == 0
    assert summary["best_epoch"] in epochs
    assert summary["best_top1_pct"] == max(row["val/top1_pct"] for row in history if "val/top1_pct" in row)
    assert summary["top1_pct"] == history[-1]["val/top1_pct"]
    _, best = checkpoint.read(StageDir(tmp_path).best)
    assert best["progress"]["epoch"] == summary["best_epoch"]
    assert [row["epoch/eval_s"] > 0 for row in history] == [number in epochs for number in range(1, 7)]


def test_evaluations_change_nothing_of_what_is_learned_nor_does_a_death_between_them(tmp_path: Path) -> None:
    each = train(Group(), until(tmp_path / "each"))
    some = train(Group(), until(tmp_path / "some", evaluate_every=4))
    settings = until(tmp_path / "died", evaluate_every=4)
    records = [kind for kind, *_ in some["calls"]]
    second_epoch = [number for number, kind in enumerate(records, start=1) if kind == "epoch"][1]
    assert train(Group(), settings, second_epoch)["died"]
    resumed = train(Group(), settings)
    assert equal(each["state"], some["state"])
    assert equal(resumed["state"], some["state"])
    accuracies = [[row.get("val/top1_pct") for row in result["progress"].history] for result in (each, some, resumed)]
    assert accuracies[1] == accuracies[2] == [None, None, None, accuracies[0][3], None, accuracies[0][5]]


def test_a_target_is_looked_for_where_an_epoch_is_evaluated(ranks: RankPool, tmp_path: Path) -> None:
    result = ranks.run(2, train, until(tmp_path, until_top1_pct=20, evaluate_every=2))[0]
    assert evaluated(result["calls"]) == [2]
    assert result["calls"][-1][2]["steps_to_accuracy"] == 30


def test_a_training_whose_time_is_up_is_evaluated_at_its_end(ranks: RankPool, tmp_path: Path) -> None:
    result = ranks.run(2, train, until(tmp_path, until_s=1e-3, evaluate_every=5))[0]
    assert evaluated(result["calls"]) == [1]
    assert "top1_pct" in result["calls"][-1][2]


def test_a_target_and_a_timing_run_exclude_each_other(tmp_path: Path) -> None:
    for key, value in (("until_top1_pct", 90), ("until_s", 60)):
        assert "does not go with train.max_steps" in str(first_problem(until(tmp_path, max_steps=10, **{key: value}), RULES))


def test_the_target_is_the_students_alone(tmp_path: Path) -> None:
    experiment = load("digits", ["train.until_top1_pct=90", "train.until_s=60"]).experiment
    assert experiment.stage("student", tmp_path, {}).train.until_top1_pct == 90
    teacher = experiment.stage("teacher", tmp_path, {}).train
    assert (teacher.until_top1_pct, teacher.until_s) == (None, None)


def test_a_term_is_on_record_in_the_stage_that_computes_it_and_in_no_other(ranks: RankPool, tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors")
    distill = {"method": [f"{own_methods.__file__}:InitStage", "kd"], "options": {"InitStage": {"init_epochs": 1}}}
    settings = config(tmp_path / "job", teacher={"weights": weights}, distill=distill, optim={"epochs": 1, "lr": 0.02})
    calls = [call for each in with_init_stage(settings) for call in ranks.run(1, train, each)[0]["calls"]]
    terms = {"InitStage/reconstruction", "InitStage/code", "kd/kl", "distill_loss"}
    for kind, prefix in (("step", "train/"), ("epoch", "epoch/train/")):
        names_of_calls = [{name.removeprefix(prefix) for name in metrics} & terms for each, _, metrics in calls if each == kind]
        stages = [names for names, _ in itertools.groupby(names_of_calls)]
        assert stages == [{"InitStage/reconstruction", "distill_loss"}, {"InitStage/code", "kd/kl", "distill_loss"}]
    assert [metrics.get("val/top1_pct", 0) > 0 for kind, _, metrics in calls if kind == "epoch"] == [False, True]


def test_a_step_that_is_logged_and_saved_has_one_record(tmp_path: Path) -> None:
    """Its last warm-up step, whose record would be the second one and of no steps at all."""
    settings = until(tmp_path, checkpoint_every=1, warmup_steps=1, log_every=20)
    steps = [(step, metrics) for kind, step, metrics in train(Group(), settings)["calls"] if kind == "step"]
    assert [step for step, _ in steps] == sorted({step for step, _ in steps})
    assert all(metrics["train/images_per_s"] > 0 and math.isfinite(metrics["train/loss"]) for _, metrics in steps)


@pytest.mark.parametrize("clipping", ["clip_grad_norm", "clip_grad_value", "clip_grad_agc"])
def test_advice_about_a_loss_that_is_not_finite_names_what_is_not_done_yet(tmp_path: Path, clipping: str) -> None:
    optim = {"epochs": 1, "lr": 1e12, clipping: 1e9, "lr_scaling": "linear", "lr_base_batch": 50}
    with pytest.raises(TrainingError, match=r": lower optim.lr \(now 1e\+12, 2e\+12 after scaling with the batch\); no check"):
        train(Group(), config(tmp_path, **{**LONG, "optim": optim}))


def test_a_loss_that_is_not_finite_ends_the_job_names_the_step_and_leaves_the_last_good_state(tmp_path: Path) -> None:
    every = {"checkpoint_every": 1, "log_every": 1}
    with pytest.raises(TrainingError) as ended:
        train(Group(), config(tmp_path, **{**LONG, "optim": {"epochs": 1, "lr": 1e12}}, train=every))
    last = StageDir(tmp_path).last
    tensors, about = checkpoint.read(last)
    problem = re.match(r"student: (.*) is not finite (?:at|after) step (\d+): lower optim\.lr \(now 1e\+12\)", str(ended.value))
    assert problem, ended.value
    assert int(problem[2]) == about["progress"]["step"] + 1
    assert str(ended.value).endswith(f"the last good state is {last}")
    assert all(tensor.isfinite().all() for name, tensor in tensors.items() if name.startswith("model."))


def test_memory_is_that_of_the_steady_state_and_says_what_is_reserved_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions are replaced: they need a GPU."""
    peak, emptied = {"bytes": 900 << 20, "reserved": 500 << 20}, []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(bytes=300 << 20))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["bytes"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peak["reserved"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 << 20, 1000 << 20))
    device = torch.device("cuda:0")
    memory = PeakMemory(device, first_step=3)
    memory.before_step(2)
    assert emptied == []
    memory.before_step(3)
    assert emptied == [True]
    assert memory.summary(Group(device=device)) == {
        "peak_memory_mib": 300.0,
        "reserved_memory_mib": 500.0,
        "free_memory_mib": 200.0,
        "gpu_memory_mib": 1000.0,
    }
    in_graphs = PeakMemory(device, first_step=3, in_graphs=True)
    peak.update(bytes=100 << 20, reserved=400 << 20)
    for each in (memory, in_graphs):
        each.end_training(4)
    peak.update(bytes=700 << 20, reserved=800 << 20)  # of an evaluation
    found = [each.summary(Group(device=device)) for each in (memory, in_graphs)]
    assert [(of["peak_memory_mib"], of["reserved_memory_mib"]) for of in found] == [(100.0, 400.0), (400.0, 400.0)]


@pytest.mark.parametrize(
    ("warmup", "epochs", "max_steps", "before"), [(0, 1, 6, 1), (4, 1, 6, 3), (0, 1, None, 1), (2, 3, None, None)]
)
def test_the_peak_of_the_memory_begins_anew_before_a_later_step_than_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: int, epochs: int, max_steps: int | None, before: int | None
) -> None:
    settings = config(tmp_path, optim={"epochs": epochs}, train={"warmup_steps": warmup, "max_steps": max_steps})
    reset_at = []
    with contextlib.closing(build(settings, Group(), Recorded(), no_telemetry)) as job:
        monkeypatch.setattr(peak_memory, "reset_peaks", lambda _: reset_at.append(job.progress.step))
        run_job(job)
        assert reset_at == [before or job.train_loader.steps_per_epoch]
