"""Telemetry of all nodes of a job: one sampler a node, its numbers gathered on every rank."""

from __future__ import annotations

from itertools import accumulate

from trainables.config import TrainConfig
from trainables.distributed.group import Group, gather_objects
from trainables.metrics.telemetry import Telemetry


class NodeTelemetry:
    """A sampler in the first worker of each node; every rank calls `snapshot`, which gathers all nodes' numbers."""

    def __init__(self, config: TrainConfig, group: Group):
        self._group = group
        self._sampler = Telemetry(config.train.telemetry_every_s) if group.local_rank == 0 else None

    def __enter__(self) -> NodeTelemetry:
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler:
            self._sampler.stop()

    def snapshot(self, whole: bool = False) -> dict[str, float]:
        """`node0/cpu_pct`, `node1/gpu0/util_pct`, …: nodes numbered in the order of their first rank.

        With `whole` and several ranks also `rank0/node`, …: each one's node. Ray Train numbers the ranks node by node.
        """
        metrics = self._sampler.snapshot(whole) if self._sampler else None
        by_rank = gather_objects(metrics, self._group)
        nodes = [node for node in by_rank if node is not None]
        found = {f"node{number}/{name}": value for number, node in enumerate(nodes) for name, value in node.items()}
        if whole and len(by_rank) > 1:
            num_nodes = accumulate(int(node is not None) for node in by_rank)
            found |= {f"rank{rank}/node": float(count - 1) for rank, count in enumerate(num_nodes)}
        return found
