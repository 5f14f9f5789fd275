"""How the workers of a real Ray find each other: whose rank is whose, and on which device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

from tests.integration.conftest import PROJECT, RayCluster
from trainables.config import TrainConfig
from trainables.failures import WorkersFailedError
from trainables.rundir import StageDir
from trainables.worker import trainer

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FOUR_WORKERS = """
import json, os, sys
import ray, torch.distributed as dist
from pathlib import Path
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from trainables.worker.process_group import ProcessGroup

def write_variables(folder):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
    variables = {name: os.environ.get(name) for name in names}
    Path(folder, str(dist.get_rank())).write_text(json.dumps({**variables, "node": ray.util.get_node_ip_address()}))

ray.init(log_to_driver=False)
TorchTrainer(
    write_variables, train_loop_config=sys.argv[1], torch_config=ProcessGroup(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=4), run_config=RunConfig(storage_path=sys.argv[1] + "/ray", name="x"),
).fit()
"""


def test_every_rank_has_torchruns_variables_also_where_nodes_have_unequal_numbers(cluster: RayCluster, tmp_path: Path) -> None:
    """Four workers on nodes of three CPUs each."""
    env = {**os.environ, **cluster.env, "PYTHONPATH": str(PROJECT)}
    subprocess.run([sys.executable, "-c", FOUR_WORKERS, str(tmp_path)], env=env, timeout=200, check=True)
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [(each["RANK"], each["WORLD_SIZE"]) for each in ranks] == [(str(rank), "4") for rank in range(4)]
    assert {each["MASTER_ADDR"] for each in ranks} == {ranks[0]["node"]}
    nodes = list(dict.fromkeys(each["node"] for each in ranks))
    counts = [sum(each["node"] == node for each in ranks) for node in nodes]
    assert sorted(counts) == [1, 3]
    assert [(each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"], each["NODE_RANK"]) for each in ranks] == [
        (str(local), str(count), str(node)) for node, count in enumerate(counts) for local in range(count)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPU")
def test_a_gpu_that_ray_has_and_torch_cannot_use_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    ray.init(address="local", num_cpus=2, num_gpus=1, log_to_driver=False, include_dashboard=False)
    try:
        with pytest.raises(WorkersFailedError) as refused:
            trainer.fit(config, use_gpu=True, loader_workers=1, storage=str(tmp_path / "ray"), name="x")
    finally:
        ray.shutdown()
    assert not StageDir(tmp_path).last.exists()
    assert [failure.kind for failure in refused.value.failures] == ["device"]
    line = str(refused.value)
    assert len(line.splitlines()) == 1
    assert "Ray has a GPU there that torch cannot use: " in line
    assert f"torch {torch.__version__}" in line
