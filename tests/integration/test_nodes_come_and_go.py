"""Nodes come and go: a stage waits for them, ends in time with a checkpoint, and goes on with more or fewer workers."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Distill, RayCluster, records, result, wait_until
from trainables.engine import checkpoint
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration

NUM_STEPS, BATCH = 6000, 66
LONG_EPOCH = [
    *("--set", "data.path=synthetic", "--set", f"data.synthetic_images={NUM_STEPS * BATCH}"),
    *("--set", f"data.global_batch_size={BATCH}", "--set", "optim.epochs=1", "--set", "precision=fp64"),
    *("--set", "student.model=mlp_small", "--set", "train.checkpoint_every=1000000", "--set", "train.log_every=10"),
]
"""One epoch in which a checkpoint is written on request alone."""


def test_ray_knows_the_nodes_what_is_free_on_them_and_that_nothing_starts_more(distill: Distill, cluster: RayCluster) -> None:
    code = """if True:
        import json, pathlib, sys, time
        from service.cluster.connect import connect
        from service.cluster.resources import living_nodes
        with connect(1, pathlib.Path(sys.argv[1])) as found:
            import ray
            taken = ray.util.placement_group([{"CPU": 2}])
            assert taken.wait(60)
            while living_nodes().free.cpus != found.cpus - 2:  # Ray's view of a node is a moment behind
                time.sleep(0.1)
            print(json.dumps([len(found.nodes), found.cpus, found.autoscaled]))
    """
    distill.runs.mkdir()
    command = [sys.executable, "-c", code, str(distill.runs)]
    done = subprocess.run(command, env={**os.environ, **cluster.env}, capture_output=True, text=True, check=True, timeout=120)
    number = len(cluster.nodes)
    assert json.loads(done.stdout) == [number, 3.0 * number, False]


def last_step(distill: Distill) -> int:
    return max((line["step"] for line in records(distill.runs / "run", "step")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stage_saves_before_an_announced_end_waits_for_another_node_and_loses_no_step(
    distill: Distill, cluster: RayCluster
) -> None:
    run = distill.runs / "run"
    env = {**cluster.env, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5"}
    command = distill.start("train", distill.experiment, "--out", run, *LONG_EPOCH, "--set", "scale.num_workers=2", env=env)
    wait_until(lambda: last_step(distill) >= 100, "step 100", command)
    cluster.announce_end(cluster.nodes[1])
    wait_until(lambda: "waiting for nodes, for" in command.output, "a line that it waits", command)
    assert "a node or a worker is about to end: restarting from the last checkpoint" in command.output
    at_end = last_step(distill)
    cluster.add()
    assert command.end() == 0, command.output
    stage = result(run)["stages"][0]
    assert (stage["status"], stage["restarts"], stage["metrics"]["steps"]) == ("ok", 0, NUM_STEPS)
    assert [line["step"] for line in records(run, "resume")] == [at_end]
    assert set(Counter(line["step"] for line in records(run, "step")).values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_loses_a_worker_and_gains_one_ends_where_an_undisturbed_one_does(
    distill: Distill, cluster: RayCluster
) -> None:
    cluster.add()
    whole, run = distill.runs / "whole", distill.runs / "run"
    distill.run("train", distill.experiment, "--out", whole, *LONG_EPOCH)
    elastic = ("--set", "scale.num_workers=[2,3]")
    command = distill.start("train", distill.experiment, "--out", run, *LONG_EPOCH, *elastic, env=cluster.env)
    wait_until(lambda: last_step(distill) >= 100, "step 100", command)
    cluster.announce_end(cluster.nodes[2])
    wait_until(lambda: records(run, "resume"), "second start", command)
    cluster.add()
    assert command.end(500) == 0, command.output
    cluster.kill(cluster.nodes[2])
    sizes = [line["metrics"]["train/num_workers"] for line in records(run, "step")]
    assert [size for size, _ in itertools.groupby(sizes)] == [3, 2, 3]
    assert len(records(run, "resume")) == 2
    assert result(run)["stages"][0]["restarts"] == 0
    ours, theirs = (checkpoint.read(RunDir(out).stage("student").last)[0] for out in (run, whole))
    for name in theirs:
        if name.startswith("model."):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_worker_that_gets_sigterm_saves_first(distill: Distill) -> None:
    run = distill.runs / "run"
    command = distill.start("train", distill.experiment, "--out", run, *LONG_EPOCH)
    wait_until(lambda: last_step(distill) >= 100, "step 100", command)
    command.workers()[0].terminate()
    wait_until(lambda: records(run, "resume"), "second start", command)
    assert records(run, "resume")[0]["step"] > 100
    assert command.end() == 0, command.output
    assert set(Counter(line["step"] for line in records(run, "step")).values()) == {1}
    assert result(run)["stages"][0]["restarts"] == 0


def autoscaling(cluster: RayCluster) -> dict[str, object]:
    """Ray's configuration of an autoscaler whose nodes are processes here: at most two, of three CPUs each."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    return {
        "cluster_name": "test",
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",
            "module": provider,
            "gcs_address": f"127.0.0.2:{cluster.port}",
            "disable_node_updaters": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": {"CPU": 3}, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        **{name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")},
        **{f"{name}_commands": [] for name in ("setup", "head_setup", "worker_setup", "initialization")},
        **{name: [] for name in ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")},
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_not_refused_for_which_an_autoscaler_starts_nodes(distill: Distill) -> None:
    with tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder:
        cluster, config = RayCluster(Path(folder), cpus=0), Path(folder) / "autoscaling.json"
        cluster.head_options = (f"--autoscaling-config={config}",)
        cluster.head_env = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        config.write_text(json.dumps(autoscaling(cluster)))
        try:
            cluster.add()
            code = "import ray; from trainables.worker.ray_nodes import has_autoscaler; ray.init(); print(has_autoscaler())"
            env = {**os.environ, **cluster.env}
            wait_until(lambda: b"True" in subprocess.check_output([sys.executable, "-c", code], env=env), "first status")
            output = distill.run("train", distill.experiment, "--set", "scale.num_workers=2", env=cluster.env)
            assert "on 1 node, plus nodes that an autoscaler starts" in output
        finally:
            cluster.close()
