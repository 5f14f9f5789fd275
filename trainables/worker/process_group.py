"""Set up torch's process group among Ray Train's workers: its store's address, and each rank's device and variables."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
"""Limit for each step of the workers' start; the first imports torch on all of them, maybe from a cold file server."""


@dataclass
class ProcessGroup(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """A torch process group whose store listens only on Ray's address of rank 0's node, which is loopback for a local Ray.

    The store that torch opens by default listens on every interface, without authentication.
    """

    @property
    def backend_cls(self) -> type:
        return ProcessGroupBackend


class ProcessGroupBackend(ray.train.torch.TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's torch backend with its own rendezvous of the workers."""

    def on_start(self, worker_group: Any, backend_config: ProcessGroup) -> None:
        """Called by Ray Train on the controller once the workers' processes are running."""
        skip_exit_handlers()
        try:
            results_of(worker_group.execute_async(skip_exit_handlers), "start")
            if backend_config.backend == "nccl":
                results_of(worker_group.execute_async(check_gpu), "open its GPU")
            ((address, port, listener),) = results_of([worker_group.execute_single_async(0, reserve_store)], "open a socket")
            results_of(worker_group.execute_async(set_variables, address, port), "set its environment variables")
            results_of(worker_group.execute_async(note_sigterm), "set its signal handler")
            timeout = timedelta(seconds=backend_config.timeout_s)
            joins = [
                worker_group.execute_single_async(rank, join, backend_config.backend, timeout, None if rank else listener)
                for rank in range(len(worker_group))
            ]
            results_of(joins, "join the process group", START_LIMIT_S + backend_config.timeout_s)
        except Exception:  # a worker died or is late: Ray Train would leak the group and its reserved resources
            worker_group.abort()
            raise


def results_of(references: Sequence[Any], action: str, limit_s: float = START_LIMIT_S) -> list[Any]:
    """Return the results of all ranks in order. Raises EndedError: a rank did not finish `action` in time."""
    try:
        return list(ray.get(list(references), timeout=limit_s))
    except ray.exceptions.GetTimeoutError:
        _, late = ray.wait(list(references), num_returns=len(references), timeout=0)
        if not late:  # the last one arrived in the meantime
            return list(ray.get(list(references)))
        rank = references.index(late[0])
        message = f"rank {rank} did not {action} within {limit_s:g} s"
        raise EndedError(Failure("hang", message, rank=rank, position="start")) from None


def check_gpu() -> None:
    """Run `check_usable`: NCCL would report the problem only after minutes, and without the versions."""
    check_usable(ray.train.torch.get_device(), f"{socket.gethostname()} ({ray.util.get_node_ip_address()})")


def set_variables(address: str, port: int) -> None:
    """Set the variables that torchrun and Ray's backend set for user code: this worker's ranks and the store's address."""
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
    """On rank 0, open a listening socket. Returns the node's address, and the socket's port and file descriptor."""
    address = ray.util.get_node_ip_address()
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return address, listener.getsockname()[1], listener.detach()


def join(backend: str, timeout: timedelta, listener: int | None) -> None:
    """On every rank, create the process group with the store that rank 0 opens on the socket `listener`; see `set_variables`."""
    lower_debug_level()
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        # By default gloo resolves the host name, which many systems map to loopback, where other nodes cannot reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    arguments = group_arguments(backend, ray.train.torch.get_device())
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout, **arguments)


def lower_debug_level() -> None:
    """Reduce TORCH_DISTRIBUTED_DEBUG=DETAIL, with whose process groups several workers crash in their first step, to INFO."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # type: ignore[attr-defined]
        dist.set_debug_level(dist.DebugLevel.INFO)  # type: ignore[attr-defined]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with `address`, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)


def current_group() -> Group:
    """Return this worker's ranks and device, as set up by Ray Train."""
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    return Group(dist.get_rank(), dist.get_world_size(), context.get_local_rank(), device)
