"""`data.global_batch_size: auto` on a Ray of its own: batches are timed first, and a killed driver's run goes on from there."""

import contextlib
import sqlite3

import pytest

from service.config.batch_size import TIMED
from service.config.experiment import read_resolved
from service.runs.run_log import read_log
from tests.integration.conftest import PATIENCE_S, Distill, kill, outcomes, records, result, wait_until
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1000)]  # it starts Ray four times


def test_a_training_times_batches_first_and_a_killed_one_goes_on_with_those_that_are_left(distill: Distill) -> None:
    run = distill.runs / "auto"
    sweep = RunDir(run).batch_size
    sets = ["data.global_batch_size=auto", "data.path=synthetic", "data.synthetic_images=512", "teacher={model: mlp_small}"]
    options = [part for each in (*sets, "teacher.epochs=1", "tracking.enabled=true") for part in ("--set", each)]
    command = distill.start("train", distill.experiment, "--out", run, *options)
    wait_until(lambda: outcomes(sweep), "a timed batch", command)
    kill(command.family())
    before = {trial: outcome.ended_s for trial, outcome in outcomes(sweep).items()}
    assert read_resolved(RunDir(run).experiment).experiment.data.global_batch_size == "auto"

    command = distill.start("resume", run)
    assert command.end(3 * PATIENCE_S) == 0, command.output  # the timings, the teacher and the student
    assert "note: data.global_batch_size: auto is " in command.output
    assert before.items() <= {trial: outcome.each_measurement[0].ended_s for trial, outcome in outcomes(sweep).items()}.items()
    batch = read_resolved(RunDir(run).experiment).experiment.data.global_batch_size
    assert batch in (8, 16, 32)  # at most a sixteenth of the images
    assert result(run)["status"] == result(sweep)["status"] == "complete"
    assert records(run, "start")[0]["metrics"]["steps_per_epoch"] == 512 // batch
    assert records(sweep, "summary", f"teacher-{batch}")
    first, line = read_log(RunDir(run)).result.notices
    assert first == "data.global_batch_size: auto: timing 8, 16, 32 first"
    assert line.startswith(f"data.global_batch_size: auto is {batch}, the smallest batch within 2.5% of the most images/s (8: ")
    assert result(run)["sources"]["data.global_batch_size"] == TIMED
    assert not list(sweep.rglob("*.safetensors"))
    distill.run("sync", run)
    with contextlib.closing(sqlite3.connect(distill.runs / "mlflow.db")) as store:
        assert store.execute("SELECT name, status FROM runs").fetchall() == [("auto", "FINISHED")]
        sent = store.execute("SELECT value FROM params WHERE key = 'data.global_batch_size'").fetchall()
        assert sent == [(str(batch),)]
