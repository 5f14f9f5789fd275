"""torch's process group among Ray Train's workers: where its store listens, and which device and variables a rank has."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import ray
import ray.train
import ray.train.torch
import torch.distributed as dist

from trainables.device.cuda_check import check_usable
from trainables.distributed.group import Group, group_arguments
from trainables.failures import EndedError, Failure
from trainables.process_exit import skip_exit_handlers
from trainables.worker.interruption_requests import note_sigterm

START_LIMIT_S = 600.0
"""For each step of the workers' start; the first imports torch on all of them, perhaps from a cold file server."""


@dataclass
class ProcessGroup(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """Torch's process group, whose store listens on the address by which Ray knows rank 0's node: loopback for a local Ray.

    The store that torch opens by itself listens on every interface, without asking anyone for a token.
    """

    @property
    def backend_cls(self) -> type:
        return ProcessGroupBackend


class Rendezvous(NamedTuple):
    """What all ranks need to make the process group."""

    backend: str
    timeout: timedelta
    address: str
    port: int
    world_size: int


class ProcessGroupBackend(ray.train.torch.TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's torch backend but for the way in which the workers find each other."""

    def on_start(self, worker_group: Any, backend_config: ProcessGroup) -> None:
        """Called by Ray Train on the controller, once the workers' processes are running."""
        skip_exit_handlers()
        try:
            results_of(worker_group.execute_async(skip_exit_handlers), "start")
            if backend_config.backend == "nccl":
                results_of(worker_group.execute_async(check_gpu), "open its GPU")
            ((address, port, listener),) = results_of([worker_group.execute_single_async(0, reserve_store)], "open a socket")
            results_of(worker_group.execute_async(set_variables, address, port), "take its variables")
            results_of(worker_group.execute_async(note_sigterm), "take its signal handler")
            timeout, world_size = timedelta(seconds=backend_config.timeout_s), len(worker_group)
            rendezvous = Rendezvous(backend_config.backend, timeout, address, port, world_size)
            joins = [
                worker_group.execute_single_async(rank, join, rendezvous, rank, listener if rank == 0 else None)
                for rank in range(world_size)
            ]
            results_of(joins, "join the process group", START_LIMIT_S + backend_config.timeout_s)
        except Exception:  # a worker has died, or is late: Ray Train would forget the group, and what it has reserved
            worker_group.abort()
            raise


def results_of(references: Sequence[Any], action: str, limit_s: float = START_LIMIT_S) -> list[Any]:
    """The results of all ranks, in their order. Raises EndedError: one was late with the `action`; no watch has begun yet."""
    try:
        return list(ray.get(list(references), timeout=limit_s))
    except ray.exceptions.GetTimeoutError:
        _, late = ray.wait(list(references), num_returns=len(references), timeout=0)
        if not late:  # the last one came in this moment
            return list(ray.get(list(references)))
        rank = references.index(late[0])
        message = f"rank {rank} did not {action} within {limit_s:g} s"
        raise EndedError(Failure("hang", message, rank=rank, position="start")) from None


def check_gpu() -> None:
    """See `check_usable`; NCCL itself would report it after minutes, and without the versions."""
    check_usable(ray.train.torch.get_device(), f"{socket.gethostname()} ({ray.util.get_node_ip_address()})")


def set_variables(address: str, port: int) -> None:
    """Set what torchrun, and Ray's own backend, set for users' code and libraries: this worker's ranks, the store's address."""
    context = ray.train.get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def reserve_store() -> tuple[str, int, int]:
    """On rank 0: the node's address, and the port and file descriptor of a socket that listens there."""
    address = ray.util.get_node_ip_address()
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return address, listener.getsockname()[1], listener.detach()


def join(rendezvous: Rendezvous, rank: int, listener: int | None) -> None:
    """On every rank: make the process group around rank 0's store, which rank 0 opens on the socket `listener`."""
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        # By default gloo resolves the host's name, which many systems map to loopback: other nodes could not reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        is_master=rank == 0,
        timeout=rendezvous.timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(
        store=store,
        rank=rank,
        world_size=rendezvous.world_size,
        timeout=rendezvous.timeout,
        **group_arguments(rendezvous.backend, ray.train.torch.get_device()),
    )


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)


def current_group() -> Group:
    """This worker's ranks and device, as Ray Train set them up."""
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    return Group(dist.get_rank(), dist.get_world_size(), context.get_local_rank(), device)
