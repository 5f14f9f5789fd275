"""Connect to Ray, see what it has, and refuse what it cannot hold, before anything starts or waits."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from service.cluster import ray_thread as work
from trainables.errors import ClusterError
from trainables.rundir import unwritable

MAX_OVERSUBSCRIPTION = 4

# Ray takes loopback as a node's address, and binds each of its servers to it, where clusters are "not supported", which is
# its word for macOS and Windows; `_node_ip_address="127.0.0.1"` is turned into the machine's outer address. Elsewhere too
# a Ray of our own is no cluster. Gloo and NCCL go by the interface's name.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo"),
}

DAEMONS = ("gcs_server", "raylet")
"""The processes without which a Ray is none."""
_own_daemons: dict[str, psutil.Process] = {}
"""Those of the Ray that this process has started, by name."""


class RayLostError(ClusterError):
    """The Ray that this process has started has ended before it."""


@dataclass(frozen=True)
class Need:
    """What one job reserves: `num_workers` bundles of CPUs and GPUs, each of which has to fit on one node."""

    num_workers: int
    cpus: int
    gpus: int = 0
    service: Need | None = None
    """What the actors of `teacher.service` reserve, once for all jobs of a sweep."""

    @property
    def total_cpus(self) -> int:
        """With those of the service."""
        return self.num_workers * self.cpus + (self.service.total_cpus if self.service else 0)

    def places(self, node: Node) -> int:
        """How many bundles fit on an empty node."""
        return int(min(node.cpus // self.cpus, node.gpus // self.gpus if self.gpus else float("inf")))

    def __str__(self) -> str:
        """A bundle."""
        return f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}" + (f" and {self.gpus} GPU" if self.gpus else "")


@dataclass(frozen=True)
class Node:
    """One node as Ray sees it; `cpus` are logical."""

    node_id: str
    cpus: float
    gpus: float


def beside(nodes: Sequence[Node], need: Need) -> list[Node]:
    """The node for each actor of the service, where it takes the fewest places of the workers; [] where they do not all fit."""
    left, chosen = {node.node_id: node for node in nodes}, list[Node]()
    service = need.service
    for _ in range(service.num_workers if service else 0):
        assert service is not None
        fitting = [node for node in left.values() if service.places(node)]
        if not fitting:
            return []
        after = {node.node_id: replace(node, cpus=node.cpus - service.cpus, gpus=node.gpus - service.gpus) for node in fitting}
        best = min(fitting, key=lambda node: need.places(node) - need.places(after[node.node_id]))
        left[best.node_id] = after[best.node_id]
        chosen.append(best)
    return chosen


@dataclass(frozen=True)
class Cluster:
    """The nodes at hand. `real_cpus` is known for a Ray that we started, where logical CPUs may exceed it."""

    nodes: tuple[Node, ...]
    real_cpus: int | None = None

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    def places(self, need: Need) -> int:
        """How many workers of `need` the empty cluster holds, each on one node, beside the service."""
        return sum(need.places(node) for node in self._left(need))

    def _left(self, need: Need) -> list[Node]:
        """The nodes without what the service takes; none where it does not fit."""
        if need.service is None:
            return list(self.nodes)
        taken = Counter(node.node_id for node in beside(self.nodes, need))
        cpus, gpus = need.service.cpus, need.service.gpus
        left = [replace(n, cpus=n.cpus - taken[n.node_id] * cpus, gpus=n.gpus - taken[n.node_id] * gpus) for n in self.nodes]
        return left if taken else []

    def refusal(self, need: Need) -> str | None:
        """Why the empty cluster could never hold `need`, or None where it can."""
        places = self.places(need)
        if places >= need.num_workers:
            return None
        cpus = f"{self.cpus:g} CPUs"
        if self.real_cpus is not None and self.cpus > self.real_cpus:
            cpus = f"{self.real_cpus} core{'s' if self.real_cpus > 1 else ''} (counted as {cpus})"
        has = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''} with {cpus} and {self.gpus:g} GPUs in all"
        actors = f" and teacher.service's {need.service.num_workers} actors of {need.service}" if need.service else ""
        hold = f"hold{'' if len(self.nodes) > 1 else 's'} {places}{' workers beside them' if need.service else ''}"
        return f"{need.num_workers} workers of {need} each{actors} do not fit: {has} {hold}"

    def concurrent(self, need: Need, wanted: int) -> int:
        """How many jobs of `need` may run at a time, at most `wanted`: so few that none waits on another's bundles for ever."""
        return max(1, min(wanted, self.places(need) // need.num_workers))

    def hardware(self, use_gpu: bool, cpus_per_worker: int) -> dict[str, float]:
        """The nodes that workers run on, as a model of a step's time sees them.

        `slots_per_node` is how many workers fill a node: its GPUs, or without them the real cores that workers compute on.
        """
        nodes = [node for node in self.nodes if node.gpus or not use_gpu] or self.nodes
        cores = float(self.real_cpus if self.real_cpus is not None else max(node.cpus for node in nodes))
        slots = max(node.gpus for node in nodes) if use_gpu else cores // cpus_per_worker
        return {"nodes": len(nodes), "slots_per_node": max(int(slots), 1), "cpus_per_node": cores}

    def oversubscribed(self, need: Need) -> bool:
        """Whether the job would have fewer real cores than it reserves."""
        return self.real_cpus is not None and need.total_cpus > self.real_cpus


def real_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_local() -> bool:
    """Whether we start a Ray of our own; otherwise `RAY_ADDRESS` names the cluster."""
    return os.environ.get("RAY_ADDRESS", "local") in ("", "local")


def local_capacity() -> Cluster:
    """What a Ray that we start here could offer at most, without starting it."""
    cores = real_cpus()
    return Cluster((Node("local", cores * MAX_OVERSUBSCRIPTION, _local_gpus()),), real_cpus=cores)


def _local_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: a machine without GPUs
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = int(pynvml.nvmlDeviceGetCount())
    return count if visible is None else min(count, len([device for device in visible.split(",") if device.strip()]))


def auto_loader_workers(cluster: Cluster, num_workers: int, cpus_per_worker: int) -> int:
    """Decode threads per worker for `data.loader_workers: auto`: the real cores that a worker's share leaves, 1 to 8."""
    cores = cluster.real_cpus if cluster.real_cpus is not None else cluster.cpus
    return int(min(8, max(1, cores // num_workers - cpus_per_worker)))


@contextlib.contextmanager
def connect(logical_cpus: int, runs_root: Path, cache: Path | None = None) -> Iterator[Cluster]:
    """The cluster of `RAY_ADDRESS`, or a Ray of our own on loopback with `logical_cpus` CPUs (at least the cores, at most 4×).

    `cache`: the folder of `teacher.cache`, where it will be written.

    Raises:
        ClusterError: no Ray at RAY_ADDRESS, or none can start here; or its nodes do not all see `runs_root` and `cache`, or may
            not write there.
    """
    # A trial's end is noticed at the controller's next poll: two seconds are long beside a short trial.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # By default whoever asks Ray for anything starts one: after Ctrl-C, a thread whose training was just taken from it.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if is_local():
        os.environ.update(LOOPBACK)
        # Ray starts workers at niceness 15: whatever else a machine does would go before the training, our sender to MLflow too.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A process for each trainer that asks whether a cloud is about to take a node away: seconds of a core to start.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    else:
        knock(os.environ["RAY_ADDRESS"])
        # Ray asks twenty times, a second apart and with a line on the terminal each, also where it was refused for its token.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    cores = real_cpus()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if is_local():
            cpus = max(cores, min(logical_cpus, cores * MAX_OVERSUBSCRIPTION))
            ray.init(address="local", num_cpus=cpus, dashboard_host="127.0.0.1", **quiet)
            _own_daemons.update(_daemons())
        else:
            ray.init(runtime_env=travelling_code(), **quiet)
    except Exception as error:  # all kinds: where a node takes too long to start, Ray raises just that
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise ClusterError(
            f"Ray does not start on this machine: {reason}; mend that, or where the machine was too busy try again later"
            if is_local()
            else f"no Ray at {os.environ['RAY_ADDRESS']}: {reason}; start one, or give its token "
            "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE), or unset RAY_ADDRESS to use this machine"
        ) from error
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler aborts this process, without its cleaning up
    try:
        cluster = observe(cores if is_local() else None)
        check_shared(runs_root, str(runs_root), "give a shared folder with --runs or --out")
        if cache is not None:
            name, full = f"teacher.cache: {cache}", cache.is_dir() and unwritable(cache) is not None  # see `checks.check_cache`
            check_shared(cache, name, "name a folder that all nodes share and may write", read_only=full)
        yield cluster
    finally:
        if not work.goes_on():  # see `work.leave`
            _own_daemons.clear()
            ray.shutdown()


def _daemons() -> dict[str, psutil.Process]:
    """This process's children that are a Ray's, by name; others may end at any moment."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.name()] = child
    return {name: child for name, child in found.items() if name in DAEMONS}


def check_ray() -> None:
    """Notice that a process of our own Ray is gone: Ray itself waits a minute for it, and then ends this process.

    Raises:
        RayLostError: naming the process.
    """
    for name, daemon in _own_daemons.items():
        try:
            lives = daemon.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            lives = False
        if not lives:
            work.lose_ray()
            raise RayLostError(f"Ray has ended: its process {name} was killed, by someone or for want of memory")


def knock(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would try for minutes.

    Raises:
        ClusterError: see above.
    """
    if address.startswith("http"):
        raise ClusterError(
            f"RAY_ADDRESS is {address}, where jobs are submitted: use `distill submit`, or give Ray's own address, HOST:6379"
        )
    host, _, port = address.rpartition(":")
    if address == "auto":  # the Ray of this machine, which Ray finds or not at once
        return
    if not port.isdecimal():
        raise ClusterError(f"RAY_ADDRESS is {address}: write HOST:PORT, such as 10.0.0.1:6379, or unset it to use this machine")
    try:
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray at {address}: {error.strerror or error}; start one, or unset RAY_ADDRESS to use this machine"
        ) from error


def travelling_code() -> dict[str, object] | None:
    """Both packages for the cluster's nodes; a Ray job brings its own working directory."""
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return None
    here = Path(__file__).parents[1]
    return {"py_modules": [str(here), str(here.parent / "trainables")]}


def observe(cores: int | None = None) -> Cluster:
    """The living nodes of the Ray that we are connected to."""
    import ray

    nodes = [
        Node(node["NodeID"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return Cluster(tuple(nodes), real_cpus=cores)


def check_shared(folder: Path, name: str, instead: str, *, read_only: bool = False) -> None:
    """Refuse a folder that some node does not share or cannot write: what is written there would be lost.

    `name`: what the folder is called; `instead`: what to do about it; `read_only`: nothing will be written, it has to exist.

    Raises:
        ClusterError: naming the node.
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

    def look(path: str) -> tuple[bool, bool]:
        return os.path.exists(path), os.access(os.path.dirname(path), os.W_OK | os.X_OK)

    try:
        looks = [
            ray.remote(look)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(str(probe))
            for node in others
        ]
        for node, found_there in zip(others, looks, strict=True):
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            try:
                found, writable = ray.get(found_there, timeout=60)
            except ray.exceptions.RayError as error:
                if node["NodeID"] not in {now.node_id for now in observe().nodes}:
                    continue  # it has just died
                raise ClusterError(f"{where} does not answer: take it out of the cluster, or wait until Ray has") from error
            if not found:
                raise ClusterError(f"{name} is not shared: {where} does not see it; {instead}")
            if not writable and not read_only:
                raise ClusterError(f"{name} cannot be written by {where}; {instead}")
    finally:
        if not read_only:
            probe.unlink(missing_ok=True)


def use_gpu(setting: bool | Literal["auto"], cluster: Cluster) -> bool:
    """Whether workers get a GPU each: as set, or wherever the cluster has any."""
    return cluster.gpus > 0 if setting == "auto" else setting
