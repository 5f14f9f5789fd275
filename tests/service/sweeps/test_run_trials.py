"""Trials handed to Ray Tune: what is recorded of them while they run, when they end and when they are interrupted."""

import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from service.cluster.resources import Cluster, Node, local_capacity
from service.config.experiment import load
from service.runs.display import Display
from service.runs.events import Event, event
from service.runs.outcome import Outcome
from service.runs.run_log import as_json, read_log
from service.sweeps import run_trials
from service.sweeps.run_trials import TeacherSource, assign, concurrency, run_pending, save_rows, shares_workers
from service.sweeps.trials import has_trials_to_retry, load_outcomes, plan_trials, retry_trials, rows_of
from tests.run_log import add, session_of
from tests.waiting import wait_until
from trainables.config import RunStore
from trainables.errors import StorageUnavailableError, TrainingError
from trainables.failures import failure_of
from trainables.rundir import RunDir

ASHA = ["sweep.policy=asha", "sweep.metric=top1_pct", "sweep.space.optim.lr=[0.1, 0.2]", "tracking.enabled=false"]


@pytest.mark.parametrize(
    ("settings", "cores", "at_a_time"),
    [
        (["sweep.policy=guided", "sweep.steps=null", "teacher.service=1"], 64, 1),
        (["sweep.steps=null", "teacher.service=1"], 64, 1),  # trains its epochs, and is compared by images_per_s
        (["sweep.steps=null", "sweep.metric=top1_pct", "teacher.service=1"], 64, 4),
        (["sweep.steps=8"], 8, 4),
        (["sweep.steps=8"], 5, 2),
        (["sweep.steps=8"], 1, 1),
        (["sweep.steps=null", "sweep.metric=top1_pct"], 1, 4),
    ],
)
def test_trials_that_are_compared_by_speed_share_neither_a_teacher_nor_cores(
    tmp_path: Path, settings: list[str], cores: int, at_a_time: int
) -> None:
    keys = ["data.loader_workers=1", "sweep={space: {data.global_batch_size: [32, 64]}, max_concurrent: 4}", *settings]
    resolved, cluster = load("digits", keys), Cluster((Node("here", 64, 0),), real_cpus=cores)
    with Display() as display:
        session = session_of(resolved, RunDir(tmp_path), display)
        assignments = assign(session, plan_trials(resolved), cluster, TeacherSource(None, ()))
        assert concurrency(session, assignments, cluster) == at_a_time


def ended(trial: str, outcome: Outcome) -> Event:
    return event("trial_ended", trial=trial, outcome=as_json(outcome))


def begun(trial: str) -> Event:
    return event("stage_begun", f"trials/{trial}/student", trial=trial, model="mlp_small")


def test_an_interrupted_sweep_has_the_rows_of_ended_trials_and_prints_that_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, run_dir = load("digits", [*ASHA, "teacher=null"]), RunDir(tmp_path)
    trials = plan_trials(resolved)
    endings: list[Any] = []

    def tune_trials(*arguments: Any) -> None:
        endings.append(arguments[-1])
        add(run_dir, begun("000"), ended("000", Outcome(status="ok")), begun("001"))
        raise KeyboardInterrupt

    monkeypatch.setattr(run_trials, "tune_trials", tune_trials)
    with Display() as display:
        session = session_of(resolved, run_dir, display)
        with pytest.raises(KeyboardInterrupt):
            run_pending(session, trials, trials, local_capacity(), TeacherSource(None, ()))
    assert endings[0].is_set(), "trials whose processes die from here on have not failed"
    assert [row.status for row in session.result.rows] == ["ok", *["pending"] * (len(trials) - 1)]


def test_a_trial_that_ended_before_it_began_a_stage_is_recorded_as_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, run_dir = load("digits", [*ASHA, "teacher=null"]), RunDir(tmp_path)
    trials = plan_trials(resolved)

    def tune_trials(*_: object) -> None:
        for trial in trials:
            add(run_dir, ended(trial.id, Outcome(status="failed", reason="its process never started")))

    monkeypatch.setattr(run_trials, "tune_trials", tune_trials)
    with Display() as display:
        session = session_of(resolved, run_dir, display)
        run_pending(session, trials, trials, local_capacity(), TeacherSource(None, ()))
    assert {(row.status, row.reason) for row in session.result.rows} == {("failed", "its process never started")}


def test_a_trial_that_had_ended_when_the_driver_was_killed_is_not_run_again_and_has_its_row(tmp_path: Path) -> None:
    resolved, run_dir = load("digits", ["sweep.space={optim.lr: [0.1, 0.2]}", "teacher=null"]), RunDir(tmp_path)
    with Display() as display:
        session = session_of(resolved, run_dir, display)
    save_rows(session, plan_trials(resolved))
    add(run_dir, ended("000", Outcome(status="ok", metrics={"images_per_s": 7.0})))  # the log's last line
    found, trials = read_log(run_dir), plan_trials(resolved)
    load_outcomes(trials, found.fold)
    assert [trial.outcome is None for trial in trials] == [False, True]
    assert [(row.status, row.metrics) for row in found.result.rows] == [("ok", {"images_per_s": 7.0}), ("pending", {})]


def test_a_log_says_how_far_a_sweep_is_and_how_long_it_may_take_once_a_trial_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["sweep.steps=null", "sweep.metric=top1_pct", "sweep.max_concurrent=2", "sweep.space={optim.lr: [0.1, 0.2, 0.3, 0.4]}"]
    resolved, run_dir, out = load("digits", [*keys, "teacher=null", "tracking.enabled=false"]), RunDir(tmp_path), io.StringIO()
    trials = plan_trials(resolved)

    def tune_trials(*_: object) -> None:
        for trial in trials[:2]:
            add(run_dir, begun(trial.id))
        wait_until(lambda: "0 of 4 trials, 2 running\n" in out.getvalue())
        for trial in trials:
            add(run_dir, ended(trial.id, Outcome(status="ok", seconds=120.0)))
            wait_until(lambda trial=trial: f"{int(trial.id) + 1} of 4 trials" in out.getvalue())

    monkeypatch.setattr(run_trials, "tune_trials", tune_trials)
    with Display(Console(file=out, width=160)) as display:
        session = session_of(resolved, run_dir, display)
        run_pending(session, trials, trials, local_capacity(), TeacherSource(None, ()))
    lines = [line for line in out.getvalue().splitlines() if "of 4 trials" in line]
    assert lines == [
        "0 of 4 trials, 2 running",
        "1 of 4 trials, 1 running, about 3 min left",
        "2 of 4 trials, about 2 min left",
        "3 of 4 trials, about 2 min left",
        "4 of 4 trials",
    ]


@pytest.mark.parametrize(
    "error",
    [
        StorageUnavailableError("s3://b: no answer"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        TrainingError("loss is nan"),
    ],
    ids=["store", "disk", "training"],
)
def test_what_a_store_or_a_disk_ended_runs_again_when_the_sweep_is_resumed(tmp_path: Path, error: Exception) -> None:
    resolved, run_dir = load("digits", ["sweep.space={optim.lr: [0.1, 0.2]}", "teacher=null"]), RunDir(tmp_path)
    trials = plan_trials(resolved)
    failure = failure_of(error, None)
    with Display() as display:
        session = session_of(resolved, run_dir, display)
    failed = as_json(Outcome(status="failed", reason=str(failure), failure=failure.kind))
    session.record("trial_ended", trial=trials[0].id, outcome=failed)
    session.record("trial_ended", trial=trials[1].id, outcome={"status": "ok"})
    load_outcomes(trials, session.fold)
    again = not isinstance(error, TrainingError)
    assert has_trials_to_retry(resolved.experiment, rows_of(trials, resolved, timing=True)) == again
    retry_trials(trials, session)
    assert [trial.id for trial in trials if trial.outcome is None] == ([trials[0].id] if again else [])
    assert (read_log(run_dir).fold.outcome_of(trials[0].id) is None) == again


def test_trials_that_were_refused_for_want_of_nodes_are_rows_and_run_when_the_sweep_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = ["sweep.space={scale.num_workers: [1, 2]}", "teacher=null", "tracking.enabled=false"]
    resolved, run_dir = load("digits", space), RunDir(tmp_path)
    trials = plan_trials(resolved)
    refused = Outcome(status="failed", reason="it needs as much as trial 000", failure="unschedulable")
    monkeypatch.setattr(run_trials, "measure_points", lambda *_: add(run_dir, ended("000", refused), ended("001", refused)))
    with Display() as display:
        session = session_of(resolved, run_dir, display)
        run_pending(session, trials, trials, local_capacity(), TeacherSource(None, ()))
        assert [row.reason for row in session.result.rows] == [refused.reason] * 2
        assert has_trials_to_retry(resolved.experiment, session.result.rows), "`distill resume` goes on"
        retry_trials(trials, session)
        assert [trial.outcome for trial in trials] == [None, None]


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        (["sweep.steps=8"], True),
        (["sweep.steps=null"], True),
        (["sweep.policy=guided"], True),
        (["sweep.metric=top1_pct"], False),
        (["sweep.steps=null", "scale.num_workers=[1, 2]"], False),
        (["sweep.steps=8", "scale.num_workers=[1, 2]"], True),
    ],
)
def test_trials_share_worker_groups_where_they_are_compared_by_speed_with_one_number_of_workers(
    tmp_path: Path, settings: list[str], shared: bool
) -> None:
    keys = ["data.loader_workers=1", "sweep.space={data.global_batch_size: [32, 64]}", *settings]
    resolved = load("digits", keys)
    with Display() as display:
        session = session_of(resolved, RunDir(tmp_path), display)
        assignments = assign(session, plan_trials(resolved), Cluster((Node("here", 8, 0),)), TeacherSource(None, ()))
    assert shares_workers(resolved.experiment.sweep, assignments.values()) is shared


@pytest.mark.parametrize(("steps", "can"), [("sweep.steps=8", True), ("sweep.steps=null", False)])
def test_workers_that_ran_another_stage_can_time_one_in_an_object_store_but_not_train_it(
    tmp_path: Path, steps: str, *, can: bool
) -> None:
    resolved = load("digits", ["data.loader_workers=1", "sweep.space={data.global_batch_size: [32]}", steps])
    with Display() as display:
        session = session_of(resolved, RunDir(tmp_path), display)
        [assignment] = assign(session, plan_trials(resolved), local_capacity(), TeacherSource(None, ())).values()
    store = RunStore(uri="s3://bucket/run", folder=str(tmp_path))
    assert replace(assignment, config=assignment.config.model_copy(update={"run_store": store})).can_follow_others is can
