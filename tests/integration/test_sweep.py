"""A real sweep on a Ray of its own: what cannot run is a row, and a killed driver's sweep goes on where it was."""

import contextlib
import json
import os
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest

from service.runs.events import event
from tests.integration.conftest import Distill, kill, outcomes, records, result, title, wait_until
from tests.run_log import add, events_of
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration


@pytest.mark.skipif(psutil.virtual_memory().total > 48e9, reason="this machine has the memory that the test means to exceed")
@pytest.mark.slow
def test_what_runs_out_of_memory_or_never_fits_is_a_row_and_the_sweep_goes_on(distill: Distill) -> None:
    run = distill.runs / "rows"
    # The first layer of this network on images of 4096 pixels takes 51 GB.
    space = "sweep.space={data.image_size: [4096, 8], data.loader_workers: [1, 100000]}"
    sets = ("--set", "student.model=mlp_large", "--set", "sweep.steps=5", "--set", space)
    output = distill.run("sweep", distill.experiment, "--out", run, *sets)
    rows = {(row["params"]["data.image_size"], row["params"]["data.loader_workers"]): row for row in result(run)["trials"]}
    assert {point: row["status"] for point, row in rows.items()} == {
        (4096, 1): "oom",
        (8, 1): "ok",
        (4096, 100000): "infeasible",
        (8, 100000): "infeasible",
    }
    assert "allocate" in rows[4096, 1]["reason"]
    assert "1 worker needs" in rows[8, 100000]["reason"]
    assert rows[8, 1]["metrics"]["images_per_s"] > 0
    assert rows[8, 1]["kind"] == "timing"
    assert result(run)["best"]["id"] == rows[8, 1]["id"]
    assert "2 trials to run, 2 already decided" in output


@pytest.mark.slow
def test_a_trial_whose_worker_is_killed_is_begun_again_or_is_a_row(distill: Distill) -> None:
    run = distill.runs / "deaths"
    sets = ("--set", "sweep.space={scale.max_failures: [1, 0]}", "--set", "optim.epochs=12", "--set", "train.log_every=1")
    command = distill.start("sweep", distill.experiment, "--out", run, *sets)
    for trial in ("000", "001"):
        folder = RunDir(run).trial(trial).root
        wait_until(lambda folder=folder: len(records(folder, "epoch")) >= 2, f"second epoch of {trial}", command)
        kill(command.workers())
    assert command.end() == 0, command.output
    again, lost = result(run)["trials"]
    assert (again["status"], again["restarts"], again["metrics"]["steps"]) == ("ok", 1, 12 * 22)
    assert (lost["status"], lost["restarts"]) == ("failed", 0)
    assert lost["reason"].startswith("a worker died: ")
    assert result(run)["best"]["id"] == "000"
    steps = [line["step"] for line in records(RunDir(run).trial("000").root, "step")]
    assert steps == list(range(1, 12 * 22 + 1))


def test_a_killed_drivers_sweep_resumes_without_running_finished_trials_again(distill: Distill) -> None:
    run = distill.runs / "killed"
    keys = ("sweep.space={data.global_batch_size: [32, 64]}", "sweep.steps=500", "tracking.enabled=true")
    sets = [part for key in keys for part in ("--set", key)]
    command = distill.start("sweep", distill.experiment, "--out", run, *sets)
    wait_until(lambda: "000" in outcomes(run), "first trial", command)
    # Nobody cleans up after a SIGKILL but Ray's own watchers; its two agents a node take a minute to go, and hold nothing.
    orphans = [process for process in command.family()[1:] if "Agent" not in title(process)]
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    _, left = psutil.wait_procs(orphans, timeout=60)
    assert not left
    written = outcomes(run)["000"]
    assert result(run)["status"] == "running"
    assert "continue it with: distill resume" in distill.run("report", run)

    output = distill.run("resume", run)
    assert outcomes(run)["000"] == written
    found = result(run)
    assert found["status"] == "complete"
    assert [row["status"] for row in found["trials"]] == ["ok"] * 2
    assert "1 trials to run, 1 already decided" in output
    assert not leftovers(run)
    # MLflow has the end of every trial once, also of the one whose driver died before it could say so.
    with contextlib.closing(sqlite3.connect(distill.runs / "mlflow.db")) as store:
        assert store.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)] * 3
        assert store.execute("SELECT count(*) FROM metrics WHERE key = 'epoch_s' GROUP BY run_uuid").fetchall() == [(1,)] * 3
        trials = store.execute("SELECT run_uuid FROM runs WHERE name IN ('000 batch=32', '001 batch=64')").fetchall()
        assert len(trials) == 2
        for trial in trials:
            # Each number under one name and once a step; the first of them is what MLflow's compare page opens on.
            named = [name for (name,) in store.execute("SELECT key FROM latest_metrics WHERE run_uuid = ? ORDER BY rowid", trial)]
            assert named[0] == "images_per_s"
            assert 10 < len([name for name in named if not name.startswith("system/")]) <= 40
            per_step = "SELECT max(n) FROM (SELECT count(*) n FROM metrics WHERE run_uuid = ? GROUP BY key, step)"
            assert store.execute(per_step, trial).fetchall() == [(1,)]
        tagged = "SELECT name, value FROM tags JOIN runs USING (run_uuid) WHERE key = ?"
        best = f"{found['best']['id']} batch={found['best']['params']['data.global_batch_size']}"
        assert store.execute(tagged, ("raydistill.winner",)).fetchall() == [(best, "true")]
        notes = dict(store.execute(tagged, ("mlflow.note.content",)))
        assert notes.keys() == {"killed", best}
        assert {text.partition(" with ")[0] for text in notes.values()} == {f"best: trial {found['best']['id']}"}
        # The views of the experiment, and what each run is trained on, once, also where a resumed driver has said so again.
        views = store.execute("SELECT value FROM experiment_tags WHERE key LIKE 'mlflow.sharedViewState.%'").fetchall()
        assert sorted(json.loads(view)["name"] for (view,) in views) == ["Charts by batch", "Trials by batch"]
        (profile,) = store.execute("SELECT dataset_profile FROM datasets WHERE length(digest) <= 36").fetchone()
        assert json.loads(profile) == {"classes": 10, "train_images": 1442, "val_images": 355}
        inputs = "SELECT count(*) FROM inputs WHERE source_type = 'DATASET' GROUP BY destination_id"
        assert store.execute(inputs).fetchall() == [(1,)] * 3
    assert output.count("viewStateShareKey=") == 2


GUIDED = (
    "sweep.policy=guided",
    "sweep.steps=12",
    "data.last_batch=short",
    "sweep.space={scale.num_workers: [1, 2], data.global_batch_size: [32, 64, 128, 256], data.loader_workers: [1, 2]}",
)


def sets(*keys: str) -> list[str]:
    return [part for key in keys for part in ("--set", key)]


@pytest.mark.slow
def test_a_guided_sweep_measures_few_points_on_few_starts_and_says_why_it_stopped(distill: Distill) -> None:
    run = distill.runs / "guided"
    output = distill.run("sweep", distill.experiment, "--out", run, *sets(*GUIDED, "tracking.enabled=true"))
    found = result(run)
    measured = [row for row in found["trials"] if row["status"] == "ok"]
    assert len(found["trials"]) == 16
    assert {row["status"] for row in found["trials"]} <= {"ok", "untested"}  # on a noisy machine all 16 may be tried
    each = [one for row in measured for one in row.get("measurements", [row])]
    assert len([one for one in each if one["start_s"] != 0]) < len(each)
    assert all(8 <= len(one["steps_s"]) <= 12 for one in each)
    again = len(found["best"].get("measurements", ()))
    assert f"measured {again} times" in output  # nothing is called the best for one measurement
    assert found["best"]["id"] in {row["id"] for row in measured}
    assert found["search"]["why"] in output
    # What was measured is in MLflow, each point as a run of its own; what was not is not.
    with contextlib.closing(sqlite3.connect(distill.runs / "mlflow.db")) as store:
        assert store.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)] * (1 + len(measured))
        speeds = store.execute("SELECT value FROM metrics WHERE key = 'images_per_s' ORDER BY value").fetchall()
    assert {round(row["metrics"]["images_per_s"], 1) for row in measured} <= {speed for (speed,) in speeds}


@pytest.mark.slow
@pytest.mark.parametrize("measurement", [1, 2])
def test_a_killed_guided_sweep_goes_on_with_what_it_knows(distill: Distill, measurement: int) -> None:
    run = distill.runs / "killed-guided"
    command = distill.start("sweep", distill.experiment, "--out", run, *sets(*GUIDED))

    def is_under_way() -> bool:
        """Two points were measured, or one is being measured again."""
        again = run.glob("trials/*/student-2")
        return len(outcomes(run)) >= 2 if measurement == 1 else any(events_of(folder, "start") for folder in again)

    wait_until(is_under_way, "what is to be cut short", command)
    family = command.family()[1:]
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    psutil.wait_procs([process for process in family if "Agent" not in title(process)], timeout=60)
    before = outcomes(run)
    output = distill.run("resume", run)
    for trial, earlier in before.items():  # what was measured stands; the point may have been measured again
        known = earlier.each_measurement
        assert outcomes(run)[trial].each_measurement[: len(known)] == known
    assert f"{len(before)} already decided" in output
    assert result(run)["status"] == "complete"
    assert result(run)["search"]["bound_pct"] >= 0
    assert {row["status"] for row in result(run)["trials"]} <= {"ok", "untested"}  # what the kill cut short was no failure
    assert not leftovers(run)


@pytest.mark.slow
def test_a_point_of_a_guided_sweep_whose_workers_are_killed_has_its_restart_and_their_start(distill: Distill) -> None:
    run = distill.runs / "guided-deaths"
    space = "sweep.space={scale.num_workers: [2], data.global_batch_size: [32, 64, 128, 256], data.loader_workers: [1]}"
    budget = "sweep.budget_grid_share=5"  # by default a start that takes long on a busy machine ends the search
    command = distill.start("sweep", distill.experiment, "--out", run, *sets(*GUIDED[:3], space, budget))
    wait_until(lambda: outcomes(run), "end of a measurement", command)
    kill(command.workers())  # which are at another point by now
    assert command.end() == 0, command.output
    each = [one for row in result(run)["trials"] for one in row["measurements"] or [row] if one["status"] != "untested"]
    assert {one["status"] for one in each} == {"ok"}
    (restarted,) = [one for one in each if one["restarts"]]
    assert restarted["restarts"] == 1
    assert 0 < restarted["start_s"] < restarted["seconds"]


@pytest.mark.slow
def test_a_point_of_a_guided_sweep_that_runs_out_of_memory_is_a_row_and_the_search_goes_on(distill: Distill) -> None:
    run = distill.runs / "guided-oom"
    # The first layer of this network on images of 4096 pixels takes 51 GB.
    space = "sweep.space={data.image_size: [4096, 8], data.global_batch_size: [32, 64]}"
    distill.run("sweep", distill.experiment, "--out", run, *sets("student.model=mlp_large", "sweep.policy=guided", space))
    rows = result(run)["trials"]
    assert "oom" in {row["status"] for row in rows if row["params"]["data.image_size"] == 4096} <= {"oom", "untested"}
    assert "ok" in {row["status"] for row in rows if row["params"]["data.image_size"] == 8}
    assert result(run)["best"]["params"]["data.image_size"] == 8


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_sweep_by_time_to_accuracy_probes_speeds_and_trains_the_few_that_may_win(distill: Distill) -> None:
    run = distill.runs / "time"
    keys = ("sweep.metric=time_to_accuracy", "sweep.target_pct=80", "optim.epochs=12", "tracking.enabled=true")
    space = "sweep.space={scale.num_workers: [2], data.global_batch_size: [32, 64, 128], data.loader_workers: [1]}"
    command = distill.start("sweep", distill.experiment, "--out", run, *sets(*GUIDED[:3], *keys, space))
    assert command.end(800) == 0, command.output
    output, found = command.output, result(run)
    trained = [row for row in found["trials"] if row["speed_trial"]]
    assert 1 <= len(trained) <= 4
    assert {row["kind"] for row in trained} == {"accuracy"}
    assert found["best"] in trained
    reached = [row["metrics"]["time_to_accuracy_s"] for row in trained if row["status"] == "ok"]
    assert found["best"]["metrics"]["time_to_accuracy_s"] == min(reached)
    assert found["best"]["metrics"]["top1_pct"] >= 80
    assert all("top-1" in row["reason"] for row in trained if row["status"] == "stopped")
    assert found["search"]["why"] in output
    # Once more, and nothing is trained again.
    before = outcomes(run)
    add(RunDir(run), event("session_ended", status="interrupted", reason=""))
    distill.run("resume", run)
    assert outcomes(run) == before
    assert result(run)["best"]["id"] == found["best"]["id"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_by_time_whose_driver_is_killed_goes_on_from_the_trainings_checkpoint(distill: Distill) -> None:
    run = distill.runs / "killed-training"
    keys = ("sweep.metric=time_to_accuracy", "sweep.target_pct=80", "optim.epochs=60", "optim.lr=0.001", "tracking.enabled=true")
    space = "sweep.space={scale.num_workers: [1], data.global_batch_size: [16, 32, 64], data.loader_workers: [1]}"
    command = distill.start("sweep", distill.experiment, "--out", run, *sets(*GUIDED[:3], *keys, space))

    def under_way() -> RunDir | None:
        trained = (RunDir(path) for path in run.glob("trials/*-trained"))
        return next((trial for trial in trained if len(records(trial.root, "epoch")) >= 3), None)

    trial = wait_until(under_way, "third epoch of a training to the target", command)
    orphans = [process for process in command.family()[1:] if "Agent" not in title(process)]
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    psutil.wait_procs(orphans, timeout=60)
    before = outcomes(run)
    assert trial.root.name not in before
    done = len(records(trial.root, "epoch"))

    output = distill.run("resume", run)
    assert {name: outcome for name, outcome in outcomes(run).items() if name in before} == before
    assert f"{len(before)} already decided" in output
    assert [line["step"] for line in records(trial.root, "start")] == [0]
    (again,) = records(trial.root, "resume")
    assert again["epoch"] - done in (0, 1)  # the kill may come between an epoch's checkpoint and its record
    epochs = [line["epoch"] for line in records(trial.root, "epoch")]
    assert epochs == [*range(1, len(epochs) + 1)]
    found = result(run)
    assert found["status"] == "complete"
    assert {row["status"] for row in found["trials"]} <= {"ok", "stopped", "untested"}
    again_trained = next(row for row in found["trials"] if row["id"] == trial.root.name)
    assert again_trained["status"] == "ok"
    before_s = sum(record["metrics"]["epoch/train_s"] for record in records(trial.root, "epoch")[:done])
    assert again_trained["metrics"]["time_to_accuracy_s"] >= before_s
    assert found["best"]["metrics"]["top1_pct"] >= 80
    assert found["search"]["why"] in output
    assert not leftovers(run)
    with contextlib.closing(sqlite3.connect(distill.runs / "mlflow.db")) as store:
        ran = [row for row in found["trials"] if row["status"] != "untested"]
        assert store.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)] * (1 + len(ran))


def leftovers(run: Path) -> list[Path]:
    """Temporary files that a death may leave beside what it was writing."""
    return list(run.rglob(".*.tmp"))
