"""Queries of the cluster's nodes, with calls that are partly Ray's private API and are made only here.

`tests/integration/test_nodes_come_and_go.py` makes each of them with the installed Ray.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class NodeResources(NamedTuple):
    """A node's total and unreserved resources, by Ray's resource names."""

    total: dict[str, float]
    free: dict[str, float]


def on_this_node() -> Any:
    """Return the scheduling strategy of an actor that is useless without the process that starts it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def usable_nodes() -> dict[str, NodeResources]:
    """Return the nodes that are alive and not draining, by id."""
    import ray
    from ray._private.state import state

    draining, free = state.get_draining_nodes(), state.available_resources_per_node()
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {id: NodeResources(total, free.get(id, {})) for id, total in alive.items() if id not in draining}


def has_room(resources: Mapping[str, float]) -> bool:
    """Whether a node has so much of each resource free."""
    free = [node.free for node in usable_nodes().values()]
    return any(all(node.get(name, 0.0) >= amount for name, amount in resources.items()) for node in free)


def has_autoscaler() -> bool:
    """Whether an autoscaler starts nodes for this cluster. Ray does not record which kinds and how many."""
    from ray._private.worker import global_worker
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    client: Any = global_worker.gcs_client
    if is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
        return True
    status = json.loads(client.internal_kv_get(b"__autoscaling_status", None) or "{}")
    report = status.get("autoscaler_report") or {}
    types = {*(report.get("active_nodes") or {}), *(report.get("node_type_mapping") or {}).values()}
    return any(not name.startswith("node_") for name in types)  # manually started nodes have the type `node_…`
