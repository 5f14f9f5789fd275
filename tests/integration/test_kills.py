"""Processes of a run that are killed: each event is once in its log, and the weights are those of a run that nobody killed."""

import os
import signal
from collections import Counter

import pytest

from service.config.experiment import load
from tests.integration.conftest import Distill, kill, records, result, title, wait_until
from tests.run_log import events_of
from tests.trainables.jobs import equal, train, write_able_teacher
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SETS = ["optim.epochs=8", "train.checkpoint_every=5", "train.log_every=1", "scale.num_workers=2"]


@pytest.mark.timeout(480)
def test_a_recorder_and_a_driver_that_are_killed_lose_and_repeat_nothing(distill: Distill, ranks: RankPool) -> None:
    run, whole = distill.runs / "killed", distill.runs / "whole"
    sets = [*SETS, f"teacher={{model: mlp_large, weights: {write_able_teacher(distill.folder / 'teacher.safetensors')}}}"]
    command = distill.start("train", distill.experiment, "--out", run, *(part for each in sets for part in ("--set", each)))
    wait_until(lambda: len(records(run, "step")) > 20, "step 20", command)
    (recorder,) = (each for each in command.family() if "ray::Recorder" in title(each))
    recorder.kill()
    wait_until(lambda: records(run, "restart"), "restart", command)
    steps = len(records(run, "step"))
    wait_until(lambda: len(records(run, "step")) > steps + 40, "40 more steps", command)
    family = command.family()
    os.kill(command.process.pid, signal.SIGKILL)
    kill(family)
    assert result(run)["status"] == "running"
    distill.run("resume", run)
    (stage,) = result(run)["stages"]
    assert stage["status"] == "ok"
    (restart,) = records(run, "restart")
    assert restart["failure"]["message"] == "the process that writes the run's log has died"
    events = events_of(RunDir(run).stage("student").root, "start", "step", "epoch", "summary", "checkpoint")
    assert set(Counter((event["kind"], event["step"]) for event in events).values()) == {1}
    assert [line["step"] for line in records(run, "step")] == list(range(1, 8 * 22 + 1))
    experiment = load(str(distill.experiment), sets).experiment
    ranks.run(2, train, experiment.stage("student", RunDir(whole).stage("student").root, {}))
    assert equal(*(checkpoint.read(RunDir(each).stage("student").last)[0] for each in (run, whole)))
