"""The ranks of a job or a part of them: collectives, seeds, and a check that replicas are equal."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainables.errors import DataError, DistillError, TrainingError

T = TypeVar("T")

_CHUNK = 2**23
"""How many numbers a checksum processes at a time."""
# Integer dtypes by element size: checksums are over bits, so that even the sign of a zero counts.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Group:
    """This process's place among all or some ranks of a job."""

    rank: int = 0
    """Rank in this group."""
    world_size: int = 1
    local_rank: int = 0
    """Rank among those of this group on the node."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    process_group: dist.ProcessGroup | None = None
    """None for all ranks of the job."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def group_arguments(backend: str, device: torch.device) -> dict[str, Any]:
    """Return arguments for `init_process_group`. Without `device_id`, NCCL would use the GPU with the global rank's index."""
    return {"backend": backend, **({"device_id": device} if backend == "nccl" else {})}


def all_reduce_sum(tensor: Tensor, group: Group) -> Tensor:
    """Sum `tensor` over the ranks, in place. Every rank must call this with the same shape."""
    if group.world_size > 1:
        dist.all_reduce(tensor, group=group.process_group)
    return tensor


class GlobalCount:
    """The numbers of samples and of parts in a step over all ranks, which are summed while the forward pass runs."""

    def __init__(
        self,
        num_local: int,
        group: Group,
        *,
        accumulate: int = 1,
        num_samples: int | None = None,
        num_labeled: Tensor | None = None,
    ):
        """`num_local` is the number of this rank's samples, split into at most `accumulate` micro-batches. `num_samples` is the
        number over all ranks if known in advance, spread evenly. `num_labeled` is the number of this rank's labeled samples
        (scalar, float64), if some may have no label.

        Parts are what `GradientNoise` compares: the ranks' batches, or a single worker's micro-batches.
        """
        self._group, self._numbers = group, (num_local, min(num_local, accumulate if group.world_size == 1 else 1))
        self._num_labeled = num_labeled
        if num_labeled is not None:
            num_samples = None
        if num_samples is not None and group.world_size > 1:
            self._numbers = num_samples, min(num_samples, group.world_size)
        self.is_known = num_samples is not None or group.world_size == 1
        self._totals: Tensor | None = None
        self._work = None
        if not self.is_known:
            self._work = dist.all_reduce(self._filled(), group=group.process_group, async_op=True)

    def _filled(self) -> Tensor:
        """Fill the numbers on the device: a copy from the host would wait until the GPU has finished its work."""
        size = 2 if self._num_labeled is None else 3
        self._totals = torch.full((size,), float(self._numbers[0]), dtype=torch.float64, device=self._group.device)
        self._totals[1].fill_(self._numbers[1])
        if self._num_labeled is not None:
            self._totals[2] = self._num_labeled
        return self._totals

    def wait(self) -> None:
        """Make the device wait for ranks that have not begun the step."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @property
    def totals(self) -> Tensor:
        """Samples and parts over all ranks, and labeled samples if counted: (2,) or (3,), float64 on the device."""
        self.wait()
        return self._filled() if self._totals is None else self._totals

    def weight(self) -> Tensor | float:
        """Return the factor (scalar) that turns a rank's sum of per-sample losses into its share of the global mean.

        It is world_size / num_samples, since DDP averages gradients over ranks. If known, it is a float.
        """
        if self.is_known:
            return self._group.world_size / max(self._numbers[0], 1)
        return self._group.world_size / self.totals[0].clamp(min=1)

    @property
    def task_scale(self) -> Tensor | None:
        """The factor (scalar) that turns the task loss's mean over all samples into the mean over labeled ones.

        None if all samples have a label. The factor is finite even if none has one, where the loss is 0.
        """
        return None if self._num_labeled is None else self.totals[0] / self.totals[2].clamp(min=1e-6)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """All-gather `value` as a list in rank order."""
    if group.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * group.world_size
    dist.all_gather_object(gathered, value, group=group.process_group)
    return gathered


def broadcast_result(compute: Callable[[], T], group: Group, rank: int = 0) -> T:
    """Compute on one rank and broadcast the result. Every rank raises its DistillError, or a DataError for its OSError."""
    result = gather_objects(result_or_error(compute) if group.rank == rank else None, group)[rank]
    if isinstance(result, DistillError):
        raise result
    return cast(T, result)


def all_gather_results(compute: Callable[[], T], group: Group) -> list[T]:
    """Compute on every rank and all-gather the results. Every rank raises the first error, as `broadcast_result` does."""
    results = gather_objects(result_or_error(compute), group)
    for result in results:
        if isinstance(result, DistillError):
            raise result
    return results


def result_or_error(compute: Callable[[], T]) -> T | DistillError:
    """Return what `compute` returns, or its DistillError, or a DataError for its OSError, to send to other ranks."""
    try:
        return compute()
    except DistillError as error:
        return error
    except OSError as error:
        return DataError(f"{error.filename or 'a file'}: {error.strerror or error}")


def broadcast_buffers(model: nn.Module, group: Group) -> None:
    """Broadcast the buffers of rank 0. Until then, running statistics of batch norms differ by rank."""
    if group.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, group_src=0, group=group.process_group)


def seed_rank(seed: int, rank: int) -> None:
    """Seed torch's generators on this rank. Data order and augmentation do not use them."""
    torch.manual_seed((seed << 16) + rank)


def checksum(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a checksum (scalar, int64) of the bits of all parameters.

    It launches a few kernels per `_CHUNK` numbers, and needs memory for one chunk. Each number is multiplied by an odd factor
    that depends on its position, modulo 2^32 or 2^64, so that any single change shows. Integer sums do not depend on order.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, chunk in enumerate(_chunks(parameters)):
        bits = torch.cat(chunk).view(_BITS[chunk[0].element_size()])
        bits = bits if bits.element_size() >= 4 else bits.int()
        bits *= torch.arange(1, 2 * len(bits), 2, dtype=bits.dtype, device=device)
        total += (2 * number + 1) * bits.sum(dtype=torch.int64)
    return total


def _chunks(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters' numbers in chunks of flat tensors, each of one dtype and at most `_CHUNK` numbers."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).extend(_in_memory_order(parameter.detach()).split(_CHUNK))
    for parts in by_dtype.values():
        chunk, size = list[Tensor](), 0
        for part in parts:
            if size + len(part) > _CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append(part)
            size += len(part)
        yield chunk


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Flatten a tensor in memory order, so that channels-last tensors need no copy. The order is the same on every rank."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).flatten()


def replica_checksums(model: nn.Module, group: Group) -> Tensor:
    """All-gather the `checksum` of the parameters of R ranks: (R,), int64 on the device. Every rank must call this."""
    sums_R = torch.zeros(group.world_size, dtype=torch.int64, device=group.device)
    if group.world_size > 1:
        dist.all_gather_into_tensor(sums_R, checksum(model.parameters(), group.device).reshape(1), group=group.process_group)
    return sums_R


def check_replicas(sums_R: Sequence[int], step: int, num_stages: int = 1) -> None:
    """Check by checksums that replicas have equal parameters: rank r has those of rank r mod `num_stages`.

    Raises TrainingError: names the ranks that differ from the first replica, and the usual cause.
    """
    differing = [rank for rank, other in enumerate(sums_R) if other != sums_R[rank % num_stages]]
    if differing:
        first = "rank 0's" if num_stages == 1 else "the first replica's"
        raise TrainingError(
            f"step {step}: the parameters of rank {', '.join(map(str, differing))} differ from {first}: a method changes "
            "them by its own rank's rows, or calls the student around DDP (`.module`): run `distill check-method`"
        )
