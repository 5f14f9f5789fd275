"""What Ray knows of the cluster's nodes, by calls that are not all public API, and nothing else here makes.

`tests/integration/test_nodes_come_and_go.py` makes each of them with the installed Ray.
"""

import json
from typing import Any, NamedTuple


class NodeResources(NamedTuple):
    """What a node has, and what of that nobody has reserved, by Ray's name of the resource."""

    total: dict[str, float]
    free: dict[str, float]


def on_this_node() -> Any:
    """The scheduling strategy of an actor that is of no use without the process that starts it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def usable_nodes() -> dict[str, NodeResources]:
    """Each node that is alive and not about to end, by its id."""
    import ray
    from ray._private.state import state

    ending, free = state.get_draining_nodes(), state.available_resources_per_node()
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {id: NodeResources(total, free.get(id, {})) for id, total in alive.items() if id not in ending}


def has_autoscaler() -> bool:
    """Whether an autoscaler starts nodes for this cluster. What kinds, and how many, Ray's own records do not say."""
    from ray._private.worker import global_worker
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    client: Any = global_worker.gcs_client
    if is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
        return True
    status = json.loads(client.internal_kv_get(b"__autoscaling_status", None) or "{}")
    report = status.get("autoscaler_report") or {}
    types = {*(report.get("active_nodes") or {}), *(report.get("node_type_mapping") or {}).values()}
    return any(not name.startswith("node_") for name in types)  # a node started by hand has a type of its own, `node_…`
