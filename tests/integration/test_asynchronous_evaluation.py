"""`eval.asynchronous` on a real cluster: an evaluator that dies, a run that dies with an evaluation pending, and no room."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.config.experiment import load
from tests.integration.conftest import Command, Distill, RayCluster, family, kill, records, title, wait_until
from tests.trainables.jobs import equal, train
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.errors import CheckpointError
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration
STEPS, EPOCHS = 22, 20
SETS = ["student.model=convnet_small", f"optim.epochs={EPOCHS}", "train.log_every=1", "eval.asynchronous=true"]


def evaluators(cluster: RayCluster) -> list[psutil.Process]:
    return [process for node in cluster.nodes for process in family(node.process) if "ray::EvaluationActor" in title(process)]


def waits_for_evaluation(run: Path) -> bool:
    """Whether the epoch after the one that is evaluated is trained to its end."""
    try:
        progress = checkpoint.read_metadata(RunDir(run).stage("student").last)["progress"]
    except CheckpointError:
        return False
    return bool(progress["evaluation_pending"]) and records(run, "step")[-1]["step"] == (progress["epoch"] + 1) * STEPS


def stopped_evaluator(cluster: RayCluster, run: Path, command: Command, number: int) -> psutil.Process:
    """The evaluator, the first or second of the run, which stands still while the training waits for it."""
    log = RunDir(run).stage("student").log
    started = "eval.asynchronous: one more worker of 2 CPU evaluates"
    wait_until(lambda: log.exists() and log.read_text().count(started) == number, f"evaluator {number}", command)
    (evaluator,) = evaluators(cluster)
    evaluator.suspend()
    wait_until(lambda: waits_for_evaluation(run), "an evaluation that is waited for", command)
    return evaluator


def validations(events: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: value for name, value in event.items() if name.startswith("val/")} for event in events]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evaluator_and_then_a_whole_run_that_are_killed_in_an_evaluation_change_nothing(
    distill: Distill, cluster: RayCluster, ranks: RankPool
) -> None:
    run, whole = distill.runs / "killed", distill.runs / "whole"
    command = distill.start(
        "train", distill.experiment, "--out", run, *(part for each in SETS for part in ("--set", each)), env=cluster.env
    )
    kill([stopped_evaluator(cluster, run, command, 1)])
    evaluator = stopped_evaluator(cluster, run, command, 2)
    assert "eval.asynchronous: its worker has died" in RunDir(run).stage("student").log.read_text()
    driver = command.family()
    os.kill(command.process.pid, signal.SIGKILL)
    kill([*driver, evaluator, *(worker for node in cluster.nodes for worker in node.workers())])
    distill.run("resume", run, env=cluster.env)
    assert not records(run, "restart")
    assert [event["step"] for event in records(run, "epoch")] == [STEPS * epoch for epoch in range(1, EPOCHS + 1)]
    experiment = load(str(distill.experiment), [*SETS, "eval.asynchronous=false"]).experiment
    undisturbed = ranks.run(1, train, experiment.stage("student", RunDir(whole).stage("student").root, {}))[0]
    assert validations([event["metrics"] for event in records(run, "epoch")]) == validations(undisturbed["progress"].history)
    assert equal(*(checkpoint.read(RunDir(each).stage("student").best)[0] for each in (run, whole)))


@pytest.mark.slow
def test_a_cluster_without_room_for_an_evaluator_is_named_once_and_the_workers_evaluate(
    distill: Distill, cluster: RayCluster
) -> None:
    run = distill.runs / "full"
    sets = [*SETS, "optim.epochs=3", "scale.num_workers=2", "data.loader_workers=2"]  # 3 CPUs each: all of both nodes
    distill.run("train", distill.experiment, "--out", run, *(part for each in sets for part in ("--set", each)), env=cluster.env)
    assert all("val/top1_pct" in event["metrics"] for event in records(run, "epoch"))
    line = "eval.asynchronous: no node has 3 CPU free for an evaluation: the workers evaluate until one has"
    assert RunDir(run).stage("student").log.read_text().count(line) == 1
