"""All-gather rows with gradients, for losses that compare the samples of the global batch.

Shapes: B rows of this rank, N rows of all ranks in the order of ranks, R ranks.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from trainables.distributed.group import Group


class Gather:
    """Gathers tensors that have a row per sample. Make one object per micro-batch; all ranks must make the same calls.

    The ranks exchange their numbers of rows once, over `cpu_group`, so that no rank waits for its device.
    """

    def __init__(self, num_rows: int, group: Group, cpu_group: dist.ProcessGroup | None = None):
        """`cpu_group` takes CPU tensors if `group` does not: see `cpu_process_group`."""
        self._num_rows, self._group, self._cpu_group = num_rows, group, cpu_group
        self._sizes: list[int] | None = None
        self.used = False
        """Whether anything has been gathered."""

    def __call__(self, local: Tensor) -> Tensor:
        """Gather this rank's (B, …) into (N, …).

        If every rank computes the same loss from the gathered rows, the backward pass needs no communication: each rank takes
        the gradient of its local rows, times the number of ranks, since DDP averages over them.
        """
        self.used = True
        if self._group.world_size == 1:
            return local
        gathered: Tensor = _Gathered.apply(local, self._sizes_R(), self._group)  # type: ignore[no-untyped-call]
        return gathered

    def all_gather_many(self, *local: Tensor) -> tuple[Tensor, ...]:
        """Gather several (B, …) of one dtype in one collective, each into (N, …)."""
        if self._group.world_size == 1:
            self.used = True
            return local
        flat = [tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None] for tensor in local]
        gathered = self(torch.cat(flat, 1)).split([rows.shape[1] for rows in flat], 1)
        return tuple(rows.reshape(-1, *tensor.shape[1:]) for rows, tensor in zip(gathered, local, strict=True))

    def _sizes_R(self) -> list[int]:
        """Return the number of rows of each rank."""
        if self._sizes is None:
            counts_R = torch.zeros(self._group.world_size, dtype=torch.int64)
            cpu_group = self._cpu_group or self._group.process_group
            dist.all_gather_into_tensor(counts_R, torch.tensor([self._num_rows]), group=cpu_group)
            self._sizes = counts_R.tolist()
        return self._sizes


_cpu_groups = WeakKeyDictionary[dist.ProcessGroup, dict[Group, dist.ProcessGroup]]()
"""CPU groups by the process group of all ranks: they become invalid together."""


def cpu_process_group(group: Group) -> dist.ProcessGroup | None:
    """Return a process group for CPU tensors, or None if `group` takes them itself. All its ranks must call this."""
    if group.world_size == 1 or group.device.type == "cpu":
        return None
    assert dist.group.WORLD is not None
    built = _cpu_groups.setdefault(dist.group.WORLD, {})
    if group not in built:
        built[group] = gloo_group(group)
    return built[group]


def gloo_group(group: Group) -> dist.ProcessGroup:
    """Create another process group of the same ranks, for CPU tensors. All of them must call this."""
    ranks = dist.get_process_group_ranks(group.process_group)
    cpu_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(cpu_group, dist.ProcessGroup)
    return cpu_group


class _Gathered(torch.autograd.Function):
    """All-gather rows; the backward pass returns the gradient of the local rows times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sizes: list[int], group: Group) -> Tensor:
        ctx.begin, ctx.size, ctx.ranks = sum(sizes[: group.rank]), sizes[group.rank], len(sizes)
        max_rows = max(sizes)
        padded = local.contiguous()
        if len(local) < max_rows:
            padded = local.new_zeros((max_rows, *local.shape[1:]))
            padded[: len(local)] = local
        gathered = local.new_empty((len(sizes) * max_rows, *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=group.process_group)
        if min(sizes) == max_rows:
            return gathered
        return torch.cat([part[:size] for part, size in zip(gathered.split(max_rows), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.begin : ctx.begin + ctx.size] * ctx.ranks, None, None
