"""Rows of all ranks on every rank, with gradients: what makes a comparison of samples one of the whole global batch.

Shapes: B rows of this rank, N rows of all ranks in the order of ranks, R ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainables.distributed.group import Group


class Gather:
    """Gathers tensors that have a row for each sample. Made anew for each micro-batch; all ranks make the same calls.

    The ranks' numbers of rows are exchanged once, between the hosts, so that no rank waits for its device.
    """

    def __init__(self, num_rows: int, group: Group, hosts: dist.ProcessGroup | None = None):
        """`hosts` is a group that carries CPU tensors, where the default one does not: see `cpu_process_group`."""
        self._num_rows, self._group, self._hosts = num_rows, group, hosts
        self._sizes: list[int] | None = None
        self.used = False
        """Whether anyone has asked for rows."""

    def __call__(self, own: Tensor) -> Tensor:
        """(N, …) for this rank's (B, …).

        The gradient of a loss that every rank computes alike from the gathered rows needs no communication: each rank keeps
        that of its own rows, times the number of ranks, since DDP averages over them.
        """
        self.used = True
        if self._group.world_size == 1:
            return own
        gathered: Tensor = _Gathered.apply(own, self._sizes_R(), self._group.rank)  # type: ignore[no-untyped-call]
        return gathered

    def all_gather_many(self, *own: Tensor) -> tuple[Tensor, ...]:
        """(N, …) for each (B, …) in one message: ranks wait for each other once. All of one type."""
        if self._group.world_size == 1:
            self.used = True
            return own
        flat = [tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None] for tensor in own]
        gathered = self(torch.cat(flat, 1)).split([rows.shape[1] for rows in flat], 1)
        return tuple(rows.reshape(-1, *tensor.shape[1:]) for rows, tensor in zip(gathered, own, strict=True))

    def _sizes_R(self) -> list[int]:
        """The number of rows of each rank."""
        if self._sizes is None:
            counts_R = torch.zeros(self._group.world_size, dtype=torch.int64)
            dist.all_gather_into_tensor(counts_R, torch.tensor([self._num_rows]), group=self._hosts)
            self._sizes = counts_R.tolist()
        return self._sizes


@cache
def cpu_process_group(group: Group) -> dist.ProcessGroup | None:
    """A process group for CPU tensors; None where the default group carries them. All ranks call it."""
    if group.world_size == 1 or group.device.type == "cpu":
        return None
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return made


class _Gathered(torch.autograd.Function):
    """All ranks' rows; backward gives the own rows their gradient times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int], rank: int) -> Tensor:
        ctx.begin, ctx.size, ctx.ranks = sum(sizes[:rank]), sizes[rank], len(sizes)
        most = max(sizes)
        padded = own.contiguous()
        if len(own) < most:
            padded = own.new_zeros((most, *own.shape[1:]))
            padded[: len(own)] = own
        everything = own.new_empty((len(sizes) * most, *own.shape[1:]))
        dist.all_gather_into_tensor(everything, padded)
        if min(sizes) == most:
            return everything
        return torch.cat([part[:size] for part, size in zip(everything.split(most), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.begin : ctx.begin + ctx.size] * ctx.ranks, None, None
