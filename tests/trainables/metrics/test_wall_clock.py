"""Every second of a job is in one part, and the parts are what the clock says."""

import itertools
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.run_log import events_of
from tests.trainables.jobs import config, train, train_on_record
from trainables.distributed.group import Group
from trainables.engine import job_metrics
from trainables.metrics.wall_clock import PARTS, WallClock
from trainables.worker import reporter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_parts_add_up_inside_one_another_and_over_processes() -> None:
    now = Clock()
    clock = WallClock(None, now)
    now.now = 150.0
    clock.begin()
    with clock.part("train"):
        now.now += 4
        with clock.part("checkpoint"):
            now.now += 1
        now.now += 2
        assert clock.train_s == 6
    now.now += 0.5
    assert clock.end_epoch() == {"train_s": 6, "eval_s": 0, "checkpoint_s": 1, "other_s": 0.5, "wall_s": 7.5}
    with clock.part("eval"):
        now.now += 3
    assert clock.end_epoch()["wall_s"] == 3
    again = WallClock(clock.state(), now)
    now.now += 20
    again.begin()
    now.now += 1
    with again.part("timing"):
        now.now += 2
    assert again.total() == {"train_s": 6, "eval_s": 3, "checkpoint_s": 1, "timing_s": 2, "other_s": 1.5, "wall_s": 13.5}


def test_a_real_jobs_parts_are_its_wall_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # a clock that is a millisecond later whenever someone looks: no busy machine comes between
    monkeypatch.setattr(reporter, "time", SimpleNamespace(time_ns=lambda: next(ticks) * 1_000_000))
    monkeypatch.setattr(job_metrics, "WallClock", lambda saved, **_: WallClock(saved, lambda: next(ticks) / 1e3))
    settings = config(tmp_path, optim={"epochs": 3, "lr": 0.05}, train={"checkpoint_every": 6})
    summary = train_on_record(settings)
    lines = events_of(tmp_path)
    passed_s = (lines[-1]["time_ms"] - lines[0]["time_ms"]) / 1e3
    assert summary["wall_s"] == pytest.approx(passed_s, abs=0.005)
    assert sum(summary[f"{part}_s"] for part in PARTS) == pytest.approx(summary["wall_s"])
    assert all(summary[f"{part}_s"] > 0 for part in PARTS)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    between_s = [(after["time_ms"] - before["time_ms"]) / 1e3 for before, after in pairwise(epochs)]
    walls_s = [epoch["metrics"]["epoch/wall_s"] for epoch in epochs]
    assert walls_s[1:] == pytest.approx(between_s, abs=0.005)
    assert summary["epoch_wall_s"] == pytest.approx(sum(walls_s[1:]) / 2)
    trained_s = sum(epoch["metrics"]["epoch/train_s"] for epoch in epochs)
    assert trained_s == pytest.approx(summary["train_s"])


def test_a_timing_run_has_a_clock_too(tmp_path: Path) -> None:
    began = time.perf_counter()
    summary = train_on_record(config(tmp_path, train={"max_steps": 30}))
    assert 0 < summary["train_s"] < summary["wall_s"] < time.perf_counter() - began
    assert summary["eval_s"] == 0


def test_what_an_epoch_took_before_a_death_is_part_of_it(tmp_path: Path) -> None:
    settings = config(tmp_path, teacher=None, optim={"epochs": 1, "lr": 0.05}, train={"checkpoint_every": 8, "log_every": 4})
    before = train(Group(), settings, 4)  # the step record after the checkpoint inside the epoch
    began = time.perf_counter()
    after = train(Group(), settings)
    passed_s = time.perf_counter() - began
    epoch = next(metrics for kind, _, metrics in after["calls"] if kind == "epoch")
    saved_s = before["clock"]["job"]["train"]
    assert before["died"]
    assert 0 < epoch["epoch/train_s"] < saved_s + passed_s
    assert after["clock"]["job"]["train"] == pytest.approx(epoch["epoch/train_s"])
    assert after["calls"][-1][2]["train_s"] == pytest.approx(epoch["epoch/train_s"])
