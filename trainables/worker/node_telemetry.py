"""Telemetry of all nodes of a job: one sampler a node, its numbers gathered on every rank."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate

from trainables.distributed.group import Group, gather_objects
from trainables.metrics.telemetry import Telemetry


@contextlib.contextmanager
def node_telemetry(every_s: float, group: Group) -> Iterator[Callable[..., dict[str, float]]]:
    """A sampler in the first worker of each node. Yields a `snapshot(whole=False)` of all nodes, which every rank calls.

    `node0/cpu_pct`, `node1/gpu0/util_pct`, …: nodes numbered in the order of their first rank.
    With `whole` and several ranks also `rank0/node`, …: each one's node. Ray Train numbers the ranks node by node.
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
