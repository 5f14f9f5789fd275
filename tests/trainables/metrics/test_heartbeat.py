"""A heartbeat says where a job is, at a cost that no step notices."""

import timeit
from pathlib import Path

import pytest

from tests.trainables.jobs import config, no_telemetry
from trainables.distributed.group import Group
from trainables.engine.checkpoint_writer import CheckpointWriter
from trainables.engine.train import build, run_job
from trainables.metrics.heartbeat import Heartbeat, Position
from trainables.metrics.phases import PHASES


def test_a_job_says_where_it_is_from_its_start_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, visited = Heartbeat(str(tmp_path)), list[Position]()
    beat, end_phase, save = heartbeat.beat, heartbeat.end_phase, CheckpointWriter.save

    def note() -> None:
        visited.append(heartbeat.position())

    monkeypatch.setattr(heartbeat, "beat", lambda: (beat(), note()))
    monkeypatch.setattr(heartbeat, "end_phase", lambda phase: (end_phase(phase), note()))
    monkeypatch.setattr(CheckpointWriter, "save", lambda *arguments: (note(), save(*arguments)))
    note()
    job = build(
        config(tmp_path, optim={"epochs": 2, "lr": 0.1}), Group(), lambda *_, **__: None, no_telemetry, heartbeat=heartbeat
    )
    note()
    run_job(job)
    job.close()
    steps = job.epochs.steps_per_epoch
    assert [str(position) for position in visited[:2]] == ["start", "start"]
    first_step = [str(position) for position in visited[2 : 2 + len(PHASES) + 1]]
    assert first_step == [*(f"{phase} of step 1" for phase in PHASES), "log after step 0"]
    names = [str(position) for position in visited]
    assert f"eval after step {steps}" in names
    assert f"checkpoint after step {2 * steps}" in names
    orders = [position.order for position in visited if position.activity != "timing" and position.phase != "log"]
    assert orders == sorted(orders)
    assert {position.step for position in visited if position.activity == "train" and position.batch_s is None} == {0}
    assert all(position.folder == str(tmp_path) for position in visited)


def test_the_phases_of_each_micro_batch_follow_those_of_the_one_before() -> None:
    heartbeat, visited = Heartbeat(), list[Position]()
    heartbeat.enter("train")
    heartbeat.begin_step(0)
    for phase in ("data", "h2d", "augment"):
        heartbeat.end_phase(phase)
    for _ in range(2):
        heartbeat.begin_micro_batch()
        for phase in ("teacher", "student", "backward"):
            visited.append(heartbeat.position())
            heartbeat.end_phase(phase)
    visited.append(heartbeat.position())
    assert [position.phase for position in visited] == [*("teacher", "student", "backward") * 2, "optimizer"]
    assert [position.order for position in visited] == sorted(position.order for position in visited)


def test_a_phase_costs_less_than_two_microseconds() -> None:
    heartbeat = Heartbeat()
    assert min(timeit.repeat(lambda: heartbeat.end_phase("student"), number=10_000, repeat=5)) / 10_000 < 2e-6


def test_what_is_behind_comes_first_whatever_it_is_doing() -> None:
    in_order = [
        Position("start"),
        Position("train", 5, "log"),
        Position("eval", 5),
        Position("checkpoint", 5),
        Position("train", 5, "data"),
        Position("train", 5, "backward"),
        Position("train", 6, "data"),
        Position("timing", 6),
    ]
    assert sorted(set(in_order), key=lambda position: position.order) == in_order
