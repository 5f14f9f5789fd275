"""What carries a tensor from one pipeline stage to the next, measured."""

import time

import torch
import torch.distributed as dist

from trainables.distributed.pipeline.costs import Link

SMALL, LARGE = 2**10, 2**22
"""Bytes."""
TRIPS = 10
"""There and back; the shortest counts."""


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """The link between the first two ranks of a group, by round trips; called by all of its ranks, which all get the same."""
    found = torch.zeros(2, dtype=torch.float64, device=device)
    if (rank := dist.get_rank(group)) < 2:
        found = torch.tensor([_one_way_s(group, rank, size, device) for size in (SMALL, LARGE)], dtype=torch.float64).to(device)
    dist.broadcast(found, group=group, group_src=0)
    small_s, large_s = found.tolist()
    return Link(small_s, (LARGE - SMALL) / max(large_s - small_s, 1e-9), overlapped=device.type == "cuda")


def _one_way_s(group: dist.ProcessGroup, rank: int, num_bytes: int, device: torch.device) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    shortest_s = float("inf")
    for _ in range(TRIPS + 1):
        start_s = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, group=group, group_dst=1 - sender)
            else:
                dist.recv(message, group=group, group_src=sender)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest_s = min(shortest_s, (time.perf_counter() - start_s) / 2)
    return shortest_s
