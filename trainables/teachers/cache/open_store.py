"""The store of an experiment's `teacher.cache`, opened by all ranks: its key, its size, and whether the disk has room."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainables.config import TrainConfig
from trainables.data.loader.loader import Loader
from trainables.data.storage.shared_folder import format_bytes, free_bytes
from trainables.distributed.group import Group, from_rank
from trainables.errors import DataError
from trainables.rundir import write_json
from trainables.teachers.cache.key import FORMAT, cache_key, check_same_data, key_parts
from trainables.teachers.cache.logits_format import LogitsFormat
from trainables.teachers.cache.store import RowStore

log = logging.getLogger("raydistill")


def open_store(config: TrainConfig, group: Group, loader: Loader, classes: Sequence[str]) -> tuple[RowStore, LogitsFormat, str]:
    """The store of the teacher's logits, their format, and the hash of the teacher's tensors. Logs its size. Every rank calls it.

    Raises DistillError: the teacher or the data cannot be read, the workers read different images, or the disk is too small.
    """
    assert config.teacher is not None
    top_k = config.teacher.cache_top_k
    logits_format = LogitsFormat(len(classes), top_k if top_k is not None and top_k < len(classes) else None)
    images = check_same_data(config.data.path, loader, group, "teacher.cache")
    parts = from_rank(lambda: key_parts(config, images, classes, logits_format.top_k), group)
    store = RowStore(Path(str(config.teacher.cache), cache_key(parts)), logits_format.columns, images.num_samples)
    from_rank(lambda: _prepare(store, parts, config), group)
    return store, logits_format, parts["teacher"]["sha256"]


def writes_cache(config: TrainConfig) -> bool:
    """Whether logits of the running teacher are written: a timing run, whose teacher may be untrained, only reads."""
    return config.train.max_steps is None


def _prepare(store: RowStore, parts: dict[str, Any], config: TrainConfig) -> None:
    """Make sure that the folder exists and has room. Raises DataError."""
    cache = store.folder.parent
    older = cache / cache_key({**parts, "format": FORMAT - 1})
    try:
        if older.exists():
            log.info("teacher.cache: %s is of an older format and is not read: delete it", older)
        missing_bytes = _log_size(store, config.num_cached_epochs)
        if missing_bytes and writes_cache(config):
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


def _log_size(store: RowStore, num_epochs: int) -> int:
    """Log what is there of how much; returns the bytes of the rows that are missing."""
    num_rows, num_bytes = store.size(num_epochs)
    all_rows, row_bytes = store.num_samples * num_epochs, store.row.itemsize
    log.info(
        "teacher.cache: %s holds %s of %s logits (%s images × %s epochs): %s of %s",
        store.folder,
        f"{num_rows:,}",
        f"{all_rows:,}",
        f"{store.num_samples:,}",
        num_epochs,
        format_bytes(num_bytes),
        format_bytes(all_rows * row_bytes),
    )
    return (all_rows - num_rows) * row_bytes
