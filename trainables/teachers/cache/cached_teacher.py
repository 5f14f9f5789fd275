"""A teacher whose logits are cached: its network runs where one is missing, and is not even built where none is.

The network's logits are rounded as the cache stores them: the training that fills a cache is, bit for bit, the one that reads it.

Shapes: B samples of this rank, C channels, H W pixels.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainables.config import TrainConfig
from trainables.data.loader.loader import Loader
from trainables.data.storage.free_space import format_bytes, free_bytes
from trainables.device.tensor_format import tensor_format
from trainables.distributed.group import Group, from_rank
from trainables.errors import DataError
from trainables.methods.contract import ModelOutputs
from trainables.rundir import write_json
from trainables.teachers.cache.key import cache_key, shared_key_parts
from trainables.teachers.cache.store import CacheWriter, EpochRows, RowStore
from trainables.teachers.interface import TeacherRequest
from trainables.teachers.network import TeacherNetwork, logits_network
from trainables.teachers.rows import HalfLogits, RowTeacher

log = logging.getLogger("raydistill")


class CachedTeacher(RowTeacher):
    """Rows from `teacher.cache`. Where a sample of a batch is missing, the network runs for the whole batch."""

    def __init__(
        self, config: TrainConfig, group: Group, classes: tuple[str, ...], loader: Loader, methods: Sequence[str]
    ) -> None:
        """Every rank calls it. Logs how much of the cache is there. A timing run, whose teacher may be untrained, only reads.

        Raises DistillError: the teacher or the data cannot be read, the workers read different images, or the disk is too small.
        """
        assert config.teacher is not None
        top_k, writes = config.teacher.cache_top_k, config.train.max_steps is None
        row_format = HalfLogits(len(classes), top_k if top_k is not None and top_k < len(classes) else None)
        super().__init__(row_format, methods, group.device, tensor_format(config)[0])
        parts = shared_key_parts(config, group, loader, classes, row_format.top_k)
        self.store = RowStore(Path(str(config.teacher.cache), cache_key(parts)), row_format.row, len(loader.source))
        from_rank(lambda: _prepare(self.store, parts, config.num_cached_epochs, writes), group)
        self.writer = CacheWriter(self.store) if writes else None
        self.network: TeacherNetwork | None = None
        """The teacher itself, once it was needed."""
        self._config = config.model_copy(update={"teacher_sha256": parts["teacher"]["sha256"]})
        self._classes = classes
        self._epoch: tuple[int, EpochRows] | None = None

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        if request is None:
            return self.network(images_BCHW, num_rows) if self.network is not None else self._dummy_outputs(num_rows)
        if self._epoch is None or self._epoch[0] != request.epoch:
            self._epoch = request.epoch, self.store.open(request.epoch)
        cached, indices_B = self._epoch[1], request.indices_B.numpy()
        missing_B = cached.missing_N[indices_B]
        if not missing_B.any():
            return self._outputs_of_rows(cached.read(indices_B))
        if self.network is None:
            log.info("%s: teacher.cache does not hold all logits that are needed: the teacher runs", self._config.stage)
            self.network = logits_network(self._config, self._device, self._classes, self._methods)
        outputs = self.network(images_BCHW, num_rows)
        self._num_computed += num_rows
        columns = self.row_format.encode(outputs[self._methods[0]])
        if self.writer is not None:
            self.writer.add(request.epoch, self.row_format.to_host(indices_B.copy(), columns), missing_B)
        return self._outputs(columns)

    def end_epoch(self) -> int:
        """See `TeacherInterface`. The next epoch finds what all workers have written so far."""
        if self.writer is not None:
            self.writer.flush()
        self._epoch = None
        return super().end_epoch()

    def close(self) -> None:
        """Write what is not written yet."""
        if self.writer is not None:
            self.writer.close()


def _prepare(store: RowStore, parts: dict[str, Any], num_epochs: int, writes: bool) -> None:
    """Log what is there of how much, and make sure that the folder exists and has room for the rest. Raises DataError."""
    cache = store.folder.parent
    try:
        num_rows, num_bytes = store.size(num_epochs)
        all_rows, row_bytes = store.num_samples * num_epochs, store.row.itemsize
        log.info(
            f"teacher.cache: {store.folder} holds {num_rows:,} of {all_rows:,} logits ({store.num_samples:,} images × "
            f"{num_epochs} epochs): {format_bytes(num_bytes)} of {format_bytes(all_rows * row_bytes)}"
        )
        missing_bytes = (all_rows - num_rows) * row_bytes
        if not missing_bytes or not writes:
            return
        store.folder.mkdir(parents=True, exist_ok=True)
        store.remove_stale_temporaries()
        free = free_bytes(store.folder)
        if missing_bytes > free:
            raise DataError(
                f"teacher.cache: {format_bytes(missing_bytes)} of logits do not fit into the {format_bytes(free)} that are "
                f"free in {cache}: set teacher.cache_top_k or teacher.cache_epochs, or name a folder with more room"
            )
        write_json(store.folder / "key.json", parts)
    except OSError as error:
        raise DataError(f"teacher.cache: {cache} cannot be written ({error.strerror or error}): name another folder") from None
