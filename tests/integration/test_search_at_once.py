"""A guided sweep on a real cluster of two nodes with room for two groups of workers; its driver is killed on the way."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.runs.outcome import Outcome
from tests.integration.conftest import Distill, RayCluster, outcomes, records, result, wait_until
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

BATCHES = [32, 64, 96, 128, 192, 256]
KEYS = (
    "sweep.policy=guided",
    "sweep.steps=40",
    "sweep.max_concurrent=2",
    "data.last_batch=short",
    "student.model=resnet8",
    "data.image_size=32",  # some 100 ms a step: a probe takes seconds, as the other group's start does
    f"sweep.space={{scale.num_workers: [2], data.global_batch_size: {BATCHES}, data.loader_workers: [1]}}",
)


@pytest.fixture
def roomy() -> Iterator[RayCluster]:
    """Two nodes of four CPUs each: places for two groups of two workers, each of which takes two."""
    folder = Path(tempfile.mkdtemp(prefix="rd-"))
    nodes = RayCluster(folder, cpus=4)
    try:
        nodes.add()
        nodes.add()
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def workers(cluster: RayCluster) -> list[psutil.Process]:
    return [worker for node in cluster.nodes for worker in node.workers()]


def first(run: Path) -> dict[str, Outcome]:
    """The first measurement of each point, without those that may follow it."""
    return {trial: outcome.each_measurement[0] for trial, outcome in outcomes(run).items()}


def test_two_groups_of_workers_measure_at_the_same_time_and_a_killed_driver_loses_only_what_they_were_at(
    distill: Distill, roomy: RayCluster
) -> None:
    run = distill.runs / "at-once"
    command = distill.start(
        "sweep", distill.experiment, "--out", run, *(a for key in KEYS for a in ("--set", key)), env=roomy.env
    )
    wait_until(lambda: outcomes(run) and len(workers(roomy)) == 4, "point, and two groups", command)
    orphans = workers(roomy)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    _, left = psutil.wait_procs(orphans, timeout=60)
    assert not left  # the cluster stays; what ran for this driver has gone
    before = first(run)
    assert len(before) < len(BATCHES)

    output = distill.run("resume", run, env=roomy.env)
    assert {trial: outcome for trial, outcome in first(run).items() if trial in before} == before
    assert f"{len(before)} already decided" in output
    found = result(run)
    assert found["status"] == "complete"
    assert found["search"]["why"] in output
    assert {row["status"] for row in found["trials"]} <= {"ok", "untested"}
    measured = [row for row in found["trials"] if row["status"] == "ok"]
    # A point that one group is at is believed to be measured: none is begun twice at a time.
    assert all(len(records(RunDir(run).trial(row["id"]).root, "start")) == 1 for row in measured)
    assert found["best"]["id"] in {row["id"] for row in measured}
