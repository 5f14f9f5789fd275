"""A run on a Ray of its own: it listens on loopback alone, Ctrl-C ends it cleanly, resumed it ends with a whole one's bits."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from service.config.experiment import load
from tests.integration.conftest import Command, Distill, name_of, records, result, title, wait_until
from tests.service.tracking.store import query
from tests.trainables.jobs import equal, train, write_able_teacher
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration


STATUSES = """SELECT substr(value, 34), status FROM runs JOIN tags USING (run_uuid) WHERE key = 'raydistill.key'"""
SETS = ["optim.epochs=8", "train.checkpoint_every=5", "train.log_every=1", "scale.num_workers=2"]


@dataclass
class Interrupted:
    """A run that was interrupted, and on which addresses it listened."""

    distill: Distill
    run: Path
    sets: list[str]
    command: Command
    listeners: dict[str, set[str]]
    """The addresses on which its processes listened, by their names."""
    code: int
    left: list[psutil.Process]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    """A run on a Ray of its own, watched until it is under way and then interrupted."""
    distill = Distill(tmp_path_factory.mktemp("interrupted"))
    run = distill.runs / "pieces"
    listeners: dict[str, set[str]] = {}
    with contextlib.closing(distill):
        sets = [*SETS, f"teacher={{model: mlp_large, weights: {write_able_teacher(distill.folder / 'teacher.safetensors')}}}"]
        command = distill.start("train", distill.experiment, "--out", run, *(part for each in sets for part in ("--set", each)))
        while not records(run, "start"):
            assert command.process.poll() is None, command.output
            add_listeners(command, listeners)
            time.sleep(0.5)
        wait_until(lambda: len(records(run, "step")) > 40, "step 40", command)
        add_listeners(command, listeners)
        family = command.family()[1:]
        os.kill(command.process.pid, signal.SIGINT)
        code = command.end(30)
        _, left = psutil.wait_procs(family, timeout=20)
        yield Interrupted(distill, run, sets, command, listeners, code, left)


def add_listeners(command: Command, addresses: dict[str, set[str]]) -> None:
    """Add, by process name, the addresses on which the command's processes listen now."""
    for process in command.family():
        with contextlib.suppress(psutil.Error):  # it may have ended
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.setdefault(process.name(), set()).add(connection.laddr.ip)


def test_a_local_run_listens_on_loopback_alone(interrupted: Interrupted) -> None:
    listeners = interrupted.listeners
    assert {"gcs_server", "raylet"} <= listeners.keys()
    assert any("RayTrainWork" in name for name in listeners)
    outer = {name: ips for name, ips in listeners.items() if not ips <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}}
    assert outer == {}


def test_an_interrupted_run_is_put_away_and_resumes_to_the_bits_of_a_whole_one(interrupted: Interrupted, ranks: RankPool) -> None:
    distill, pieces, whole = interrupted.distill, interrupted.run, interrupted.distill.runs / "whole"
    output = interrupted.command.output
    assert interrupted.code == 130, output
    assert not interrupted.left
    assert result(pieces)["status"] == "interrupted"
    assert f"interrupted; continue with: distill resume {pieces}" in output
    assert "Traceback" not in output

    resumed = distill.run("resume", pieces)
    assert result(pieces)["status"] == "complete"
    # The teacher was measured before the first step, is not again, and is in the run's results.
    (stage,) = result(pieces)["stages"]
    (teacher,) = stage["teachers"]
    line = f"teacher mlp_large: {teacher['top1_pct']:.2f}% top-1 on 355 validation images"
    assert teacher["top1_pct"] == stage["metrics"]["teacher_top1_pct"] > 85
    assert output.count(line) == RunDir(pieces).stage("student").log.read_text().count(line) == 1
    assert line in resumed
    assert line in RunDir(pieces).report.read_text()
    # The same job without Ray and without an interruption: the bits are the loop's own.
    experiment = load(str(distill.experiment), interrupted.sets).experiment
    ranks.run(2, train, experiment.stage("student", RunDir(whole).stage("student").root, {}))
    assert equal(*(checkpoint.read(RunDir(run).stage("student").last)[0] for run in (pieces, whole)))
    assert [line["step"] for line in records(pieces, "step")] == list(range(1, 8 * 22 + 1))


INTERRUPTED = """
import sys
from pathlib import Path
from service.cluster import local_ray
from service.cluster.connect import connect

try:
    with connect(1, Path(sys.argv[1])):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(local_ray.in_use(), flush=True)
    local_ray.exit_process(130)
"""


def test_an_interrupted_command_kills_its_ray_instead_of_shutting_it_down(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 130), done.stderr


STALE_ADDRESS = """
import os, signal, sys
from pathlib import Path
import ray
from ray.util.state import list_nodes
from service.cluster.connect import connect

signal.signal(signal.SIGTERM, signal.default_int_handler)
with connect(1, Path(sys.argv[1])):
    nodes = ray.get(ray.remote(list_nodes).remote(timeout=60))
    print([node.node_id for node in nodes] == [node["NodeID"] for node in ray.nodes()])
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ray_ignores_the_address_of_one_that_was_killed_and_sigterm_after_it_is_an_interruption(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as base:  # a socket's path is short
        stale = Path(base, "ray", "ray_current_cluster")
        stale.parent.mkdir()
        stale.write_text("192.0.2.2:6379")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": base}
        words = [sys.executable, "-c", STALE_ADDRESS, str(tmp_path)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout, done.returncode) == ("True\ninterrupted\n", 0), done.stderr


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_what_is_finished_and_resumes_to_a_whole_table(distill: Distill) -> None:
    run = distill.runs / "sweep"
    keys = ("sweep.space={data.global_batch_size: [32, 64]}", "optim.epochs=8", "tracking.enabled=true")
    sets = [part for key in keys for part in ("--set", key)]
    command = distill.start("sweep", distill.experiment, "--out", run, *sets)
    first, second = (RunDir(run).trial(trial) for trial in ("000", "001"))
    wait_until(
        lambda: records(first.root, "summary") and records(second.root, "epoch"), "first epoch of the second trial", command
    )
    family = command.family()[1:]
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.end(30) == 130
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    found = result(run)
    assert found["status"] == "interrupted"
    assert [row["status"] for row in found["trials"]] == ["ok", "pending"]
    assert sorted(query(distill.runs, STATUSES)) == [("sweep", "KILLED"), ("trial/000", "FINISHED"), ("trial/001", "KILLED")]
    assert f"interrupted; continue with: distill resume {run}" in command.output
    assert "Traceback" not in command.output
    attempts = records(first.root, "attempt")

    output = distill.run("resume", run)
    assert records(first.root, "attempt") == attempts
    assert [row["status"] for row in result(run)["trials"]] == ["ok", "ok"]
    assert {status for _, status in query(distill.runs, STATUSES)} == {"FINISHED"}
    assert "1 trials to run, 1 already decided" in output
    assert [line["epoch"] for line in records(second.root, "epoch")] == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [["raylet"], ["gcs_server"], ["gcs_server", "raylet"]], ids="+".join)
def test_a_run_whose_ray_is_killed_ends_at_once_with_one_line_and_can_be_resumed(distill: Distill, killed: list[str]) -> None:
    run = distill.runs / "lost"
    command = distill.start("train", distill.experiment, "--out", run, "--set", "optim.epochs=1000")
    wait_until(lambda: records(run, "epoch"), "first epoch", command)
    family = command.family()[1:]
    # Ray's two agents of a node that lost both take a minute to go, and hold nothing.
    others = [process for process in family if "Agent" not in title(process)]
    for process in family:
        if name_of(process) in killed:
            process.kill()
    assert command.end(30) == 2
    _, left = psutil.wait_procs(others, timeout=20)
    assert not left
    last = command.output.splitlines()[-1]
    assert last.startswith(f"error: Ray has ended: its process {killed[0]} was killed")
    assert last.endswith(f"continue with `distill resume {run}`")
    assert "Traceback" not in command.output
    assert result(run)["status"] == "interrupted"


@pytest.mark.slow
def test_a_command_whose_ray_is_killed_while_it_starts_ends_at_once_with_one_line(distill: Distill) -> None:
    command = distill.start("train", distill.experiment, "--out", distill.runs / "lost")
    # Ray asks the GCS whether its dashboard has started, again and again.
    wait_until(lambda: any("dashboard.py" in title(each) for each in command.family()), "start of Ray's dashboard", command)
    family = command.family()[1:]
    next(each for each in family if name_of(each) == "gcs_server").kill()
    assert command.end(40) == 2  # Ray waits for 60 s, and ends the process with code 1
    assert command.output.splitlines()[-1].startswith("error: Ray ")
    _, left = psutil.wait_procs([process for process in family if "Agent" not in title(process)], timeout=20)
    assert not left
    distill.run("resume", distill.runs / "lost")


@pytest.mark.slow
def test_a_worker_that_ray_kills_for_the_nodes_memory_is_out_of_memory_and_not_begun_again(distill: Distill) -> None:
    greedy = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "250"}
    output = distill.run("train", distill.experiment, "--set", "optim.epochs=100000", code=2, env=greedy)
    assert output.splitlines()[-1] == "error: the node ran out of memory: Ray killed a worker to save it"
    assert "restarting from the last checkpoint" not in output
