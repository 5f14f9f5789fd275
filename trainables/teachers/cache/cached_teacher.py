"""A teacher whose outputs are cached: its network runs where a row is missing, and not where none is.

The network's outputs are rounded as the cache stores them: the training that fills a cache is, bit for bit, the one that reads
it.

Shapes: B samples of this rank, C channels, H W pixels.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from trainables.config import DeviceAugmentConfig, FillConfig, TrainConfig
from trainables.data.loader.loader import Loader
from trainables.data.storage.free_space import format_bytes, free_bytes
from trainables.distributed.group import Group, broadcast_result
from trainables.errors import DataError
from trainables.methods.contract import ModelOutputs
from trainables.methods.init_stage import longest_init_stage
from trainables.methods.select import select_methods
from trainables.notices import notice
from trainables.rundir import write_json
from trainables.teachers.cache.key import cache_key, shared_key_parts
from trainables.teachers.cache.publish import augmentation_bytes
from trainables.teachers.cache.store import CacheWriter, EpochRows, RowStore
from trainables.teachers.ensemble import combine
from trainables.teachers.interface import TeacherInterface, TeacherRequest
from trainables.teachers.network import ROWS, TeacherNetwork, row_network
from trainables.teachers.rows import MethodReads, RowFormat, RowTeacher, format_of

log = logging.getLogger("raydistill")


class CachedTeacher(RowTeacher):
    """Rows from `teacher.cache`. Where a sample of a batch is missing, the network runs for the whole batch."""

    def __init__(
        self, config: TrainConfig, group: Group, classes: tuple[str, ...], loader: Loader, reads: Mapping[str, MethodReads]
    ) -> None:
        """Every rank calls it. Logs how much of the cache is there. A timing run, whose teacher may be untrained, only reads.

        Raises DistillError: the teacher or the data cannot be read, the workers read different images, or the disk is too small.
        """
        assert config.teacher is not None
        writes = config.train.max_steps is None
        super().__init__(cached_format(config, len(classes), reads), reads, config, group.device, loader.source)
        parts = shared_key_parts(config, group, loader, classes, self.row_format)
        about = {**parts, "classes": classes, "stored": str(self.row_format)}
        folder, num_epochs = Path(str(config.teacher.cache), cache_key(parts)), cached_epochs(config)
        self.store = RowStore(folder, self.row_format.row, len(loader.source), about)
        publishes = isinstance(config, FillConfig) and config.publish
        more_bytes = augmentation_bytes(config, len(loader.source), num_epochs) if publishes else 0
        epoch_rows = loader.samples_per_epoch if self.row_format.mixed else len(loader.source)  # the others have no partners
        broadcast_result(lambda: _prepare(self.store, self.row_format, epoch_rows, num_epochs, writes, more_bytes), group)
        self.writer = CacheWriter(self.store) if writes else None
        self._network = list[TeacherNetwork]()
        self._validation: Self | None = None
        self._config = config.model_copy(update={"teacher_sha256": parts["teacher"]["sha256"]})
        self._group, self._classes = group, classes
        self._measures_error = group.is_main and writes
        self._epoch: tuple[int, EpochRows] | None = None

    @property
    def network(self) -> TeacherNetwork | None:
        """The teacher itself, once it was needed."""
        return self._network[0] if self._network else None

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        if request is None and self.network is not None:
            return self._outputs(self.row_format.encode(self.network(images_BCHW, num_rows)[ROWS]))
        if request is None:
            return self._dummy_outputs(num_rows)
        if self._epoch is None or self._epoch[0] != request.epoch:
            self._epoch = request.epoch, self.store.open(request.epoch)
        cached, indices_B = self._epoch[1], request.indices_B.numpy()
        partners_B = request.partners_B.numpy() if request.partners_B is not None else None
        missing_B = cached.missing(indices_B, partners_B)
        if not missing_B.any():
            return self._outputs_of_rows(cached.read(indices_B))
        if not self._network:
            log.info("%s: teacher.cache does not hold all that is needed: the teacher runs", self._config.stage)
            with torch.inference_mode(False):  # an evaluation may be the first to need it
                self._network.append(row_network(self._config, self._device, self._classes, self.row_format))
        outputs = self._network[0](images_BCHW, num_rows)
        self._num_computed += num_rows
        columns = self.row_format.encode(outputs[ROWS])
        if self._measures_error and num_rows and self.row_format.feature_dtype != "float16":
            log.info("teacher.cache: %s, of %d images", self.row_format.describe_error(outputs[ROWS]), num_rows)
        self._measures_error = self._measures_error and not num_rows
        if self.writer is not None:
            rows = self.row_format.to_host(indices_B.copy(), columns, partners_B)
            self.writer.add(request.epoch, lambda: self._check(rows()), missing_B)
        return self._outputs(columns)

    def for_validation(self, loader: Loader) -> Self:
        """See `TeacherInterface`: they have a folder of their own. Every rank calls it. Raises DistillError: see `__init__`."""
        if self._validation is None:
            config = without_augmentation(self._config)
            self._validation = type(self)(config, self._group, self._classes, loader, self._reads)
            self._validation._network = self._network
            self._validation._measures_error = False
        return self._validation

    def end_epoch(self) -> int:
        """See `TeacherInterface`. The next epoch finds what all workers have written so far."""
        if self.writer is not None:
            self.writer.flush()
        self._epoch = None
        return super().end_epoch()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._validation is not None:
            self._validation.close()
        if self.writer is not None:
            self.writer.close()


class CachedTeachers(TeacherInterface):
    """A job's cached teachers, of which each has its rows in a folder of its own."""

    def __init__(self, teachers: Sequence[CachedTeacher], shares: Sequence[float]) -> None:
        """`shares`: the part of 1 of each."""
        self.teachers, self._shares = teachers, shares

    @property
    def stores(self) -> list[RowStore]:
        return [teacher.store for teacher in self.teachers]

    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        return combine([teacher(images_BCHW, num_rows, request) for teacher in self.teachers], self._shares)

    def for_validation(self, loader: Loader) -> Self:
        """See `TeacherInterface`. Every rank calls it. Raises DistillError: see `CachedTeacher`."""
        return type(self)([teacher.for_validation(loader) for teacher in self.teachers], self._shares)

    def end_epoch(self) -> int:
        """See `TeacherInterface`: the most images for which one of them ran."""
        return max(teacher.end_epoch() for teacher in self.teachers)

    def close(self) -> None:
        """Write what is not written yet."""
        for teacher in self.teachers:
            teacher.close()


def without_augmentation(config: TrainConfig) -> TrainConfig:
    """The job as validation images are prepared."""
    plain = {"augment": "none", "device_augment": DeviceAugmentConfig(), "fidelity": "exact"}
    return config.model_copy(update={"data": config.data.model_copy(update=plain)})


def cached_format(config: TrainConfig, num_classes: int, reads: Mapping[str, MethodReads]) -> RowFormat:
    """The rows of a job's cache."""
    assert config.teacher is not None
    top_k, dtype = config.teacher.cache_top_k, config.teacher.cache_feature_dtype
    top_k = top_k if top_k is not None and top_k < num_classes else None
    mixed = config.data.device_augment.mixes
    row_format = format_of(reads, RowFormat(num_classes, top_k, feature_dtype=dtype or "float16", mixed=mixed))
    if dtype is not None and not row_format.taps:
        notice(f"teacher.cache_feature_dtype: {dtype} changes nothing, as no method here reads features")
    return row_format


def cached_epochs(config: TrainConfig) -> int:
    """The number of epochs whose rows make a full cache, those of an init stage before this one among them."""
    before = 0 if config.init_stage or config.distill is None else longest_init_stage(select_methods(config.distill))
    num_epochs = config.optim.epochs + before
    return min(config.num_augmentation_epochs or num_epochs, num_epochs)


def describe_size(row_format: RowFormat, num_images: int, num_epochs: int) -> str:
    """The bytes of a full cache, and what they hold."""
    size = format_bytes(num_images * num_epochs * row_format.row.itemsize)
    epochs = "1 epoch" if num_epochs == 1 else f"{num_epochs:,} epochs"
    dtype = row_format.feature_dtype + (
        ", logits in float16" if row_format.feature_dtype != "float16" and row_format.has_logits else ""
    )
    return f"{size} for {num_images:,} images × {epochs}: {row_format} in {dtype}"


def _prepare(store: RowStore, row_format: RowFormat, epoch_rows: int, num_epochs: int, writes: bool, more_bytes: int) -> None:
    """Log what is there of how much, and make sure that the folder exists and has room for the rest, and for `more_bytes`.

    Raises DataError.
    """
    cache = store.folder.parent
    try:
        num_rows, num_bytes = store.size(num_epochs)
        all_rows, row_bytes = epoch_rows * num_epochs, store.row.itemsize
        log.info(
            f"teacher.cache: {store.folder} holds {num_rows:,} of {all_rows:,} rows: {format_bytes(num_bytes)} of "
            f"{describe_size(row_format, epoch_rows, num_epochs)}"
        )
        missing_bytes = max(0, all_rows - num_rows) * row_bytes + more_bytes
        if not missing_bytes or not writes:
            return
        store.folder.mkdir(parents=True, exist_ok=True)
        store.remove_stale_temporaries()
        free = free_bytes(store.folder)
        if missing_bytes > free:
            shrinks = {"teacher.cache_top_k": row_format.has_logits, "teacher.cache_epochs": True}
            shrinks["teacher.cache_feature_dtype: fp8"] = bool(row_format.taps) and row_format.feature_dtype == "float16"
            smaller = " or ".join(key for key, applies in shrinks.items() if applies)
            raise DataError(
                f"teacher.cache: {format_bytes(missing_bytes)} of {row_format} do not fit into the {format_bytes(free)} that are "
                f"free in {cache}: set {smaller}, or name a folder with more room"
            )
        write_json(store.folder / "key.json", store.about)
    except OSError as error:
        raise DataError(f"teacher.cache: {cache} cannot be written ({error.strerror or error}): name another folder") from None
