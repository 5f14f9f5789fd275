"""One experiment on a real cluster of two Ray nodes: workers on both, a node's death, tokens, a storage that is not shared."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.integration.conftest import Distill, RayCluster, kill, records, result, wait_until
from tests.trainables.data.photos import photo

pytestmark = pytest.mark.integration

TWO = ("--set", "scale.num_workers=2")


def can_make_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_a_run_on_both_nodes_outlives_one_of_them_and_loses_at_most_the_steps_since_its_last_checkpoint(
    distill: Distill, cluster: RayCluster
) -> None:
    run = distill.runs / "death"
    # A node has 3 CPUs and a worker takes 2, its own and its loader's: no node holds both.
    sets = ("--set", "optim.epochs=8", "--set", "train.checkpoint_every=4", "--set", "train.log_every=1")
    command = distill.start("train", distill.experiment, "--out", run, *TWO, *sets, env=cluster.env)
    wait_until(lambda: len(records(run, "epoch")) >= 3, "third epoch", command)
    assert [len(node.workers()) for node in cluster.nodes] == [1, 1]
    cluster.kill(cluster.nodes[1])
    at_death = records(run, "step")[-1]["step"]
    cluster.add()
    assert command.end() == 0, command.output
    assert result(run)["status"] == "complete"
    found = result(run)["stages"][0]
    assert {"node0/gpus", "node1/gpus"} <= found["metrics"].keys()
    assert (found["status"], found["restarts"], found["metrics"]["steps"]) == ("ok", 1, 8 * 22)
    first, again = *records(run, "start"), *records(run, "resume")
    assert first["step"] == 0
    # A checkpoint every 4 steps; the record of a step may be a step or two ahead of what rank 0 has on disk.
    assert at_death - 6 <= again["step"] <= at_death + 2
    counts = Counter(line["step"] for line in records(run, "step"))
    assert sorted(counts) == list(range(1, 8 * 22 + 1))
    assert set(counts.values()) == {1}
    assert [line["epoch"] for line in records(run, "epoch")] == list(range(1, 9))
    assert "restarting from the last checkpoint (restart 1 of at most 3)" in command.output


@pytest.mark.slow
def test_a_run_goes_on_with_the_nodes_that_are_left(distill: Distill, cluster: RayCluster) -> None:
    cluster.add()
    run = distill.runs / "left"
    command = distill.start("train", distill.experiment, "--out", run, *TWO, "--set", "optim.epochs=16", env=cluster.env)
    wait_until(lambda: len(records(run, "epoch")) >= 3, "third epoch", command)
    cluster.kill(next(node for node in cluster.nodes[1:] if node.workers()))
    assert command.end() == 0, command.output
    found = result(run)["stages"][0]
    assert (found["status"], found["restarts"], found["metrics"]["steps"]) == ("ok", 1, 16 * 22)


@pytest.mark.slow
def test_a_worker_that_dies_while_the_others_wait_for_it_at_the_start_is_begun_again(distill: Distill) -> None:
    run = distill.runs / "start"
    command = distill.start("train", distill.experiment, "--out", run, *TWO)
    kill(wait_until(command.workers, "worker", command)[:1])
    assert command.end() == 0, command.output
    found = result(run)["stages"][0]
    assert (found["status"], found["restarts"]) == ("ok", 1)
    assert "a worker died: " in command.output


def test_without_the_clusters_token_a_driver_is_refused_in_time(distill: Distill, cluster: RayCluster) -> None:
    wrong = distill.folder / "wrong-token"
    wrong.write_text("0" * 64)
    began = time.monotonic()
    output = distill.run("train", distill.experiment, code=2, env={**cluster.env, "RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert time.monotonic() - began < 60  # of which a busy machine takes most to start the command
    assert "RAY_AUTH_TOKEN_PATH" in output.splitlines()[-1]


def test_an_address_where_no_ray_listens_is_refused_in_time(distill: Distill) -> None:
    began = time.monotonic()
    output = distill.run("train", distill.experiment, code=2, env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert time.monotonic() - began < 60  # of which a busy machine takes most to start the command
    assert "error: no Ray at 127.0.0.1:1: Connection refused" in output


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and mount namespaces")
@pytest.mark.slow
def test_a_storage_path_that_a_node_does_not_share_is_refused_by_name(distill: Distill, cluster: RayCluster) -> None:
    distill.runs.mkdir()
    blind = cluster.add(["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(distill.runs)])
    try:
        output = distill.run("train", distill.experiment, code=2, env=cluster.env)
        assert "is not shared: node" in output
        assert f"({blind.address}) does not see it; give a shared folder with --runs, or s3://BUCKET/PREFIX" in output
        assert len(output.splitlines()) <= 6
        for part in ("train/a", "train/b", "val/a", "val/b"):
            (folder := distill.folder / "images" / part).mkdir(parents=True)
            photo(0).save(folder / "1.png")
        output = distill.run("pack", distill.folder / "images", distill.runs / "packed", code=2, env=cluster.env)
        assert "does not see it; name a folder that all nodes share, or unset RAY_ADDRESS to use this machine" in output
    finally:
        cluster.remove(blind)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and mount namespaces")
def test_a_folder_for_logits_that_a_node_cannot_write_is_refused_before_the_teacher_is_trained(
    distill: Distill, cluster: RayCluster
) -> None:
    logits = distill.folder / "logits"
    logits.mkdir()
    read_only = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    node = cluster.add(["unshare", "-m", "sh", "-c", read_only, str(logits)])
    try:
        teacher = ("--set", "teacher.model=convnet_small", "--set", f"teacher.cache={logits}")
        output = distill.run("train", distill.experiment, *teacher, code=2, env=cluster.env)
        assert f"teacher.cache: {logits} cannot be written by node" in output
        assert f"({node.address})" in output
        assert "teacher epoch" not in output
        assert not list(logits.iterdir())
    finally:
        cluster.remove(node)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and mount namespaces")
def test_a_read_only_folder_of_logits_has_only_to_exist_on_each_node(distill: Distill, cluster: RayCluster) -> None:
    logits = distill.folder / "cache" / "logits"
    logits.mkdir(parents=True)
    code = """if True:
        import pathlib, sys
        from service.cluster.connect import connect
        from trainables.errors import ClusterError
        try:
            with connect(1, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])):
                print("connected")
        except ClusterError as error:
            print(error)
    """
    read_only = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    driver = ["unshare", "-m", "sh", "-c", read_only, logits, sys.executable, "-c", code, distill.runs, logits]

    def connecting() -> str:
        done = subprocess.run(
            list(map(str, driver)), env={**os.environ, **cluster.env}, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert connecting() == "connected\n"
    blind = cluster.add(["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(logits.parent)])
    try:
        output = connecting()
        assert f"teacher.cache: {logits} is not shared: node" in output
        assert f"({blind.address}) does not see it" in output
    finally:
        cluster.remove(blind)


def test_a_pack_by_a_cluster_is_the_one_that_this_machine_writes(distill: Distill, cluster: RayCluster) -> None:
    images = distill.folder / "images"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (images / split / name).mkdir(parents=True)
            for number in range(4):
                photo(number).save(images / split / name / f"{number}.png")
    here, there = distill.folder / "here", distill.folder / "there"
    distill.run("pack", images, here)
    output = distill.run("pack", images, there, env=cluster.env)
    assert "8 train, 8 val images of 2 classes in 2 shards (2 written now)" in output
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {path.name: path.read_bytes() for path in there.iterdir()}
