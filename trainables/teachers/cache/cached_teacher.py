"""A teacher whose answers are kept: it runs where one is missing, and is not even built where none is.

What it answers live is rounded as it is kept: the training that fills a cache is, bit for bit, the one that reads it.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainables.config import TrainConfig
from trainables.data.loader import Batch, Loader
from trainables.data.storage.shared_folder import format_bytes, free_bytes
from trainables.distributed.group import Group, gather_objects
from trainables.errors import DataError, DistillError
from trainables.methods.contract import ModelOutputs
from trainables.rundir import write_json
from trainables.teachers.cache.key import Images, agree_on_images, key_of, key_parts
from trainables.teachers.cache.logits_format import Layout
from trainables.teachers.cache.store import Shelf, Store
from trainables.teachers.cache.writer import Keeper
from trainables.teachers.network import Teacher, TeacherRequest

log = logging.getLogger("raydistill")


class CachedTeacher:
    """Answers from disk, see `TeacherInterface`. Where one of a batch is missing, the live teacher answers all of it."""

    def __init__(
        self, store: Store, methods: Sequence[str], build: Callable[[], Teacher], *, device: torch.device, dtype: torch.dtype,
        keeps: bool,
    ) -> None:  # fmt: skip
        """`methods`: who asks. `build` makes the live teacher. `keeps`: what it answers is written down."""
        self.store = store
        self.live: Teacher | None = None
        """The network, once it was needed."""
        self._methods, self._build, self._device, self._dtype = tuple(methods), build, device, dtype
        self._keeper = Keeper(store) if keeps else None
        self._shelf: tuple[int, Shelf] | None = None
        self._ran_for = 0

    def __call__(self, images_BCHW: Tensor, num_rows: int, asked: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """See `TeacherInterface`."""
        if asked is None:
            if self.live is not None:
                return self.live(images_BCHW, num_rows)
            logits_BK = torch.zeros((num_rows, self.store.layout.num_classes), device=self._device, dtype=self._dtype)
            return self._for_all(logits_BK)
        samples_B = asked.samples_B.numpy()
        shelf = self._open(asked.epoch)
        missing_B = shelf.missing(samples_B)
        if not missing_B.any():
            return self._for_all(self._read(shelf, asked.samples_B))
        self.live = self.live or self._build()
        answer = self.live(images_BCHW, num_rows)
        self._ran_for += num_rows
        columns = self.store.layout.encode(answer[self._methods[0]].logits_BK)
        if self._keeper is not None:
            self._keeper.add(asked.epoch, samples_B, columns, missing_B)
        return self._for_all(self.store.layout.decode(columns, self._dtype))

    def ahead(self, batches: Generator[Batch, None, None], epoch: int) -> Generator[Batch, None, None]:
        """See `TeacherInterface`."""
        return batches

    def end_epoch(self) -> int:
        """See `TeacherInterface`. The next epoch finds what all workers have written by now."""
        if self._keeper is not None:
            self._keeper.flush()
        self._shelf = None
        ran_for, self._ran_for = self._ran_for, 0
        return ran_for

    def unwritten(self) -> str | None:
        """Why nothing is kept any more; None: all is."""
        failure = self._keeper.failure if self._keeper is not None else None
        return None if failure is None else failure.strerror or str(failure)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _for_all(self, logits_BK: Tensor) -> dict[str, ModelOutputs]:
        return {method: ModelOutputs(logits_BK) for method in self._methods}

    def _open(self, epoch: int) -> Shelf:
        if self._shelf is None or self._shelf[0] != epoch:
            self._shelf = epoch, self.store.open(epoch)
        return self._shelf[1]

    def _read(self, shelf: Shelf, samples_B: Tensor) -> Tensor:
        """The logits (B, K) of samples that are there. On a GPU they are decoded there, and this thread does not wait."""
        layout, pinned, rows = self.store.layout, self._device.type == "cuda", len(samples_B)
        # Pinned memory that is let go of is not given out again before its copy is over: torch's allocator sees to it.
        columns = {
            name: torch.empty((rows, width) if width else rows, dtype=getattr(torch, kind), pin_memory=pinned)
            for name, (kind, width) in layout.columns.items()
        }
        shelf.gather(samples_B.numpy(), {name: tensor.numpy() for name, tensor in columns.items()})
        if pinned:
            columns = {name: tensor.to(self._device, non_blocking=True) for name, tensor in columns.items()}
        return layout.decode(columns, self._dtype)


def open_store(config: TrainConfig, group: Group, loader: Loader, classes: Sequence[str]) -> tuple[Store, str]:
    """Where the answers of the experiment's teacher are, or will be, and whose they are: the hash of the teacher's tensors.

    Says how large they are. Every rank calls it.

    Raises:
        DistillError: the teacher or the data cannot be read, the workers see different images, or the disk is too small.
    """
    images = agree_on_images(config.data.path, loader, group, "teacher.cache")
    told = gather_objects(_look(config, images, classes) if group.is_main else None, group)[0]
    if isinstance(told, DistillError):
        raise told
    key, top_k, sha256 = told
    assert config.teacher is not None
    return Store(Path(str(config.teacher.cache)) / key, Layout(len(classes), top_k), images.num_samples), sha256


def _look(config: TrainConfig, images: Images, classes: Sequence[str]) -> tuple[str, int | None, str] | DistillError:
    """On rank 0: key, top-k and teacher's hash, once there is a folder for them and room; or what is wrong, for all ranks."""
    teacher = config.teacher
    assert teacher is not None
    top_k = teacher.cache_top_k if teacher.cache_top_k is not None and teacher.cache_top_k < len(classes) else None
    try:
        parts = key_parts(config, images, classes, top_k)
        store = Store(Path(str(teacher.cache)) / key_of(parts), Layout(len(classes), top_k), images.num_samples)
        num_epochs = config.kept_epochs
        rows, there_bytes = store.size(num_epochs)
        all_rows, row_bytes = images.num_samples * num_epochs, store.layout.row_bytes
        log.info(
            "teacher.cache: %s holds %s of %s logits (%s images × %s epochs): %s of %s", store.folder, f"{rows:,}",
            f"{all_rows:,}", f"{images.num_samples:,}", num_epochs, format_bytes(there_bytes), format_bytes(all_rows * row_bytes),
        )  # fmt: skip
        found = store.folder.name, top_k, parts["teacher"]["sha256"]
        if rows == all_rows or not keeps(config):
            return found
        store.folder.mkdir(parents=True, exist_ok=True)
        store.tidy()
        missing_bytes, free = (all_rows - rows) * row_bytes, free_bytes(store.folder)
        if missing_bytes > free:
            return DataError(
                f"teacher.cache: {format_bytes(missing_bytes)} of logits do not fit into the {format_bytes(free)} "
                f"that are free in {teacher.cache}: set teacher.cache_top_k or teacher.cache_epochs, or name a folder with "
                "more room"
            )
        write_json(store.folder / "key.json", parts)
    except OSError as error:
        return DataError(f"teacher.cache: {teacher.cache} cannot be written ({error.strerror}): name another folder")
    except DistillError as error:
        return error
    return found


def keeps(config: TrainConfig) -> bool:
    """Whether the live teacher's answers are written down: a timing run, whose teacher may be untrained, only reads."""
    return config.train.max_steps is None
