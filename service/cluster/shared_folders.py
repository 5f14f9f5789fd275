"""Checks whether all nodes of the cluster share a folder and can write to it."""

import os
import uuid
from pathlib import Path

from service.cluster.resources import living_nodes
from trainables.errors import ClusterError


def check_shared(folder: Path, name: str, instead: str, *, read_only: bool = False) -> None:
    """Refuse a folder that some node does not share or cannot write to, where files would be lost.

    Messages call the folder `name` and end with the remedy `instead`. With `read_only` it only has to exist on all nodes.

    Raises ClusterError: names the node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != ray.get_runtime_context().get_node_id()]
    if not others:
        return
    probe = folder / ("" if read_only else f".probe-{uuid.uuid4().hex}")
    if not read_only:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()

    def access(path: str) -> tuple[bool, bool]:
        return os.path.exists(path), os.access(os.path.dirname(path), os.W_OK | os.X_OK)

    try:
        answers = [
            ray.remote(access)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(str(probe))
            for node in others
        ]
        for node, answer in zip(others, answers, strict=True):
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            try:
                found, writable = ray.get(answer, timeout=60)
            except ray.exceptions.RayError as error:
                if node["NodeID"] not in {now.node_id for now in living_nodes().nodes}:
                    continue  # it has just died
                raise ClusterError(f"{where} does not answer: remove it from the cluster, or wait until Ray does") from error
            if not found:
                raise ClusterError(f"{name} is not shared: {where} does not see it; {instead}")
            if not writable and not read_only:
                raise ClusterError(f"{name} cannot be written by {where}; {instead}")
    finally:
        if not read_only:
            probe.unlink(missing_ok=True)
