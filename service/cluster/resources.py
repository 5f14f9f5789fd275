"""A cluster's resources, a job's reservation, and whether it fits, which is decided before anything starts or waits."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_OVERSUBSCRIPTION = 4
HEAD = "node:__internal_head__"
"""Ray's resource that only the head node has."""
MAX_LOADER_WORKERS_ON_CPU = 8
TRIAL_BYTES = 5 * 2**28
"""Memory of a running trial on the head node: Ray Tune's function, Ray Train's controller and their actors."""


@dataclass(frozen=True)
class Reservation:
    """A job's reservation: `num_workers` bundles of CPUs and GPUs, each of which must fit on one node."""

    num_workers: int
    cpus: int
    gpus: int = 0
    service: Reservation | None = None
    """Reservation of the `teacher.service` actors, once for all jobs of a sweep."""
    min_workers: int | None = None
    """The fewest workers of an elastic job."""
    unit: str = "workers"
    """Name of what takes a bundle, in the plural."""

    @property
    def total_cpus(self) -> int:
        """CPUs of all bundles, including the service's."""
        return self.num_workers * self.cpus + (self.service.total_cpus if self.service else 0)

    def is_as_large_as(self, other: Reservation) -> bool:
        """Whether it needs at least as much as the other one of everything."""
        needs = zip((self.num_workers, self.cpus, self.gpus), (other.num_workers, other.cpus, other.gpus), strict=True)
        return all(ours >= theirs for ours, theirs in needs)

    def bundles_on(self, node: Node) -> int:
        """Return how many bundles fit on an empty node."""
        return int(min(node.cpus // self.cpus, node.gpus // self.gpus if self.gpus else float("inf")))

    def __str__(self) -> str:
        """Describe one bundle."""
        return _counted(self.cpus, "CPU") + (f" and {_counted(self.gpus, 'GPU')}" if self.gpus else "")


@dataclass(frozen=True)
class Node:
    """One node as Ray sees it; `cpus` are logical."""

    node_id: str
    cpus: float
    gpus: float

    def without(self, reservation: Reservation, num_bundles: int = 1) -> Node:
        """Return the node with these bundles placed on it."""
        return replace(self, cpus=self.cpus - num_bundles * reservation.cpus, gpus=self.gpus - num_bundles * reservation.gpus)


def nodes_for_actors(nodes: Sequence[Node], reservation: Reservation) -> list[Node]:
    """Choose a node for each actor of the service, so as to displace the fewest workers. Returns [] if they do not all fit."""
    free, service, chosen = list(nodes), reservation.service, list[Node]()
    for _ in range(service.num_workers if service else 0):
        assert service is not None
        left = {node: node.without(service) for node in free if service.bundles_on(node)}
        if not left:
            return []
        best = min(left, key=lambda node: reservation.bundles_on(node) - reservation.bundles_on(left[node]))
        free[free.index(best)] = left[best]
        chosen.append(best)
    return chosen


def _counted(count: float, unit: str) -> str:
    return f"{count:g} {unit}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Cluster:
    """A cluster's nodes. `real_cpus` is set for a Ray that we started, whose logical CPUs may exceed it."""

    nodes: tuple[Node, ...]
    real_cpus: int | None = None
    head_bytes: float = float("inf")
    """Total memory of the head node that can be reserved."""
    autoscaled: bool = False
    """Whether an autoscaler may add nodes, of kinds that only it knows."""
    free_nodes: tuple[Node, ...] = ()
    """The same nodes with their unreserved resources, if we are connected to the cluster."""

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    @property
    def free(self) -> Cluster:
        """The cluster with its unreserved resources."""
        return replace(self, nodes=self.free_nodes)

    def max_workers(self, reservation: Reservation) -> int:
        """Return how many workers of a reservation fit on the empty cluster next to its service."""
        return sum(reservation.bundles_on(node) for node in self._nodes_for_workers(reservation))

    def _nodes_for_workers(self, reservation: Reservation) -> list[Node]:
        """Return the nodes with the service placed on them, or [] if it does not fit."""
        service = reservation.service
        if service is None:
            return list(self.nodes)
        actors = Counter(node.node_id for node in nodes_for_actors(self.nodes, reservation))
        return [node.without(service, actors[node.node_id]) for node in self.nodes] if actors else []

    def refusal(self, reservation: Reservation) -> str | None:
        """Return why a reservation does not fit even on the empty cluster. None if it fits, or an autoscaler may add nodes."""
        workers, service = self.max_workers(reservation), reservation.service
        needed = reservation.min_workers or reservation.num_workers
        if workers >= needed or self.autoscaled:
            return None
        if self.nodes and not workers and service is None:
            largest = max(self.nodes, key=lambda node: (node.gpus * bool(reservation.gpus), node.cpus))
            return f"1 {reservation.unit.removesuffix('s')} needs {reservation}; the largest node has {self._sizes(largest)}"
        actors = f" and {service.num_workers} actors of teacher.service of {service} each" if service else ""
        nodes = f"{_counted(len(self.nodes), 'node')} with {self._sizes(self)} in all {'have' if len(self.nodes) > 1 else 'has'}"
        room = f"{nodes} room for {'the actors and ' if service else ''}{_counted(workers, reservation.unit.removesuffix('s'))}"
        return f"{needed} {reservation.unit} of {reservation} each{actors} do not fit: {room}"

    def _sizes(self, of: Node | Cluster) -> str:
        """Describe the CPUs and GPUs of a node or cluster, and the real cores behind a local Ray's CPUs."""
        cpus = _counted(of.cpus, "CPU")
        if self.real_cpus is not None and self.cpus > self.real_cpus:
            cpus = f"{_counted(self.real_cpus, 'core')} (counted as {cpus})"
        return f"{cpus} and {_counted(of.gpus, 'GPU')}"

    def max_concurrent(self, reservation: Reservation, limit: int) -> int:
        """Return how many such jobs may run at a time, at most `limit`.

        Their bundles must all fit, or jobs could wait for each other forever, and so must their memory on the head node.
        """
        trials_on_head = int(min(self.head_bytes, sys.maxsize) // TRIAL_BYTES)
        return max(1, min(limit, self.max_workers(reservation) // reservation.num_workers, trials_on_head))

    def trial_resources(self) -> dict[str, float]:
        """Return what a trial's function reserves on the head node, where it waits for its workers.

        Ray Tune requires some reservation; a fraction of the head resource takes no CPU from trials. The memory covers all of
        a trial's processes there, so that several users' sweeps do not exhaust it, or is all that a smaller head has.
        """
        memory = {} if self.head_bytes == float("inf") else {"memory": int(min(TRIAL_BYTES, self.head_bytes))}
        return {HEAD: 0.001, **memory}

    def hardware(self, use_gpu: bool, cpus_per_worker: int) -> dict[str, float]:
        """Describe the nodes that workers run on, for models of the step time.

        `slots_per_node` is how many workers fill a node: one per GPU, or without GPUs as many as its real cores allow.
        """
        nodes = [node for node in self.nodes if node.gpus or not use_gpu] or self.nodes
        cores = float(self.real_cpus if self.real_cpus is not None else max(node.cpus for node in nodes))
        slots = max(node.gpus for node in nodes) if use_gpu else cores // cpus_per_worker
        return {"nodes": len(nodes), "slots_per_node": max(int(slots), 1), "cpus_per_node": cores}

    def oversubscribed(self, reservation: Reservation) -> bool:
        """Whether the job would have fewer real cores than it reserves."""
        return self.real_cpus is not None and reservation.total_cpus > self.real_cpus


def is_local() -> bool:
    """Whether we start a local Ray; otherwise `RAY_ADDRESS` names the cluster."""
    return os.environ.get("RAY_ADDRESS", "local") in ("", "local")


def local_capacity() -> Cluster:
    """Return the most that a local Ray could offer, without starting it."""
    from trainables.metrics.telemetry import open_gpus, usable_cores

    cores = usable_cores()
    return Cluster((Node("local", cores * MAX_OVERSUBSCRIPTION, len(open_gpus())),), real_cpus=cores)


def auto_loader_workers(cluster: Cluster, num_workers: int, cpus_per_worker: int, *, use_gpu: bool) -> int:
    """Return the decode threads per worker for `data.loader_workers: auto`: a worker's share of the real cores, at least 1.

    With GPUs, the cores are shared equally among all GPUs, whether this job uses them or not. Without GPUs, training itself
    needs the cores, so the number of threads is limited.
    """
    nodes = cluster.nodes if cluster.real_cpus is None else (Node("local", cluster.real_cpus, cluster.gpus),)
    shares = max(num_workers, int(cluster.gpus)) if use_gpu else num_workers
    max_threads = int(max(node.cpus for node in nodes)) if use_gpu else MAX_LOADER_WORKERS_ON_CPU
    for threads in range(max_threads, 1, -1):
        bundle = Reservation(shares, cpus_per_worker + threads, int(use_gpu))
        if sum(bundle.bundles_on(node) for node in nodes) >= shares:
            return threads
    return 1


def use_gpu(scale_use_gpu: bool | Literal["auto"], cluster: Cluster) -> bool:
    """Whether each worker gets a GPU: as set, or for `auto` if the cluster has any."""
    return cluster.gpus > 0 if scale_use_gpu == "auto" else scale_use_gpu


def living_nodes(cores: int | None = None) -> Cluster:
    """Return the connected cluster, without nodes that have died or are about to. For `cores` see `Cluster.real_cpus`."""
    from trainables.worker.ray_nodes import usable_nodes

    found = usable_nodes()
    total, free = (
        tuple(Node(node_id, each[part].get("CPU", 0.0), each[part].get("GPU", 0.0)) for node_id, each in found.items())
        for part in (0, 1)
    )
    head_bytes = sum(each.get("memory", 0.0) for each, _ in found.values() if HEAD in each)
    return Cluster(total, real_cpus=cores, head_bytes=head_bytes or float("inf"), free_nodes=free)
