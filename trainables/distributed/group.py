"""The ranks of one job or a part of them: this process among them, sums over them, seeds, a check that replicas are equal."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainables.errors import DataError, DistillError, TrainingError

T = TypeVar("T")

_CHUNK = 2**23
"""Numbers of which a checksum is taken at a time."""
# Per-dtype integer views of equal width: a checksum over bits, so that not even a sign of zero may differ.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Group:
    """This process among the ranks of a job, or among some of them."""

    rank: int = 0
    """In this group, as `world_size`."""
    world_size: int = 1
    local_rank: int = 0
    """Among this group's ranks on the node."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    process_group: dist.ProcessGroup | None = None
    """None: all ranks of the job."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def group_arguments(backend: str, device: torch.device) -> dict[str, Any]:
    """The backend of `init_process_group` and its device: NCCL without one takes that of the global rank's number."""
    return {"backend": backend, **({"device_id": device} if backend == "nccl" else {})}


def all_reduce_sum(tensor: Tensor, group: Group) -> Tensor:
    """Sum `tensor` over the ranks, in place; every rank must call it with the same shape."""
    if group.world_size > 1:
        dist.all_reduce(tensor, group=group.process_group)
    return tensor


class GlobalCount:
    """The numbers of samples and of their parts in this step, over all ranks; summed while the forward pass runs."""

    def __init__(
        self,
        num_local: int,
        group: Group,
        *,
        accumulate: int = 1,
        num_samples: int | None = None,
        num_labeled: Tensor | None = None,
    ):
        """`num_local`: this rank's samples, in `accumulate` micro-batches or as many as they are. `num_samples`: of all ranks,
        where it is known without them, each with an equal share or one more. `num_labeled`: this rank's samples with a label
        (scalar, float64), where some may have none.

        Parts are what `GradientNoise` compares: ranks' batches, or one worker's micro-batches.
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
        """The numbers, filled on the device: a copy from the host would wait for all that the GPU still has to do."""
        size = 2 if self._num_labeled is None else 3
        self._totals = torch.full((size,), float(self._numbers[0]), dtype=torch.float64, device=self._group.device)
        self._totals[1].fill_(self._numbers[1])
        if self._num_labeled is not None:
            self._totals[2] = self._num_labeled
        return self._totals

    def wait(self) -> None:
        """Wait for the ranks that have not begun their step, on the device."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @property
    def totals(self) -> Tensor:
        """Samples and parts of all ranks, and with `num_labeled` those with a label: (2,) or (3,), float64 on the device."""
        self.wait()
        return self._filled() if self._totals is None else self._totals

    def weight(self) -> Tensor | float:
        """The factor (a scalar) that turns a rank's sum of per-sample losses into its share of the global mean.

        DDP averages gradients over ranks, hence world_size / num_samples. Where that is known it takes nothing of the device.
        """
        if self.is_known:
            return self._group.world_size / max(self._numbers[0], 1)
        return self._group.world_size / self.totals[0].clamp(min=1)

    @property
    def task_scale(self) -> Tensor | None:
        """The factor (a scalar) of the labels' loss that makes its mean over all samples the one over those that have a label.

        None: all have one. Without a single one the loss is 0, and the factor finite.
        """
        return None if self._num_labeled is None else self.totals[0] / self.totals[2].clamp(min=1e-6)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    if group.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * group.world_size
    dist.all_gather_object(gathered, value, group=group.process_group)
    return gathered


def from_rank(compute: Callable[[], T], group: Group, rank: int = 0) -> T:
    """What one rank computes, on every rank. Its DistillError, or a DataError for its OSError, is raised on every rank."""
    result = gather_objects(result_or_error(compute) if group.rank == rank else None, group)[rank]
    if isinstance(result, DistillError):
        raise result
    return cast(T, result)


def from_each(compute: Callable[[], T], group: Group) -> list[T]:
    """What every rank computes, in rank order, on every rank. The first one's error is raised on every rank, as above."""
    results = gather_objects(result_or_error(compute), group)
    for result in results:
        if isinstance(result, DistillError):
            raise result
    return results


def result_or_error(compute: Callable[[], T]) -> T | DistillError:
    """What a function returns or, for other ranks to learn of it, its DistillError, or a DataError for its OSError."""
    try:
        return compute()
    except DistillError as error:
        return error
    except OSError as error:
        return DataError(f"{error.filename or 'a file'}: {error.strerror or error}")


def broadcast_buffers(model: nn.Module, group: Group) -> None:
    """Give every rank the buffers of rank 0 (batch norm's running statistics differ by rank until then)."""
    if group.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, group_src=0, group=group.process_group)


def seed_rank(seed: int, rank: int) -> None:
    """Seed torch's generators of this rank; data order and augmentation do not draw from them."""
    torch.manual_seed((seed << 16) + rank)


def checksum(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """A number over the bits of all parameters (scalar, int64): equal parameters give equal numbers.

    A handful of kernels for each `_CHUNK` of them, which is what they take of memory. Every number is multiplied by an odd one of
    its place, modulo 2^32 or 2^64, so that no single change is lost; sums of integers do not depend on their order.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, chunk in enumerate(_chunks(parameters)):
        bits = torch.cat(chunk).view(_BITS[chunk[0].element_size()])
        bits = bits if bits.element_size() >= 4 else bits.int()
        bits *= torch.arange(1, 2 * len(bits), 2, dtype=bits.dtype, device=device)
        total += (2 * number + 1) * bits.sum(dtype=torch.int64)
    return total


def _chunks(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """All numbers of the parameters, in parts (one dimension) of one dtype each, of `_CHUNK` numbers at most."""
    of_dtypes: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        of_dtypes.setdefault(parameter.dtype, []).extend(_in_memory_order(parameter.detach()).split(_CHUNK))
    for parts in of_dtypes.values():
        chunk, size = list[Tensor](), 0
        for part in parts:
            if size + len(part) > _CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append(part)
            size += len(part)
        yield chunk


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Its numbers (one dimension) without a copy, also where it is channels-last, as it is on every rank."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).flatten()


def replica_checksums(model: nn.Module, group: Group) -> Tensor:
    """The checksum of the parameters on each of R ranks (R,), int64 on the device: see `checksum`. Every rank calls it."""
    sums_R = torch.zeros(group.world_size, dtype=torch.int64, device=group.device)
    if group.world_size > 1:
        dist.all_gather_into_tensor(sums_R, checksum(model.parameters(), group.device).reshape(1), group=group.process_group)
    return sums_R


def check_replicas(sums_R: Sequence[int], step: int, num_stages: int = 1) -> None:
    """Raise where the parameters of replicas differ, by their checksums; rank r has what rank r mod `num_stages` has.

    Raises TrainingError: naming the ranks that differ from the first replica's, and the usual cause.
    """
    differing = [rank for rank, other in enumerate(sums_R) if other != sums_R[rank % num_stages]]
    if differing:
        first = "rank 0's" if num_stages == 1 else "the first replica's"
        raise TrainingError(
            f"step {step}: the parameters of rank {', '.join(map(str, differing))} differ from {first}: code of a method changes "
            "them by the rows of its own rank, or calls the student past DDP (`.module`): try it with `distill check-method`"
        )
