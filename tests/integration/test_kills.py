"""Processes of a run that are killed: each event is once in its log, and the weights are those of a run that nobody killed."""

import os
import signal
from collections import Counter

import pytest

from service.config.experiment import load
from tests.integration.conftest import PROJECT, Distill, kill, records, result, title, wait_until
from tests.run_log import events_of
from tests.trainables.jobs import equal, train, write_able_teacher
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SETS = ["optim.epochs=16", "train.checkpoint_every=5", "train.log_every=1", "scale.num_workers=2", "scale.max_failures=2"]
KILLED_AT_CHECKPOINTS = """
import os, signal, sys

renamed = 0

def die_once(moment):
    try:
        os.close(os.open(os.path.join("{FOLDER}", moment), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def on_event(event, arguments):
    global renamed
    if event == "os.rename" and str(arguments[1]).endswith("/checkpoints/last.safetensors"):
        renamed += 1
        if renamed == 3:
            die_once("before-the-rename")
    elif event == "open" and renamed == 5 and str(arguments[0]).endswith("/checkpoints"):
        die_once("between-the-rename-and-the-event")

sys.addaudithook(on_event)
"""
"""Run by every process: a worker dies in its third checkpoint, and the next one in its fifth, whose folder it is to fsync."""


@pytest.mark.timeout(480)
def test_workers_a_recorder_and_a_driver_that_are_killed_lose_and_repeat_nothing(distill: Distill, ranks: RankPool) -> None:
    run, whole, kills = distill.runs / "killed", distill.runs / "whole", distill.folder / "kills"
    kills.mkdir()
    (kills / "sitecustomize.py").write_text(KILLED_AT_CHECKPOINTS.replace("{FOLDER}", str(kills)))
    sets = [*SETS, f"teacher={{model: mlp_large, weights: {write_able_teacher(distill.folder / 'teacher.safetensors')}}}"]
    words = ("train", distill.experiment, "--out", run, *(part for each in sets for part in ("--set", each)))
    command = distill.start(*words, env={"PYTHONPATH": f"{kills}{os.pathsep}{PROJECT}"})
    for number in (1, 2):
        wait_until(lambda number=number: len(records(run, "resume")) == number, f"restart {number}", command)
    steps = len(records(run, "step"))
    wait_until(lambda: len(records(run, "step")) > steps, "another step", command)
    (recorder,) = (each for each in command.family() if "ray::Recorder" in title(each))
    recorder.kill()
    steps = len(records(run, "step"))
    wait_until(lambda: len(records(run, "step")) > steps + 20, "20 more steps", command)
    family = command.family()
    os.kill(command.process.pid, signal.SIGKILL)
    kill(family)
    assert result(run)["status"] == "running"
    # A recorder is awaited: only the deaths of workers have ended an attempt.
    assert {event["failure"]["kind"] for event in records(run, "restart")} == {"worker_died"}
    distill.run("resume", run)
    (stage,) = result(run)["stages"]
    assert stage["status"] == "ok"
    assert len(records(run, "restart")) == 2
    events = events_of(RunDir(run).stage("student").root, "start", "step", "epoch", "summary", "checkpoint")
    assert set(Counter((event["kind"], event["step"]) for event in events).values()) == {1}
    assert [line["step"] for line in records(run, "step")] == list(range(1, 16 * 22 + 1))
    saved = [22 * epoch + step for epoch in range(16) for step in (5, 10, 15, 20, 22)]
    assert [line["step"] for line in records(run, "checkpoint")] == saved
    experiment = load(str(distill.experiment), sets).experiment
    ranks.run(2, train, experiment.stage("student", RunDir(whole).stage("student").root, {}))
    assert equal(*(checkpoint.read(RunDir(each).stage("student").last)[0] for each in (run, whole)))
