"""Telemetry of all nodes of a job, from one sampler per node, gathered on every rank."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate

from trainables.distributed.group import Group, gather_objects
from trainables.metrics.telemetry import Telemetry


@contextlib.contextmanager
def node_telemetry(every_s: float, group: Group) -> Iterator[Callable[..., dict[str, float]]]:
    """Sample in the first worker of each node. Yields `snapshot(whole=False)`, a collective call that returns all nodes' numbers.

    The keys are `node0/cpu_pct`, `node1/gpu0/util_pct`, …, with nodes in the order of their first rank. With `whole` and several
    ranks, `rank0/node`, … give each rank's node. Ray Train numbers the ranks node by node.
    """
    sampler = Telemetry(every_s) if group.local_rank == 0 else None

    def snapshot(whole: bool = False) -> dict[str, float]:
        by_rank = gather_objects(sampler.snapshot(whole) if sampler else None, group)
        nodes = [node for node in by_rank if node is not None]
        found = {f"node{number}/{name}": value for number, node in enumerate(nodes) for name, value in node.items()}
        if whole and len(by_rank) > 1:
            num_nodes = accumulate(int(node is not None) for node in by_rank)
            found |= {f"rank{rank}/node": float(count - 1) for rank, count in enumerate(num_nodes)}
        return found

    with sampler or contextlib.nullcontext():
        yield snapshot
