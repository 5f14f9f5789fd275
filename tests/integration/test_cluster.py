"""One experiment on a real cluster of two Ray nodes: workers on both, a node's death, tokens, a storage that is not shared."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter

import psutil
import pytest

from tests.integration.conftest import Distill, RayCluster, records, result, wait_until

pytestmark = pytest.mark.integration

TWO = ("--set", "scale.num_workers=2")


def can_make_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def test_two_workers_of_one_run_sit_on_both_nodes_and_train_to_the_end(distill: Distill, cluster: RayCluster) -> None:
    run = distill.runs / "both"
    # A node has 3 CPUs and a worker takes 2, its own and its loader's: no node holds both.
    command = distill.start("train", distill.experiment, "--out", run, *TWO, "--set", "optim.epochs=20", env=cluster.env)
    wait_until(lambda: records(run, "step"), "first step", command)
    assert [len(node.workers()) for node in cluster.nodes] == [1, 1]
    assert command.end() == 0, command.output
    found = result(run)
    assert found["status"] == "complete"
    assert found["stages"][0]["status"] == "ok"
    assert found["stages"][0]["restarts"] == 0
    assert found["stages"][0]["metrics"]["top1_pct"] > 90
    assert {"node0/gpus", "node1/gpus"} <= found["stages"][0]["metrics"].keys()


def test_a_run_outlives_a_node_and_loses_at_most_the_steps_since_its_last_checkpoint(
    distill: Distill, cluster: RayCluster
) -> None:
    run = distill.runs / "death"
    sets = ("--set", "optim.epochs=16", "--set", "train.checkpoint_every=4", "--set", "train.log_every=1")
    command = distill.start("train", distill.experiment, "--out", run, *TWO, *sets, env=cluster.env)
    wait_until(lambda: len(records(run, "epoch")) >= 3, "third epoch", command)
    cluster.kill(cluster.nodes[1])
    at_death = records(run, "step")[-1]["step"]
    cluster.add()
    assert command.end() == 0, command.output
    found = result(run)["stages"][0]
    assert (found["status"], found["restarts"], found["metrics"]["steps"]) == ("ok", 1, 16 * 22)
    first, again = records(run, "start")
    assert first["step"] == 0
    # A checkpoint every 4 steps; the record of a step may be a step or two ahead of what rank 0 has on disk.
    assert at_death - 6 <= again["step"] <= at_death + 2
    counts = Counter(line["step"] for line in records(run, "step"))
    assert sorted(counts) == list(range(1, 16 * 22 + 1))
    assert set(counts.values()) == {1}
    assert [line["epoch"] for line in records(run, "epoch")] == list(range(1, 17))
    assert "going on from the last checkpoint (restart 1 of at most 3)" in command.output


def test_without_the_clusters_token_a_driver_is_refused_in_time(distill: Distill, cluster: RayCluster) -> None:
    wrong = distill.folder / "wrong-token"
    wrong.write_text("0" * 64)
    began = time.monotonic()
    said = distill.run("train", distill.experiment, code=2, env={**cluster.env, "RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert time.monotonic() - began < 20
    assert "RAY_AUTH_TOKEN_PATH" in said.splitlines()[-1]


def test_an_address_where_no_ray_listens_is_refused_in_time(distill: Distill) -> None:
    began = time.monotonic()
    said = distill.run("train", distill.experiment, code=2, env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert time.monotonic() - began < 20
    assert "error: no Ray at 127.0.0.1:1: Connection refused" in said


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and mount namespaces")
def test_a_storage_path_that_a_node_does_not_share_is_refused_by_name(distill: Distill, cluster: RayCluster) -> None:
    distill.runs.mkdir()
    blind = cluster.add(["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(distill.runs)])
    try:
        said = distill.run("train", distill.experiment, code=2, env=cluster.env)
        assert "is not shared: node" in said
        assert f"({blind.address}) does not see it; give a shared folder with --runs" in said
        assert len(said.splitlines()) <= 6
    finally:
        cluster.remove(blind)


def test_a_local_run_listens_on_loopback_alone(distill: Distill) -> None:
    run = distill.runs / "local"
    command = distill.start("train", distill.experiment, "--out", run, *TWO, "--set", "optim.epochs=30")
    seen: dict[str, set[str]] = {}
    while command.process.poll() is None:
        for process in command.family():
            try:
                name, sockets = process.name(), process.net_connections("inet")
            except psutil.Error:  # it has ended
                continue
            for connection in sockets:
                if connection.status == psutil.CONN_LISTEN:
                    seen.setdefault(name, set()).add(connection.laddr.ip)
        time.sleep(0.2)
    assert command.process.returncode == 0, command.output
    assert {"gcs_server", "raylet"} <= seen.keys()
    assert any("RayTrainWork" in name for name in seen)
    outer = {name: ips for name, ips in seen.items() if not ips <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}}
    assert outer == {}
