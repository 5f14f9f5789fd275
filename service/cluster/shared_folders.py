"""Checks whether all nodes of the cluster share a folder and can write to it."""

import contextlib
import os
import tempfile
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

    def problem(path: str) -> str | None:
        if not os.path.exists(path):
            return "is not shared: {} does not see it"
        return None if read_only or os.access(os.path.dirname(path), os.W_OK | os.X_OK) else "cannot be written by {}"

    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != ray.get_runtime_context().get_node_id()]
    if not others:
        return
    if not read_only:
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if read_only else tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder) as probe:
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in others]
        task, path = ray.remote(problem), str(folder) if probe is None else probe.name
        answers = [task.options(num_cpus=0, scheduling_strategy=strategy).remote(path) for strategy in strategies]
        for node, answer in zip(others, answers, strict=True):
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            try:
                found = ray.get(answer, timeout=60)
            except ray.exceptions.RayError as error:
                if node["NodeID"] not in {now.node_id for now in living_nodes().nodes}:
                    continue  # it has just died
                raise ClusterError(f"{where} does not answer: remove it from the cluster, or wait until Ray does") from error
            if found is not None:
                raise ClusterError(f"{name} {found.format(where)}; {instead}")
