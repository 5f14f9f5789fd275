"""A teacher whose logits are cached: its network runs where one is missing, and is not even built where none is.

The network's logits are rounded as the cache stores them: the training that fills a cache is, bit for bit, the one that reads it.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainables.methods.contract import ModelOutputs
from trainables.teachers.cache.logits_format import LogitsFormat
from trainables.teachers.cache.store import EpochRows, RowStore
from trainables.teachers.cache.writer import CacheWriter
from trainables.teachers.interface import TeacherInterface, TeacherRequest
from trainables.teachers.network import TeacherNetwork


class CachedTeacher(TeacherInterface):
    """Logits from disk. Where a sample of a batch is missing, the network runs for the whole batch."""

    def __init__(
        self,
        store: RowStore,
        logits_format: LogitsFormat,
        methods: Sequence[str],
        build: Callable[[], TeacherNetwork],
        *,
        device: torch.device,
        dtype: torch.dtype,
        writes: bool,
    ) -> None:
        """`methods`: keys of those that read the logits. `build` makes the network. `writes`: its logits are written."""
        self.store, self._format = store, logits_format
        self.network: TeacherNetwork | None = None
        """The teacher itself, once it was needed."""
        self._methods, self._build, self._device, self._dtype = tuple(methods), build, device, dtype
        self._writer = CacheWriter(store, device) if writes else None
        self._epoch: tuple[int, EpochRows] | None = None
        self._num_computed = 0

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        if request is None:
            if self.network is not None:
                return self.network(images_BCHW, num_rows)
            logits_BK = torch.zeros((num_rows, self._format.num_classes), device=self._device, dtype=self._dtype)
            return self._outputs(logits_BK)
        indices_B = request.indices_B.numpy()
        cached = self._open(request.epoch)
        missing_B = cached.missing(indices_B)
        if not missing_B.any():
            return self._outputs(self._read(cached, request.indices_B))
        if self.network is None:
            self.network = self._build()
        outputs = self.network(images_BCHW, num_rows)
        self._num_computed += num_rows
        columns = self._format.encode(outputs[self._methods[0]].logits_BK)
        if self._writer is not None:
            self._writer.add(request.epoch, indices_B, columns, missing_B)
        return self._outputs(self._format.decode(columns, self._dtype))

    def end_epoch(self) -> int:
        """See `TeacherInterface`. The next epoch finds what all workers have written so far."""
        if self._writer is not None:
            self._writer.flush()
        self._epoch = None
        num_computed, self._num_computed = self._num_computed, 0
        return num_computed

    def write_error(self) -> str | None:
        """Why nothing is written any more; None: all is."""
        error = self._writer.disk_error if self._writer is not None else None
        return None if error is None else error.strerror or str(error)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _outputs(self, logits_BK: Tensor) -> dict[str, ModelOutputs]:
        return {method: ModelOutputs(logits_BK) for method in self._methods}

    def _open(self, epoch: int) -> EpochRows:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self.store.open(epoch)
        return self._epoch[1]

    def _read(self, cached: EpochRows, indices_B: Tensor) -> Tensor:
        """The logits (B, K) of samples that are there. On a GPU they are decoded there, and this thread does not wait."""
        pinned, num_rows = self._device.type == "cuda", len(indices_B)
        # torch's allocator hands out pinned memory again only once its copies are over.
        columns = {
            name: torch.empty((num_rows, *shape), dtype=getattr(torch, dtype), pin_memory=pinned)
            for name, (dtype, shape) in self._format.columns.items()
        }
        cached.gather(indices_B.numpy(), {name: tensor.numpy() for name, tensor in columns.items()})
        if pinned:
            columns = {name: tensor.to(self._device, non_blocking=True) for name, tensor in columns.items()}
        return self._format.decode(columns, self._dtype)
