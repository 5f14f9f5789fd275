"""`data.stage`: copy a packed set once per node to memory or a local disk, shared by all workers and trials there."""

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from trainables.config import DataConfig
from trainables.data.index import File, Index, read_index
from trainables.data.order import Split
from trainables.data.sources.records import RecordsSource
from trainables.data.sources.shards import LocalShards
from trainables.data.storage.cache import GRACE_S, Cache, DiskFullError, reported_as
from trainables.data.storage.cleaner import remove_unused
from trainables.data.storage.free_space import RAM, format_bytes
from trainables.data.storage.origin import Origin
from trainables.errors import DataError
from trainables.locks import locked
from trainables.rundir import expand_home
from trainables.throttled import Throttled

_NUM_THREADS = 4  # enough to keep a network disk busy; a local one needs a single thread
_PROGRESS_S = 5.0
_log = logging.getLogger("raydistill")


def base_folder(stage: str) -> str:
    """Return the folder for the copies of `data.stage` (`ram` or a folder)."""
    return RAM if stage == "ram" else stage


def set_identity(index: Index) -> str:
    """Return a hash that two packed sets share only if all their files are equal."""
    return hashlib.sha256(index.model_dump_json().encode()).hexdigest()[:32]


def open_staged(data: DataConfig, split: Split) -> RecordsSource:
    """Open one split of the packed set in `data.path` from a copy in `data.stage`. Raises as `stage_set` does."""
    cache, index = stage_set(data.path, data.stage)
    shards = LocalShards(cache.folder, index.splits[split].shards, release=cache.close)
    return RecordsSource(cache.folder, index, split, shards, data.labels)


def stage_set(path: str, to: str, *, grace_s: float = GRACE_S) -> tuple[Cache, Index]:
    """Copy the packed set in the folder `path` to this node, and return the copy and its index. `to` is `ram` or a folder.

    The first process of the node copies and the others wait; files that an earlier copy finished are reused.

    Raises DataError if it does not fit, a file cannot be read or does not match the index, or the copy cannot be written.
    """
    root, base = expand_home(path), base_folder(to)
    index = read_index(root)
    total = format_bytes(sum(file.bytes for file in index.files()))
    with reported_as("data.stage", base, "give another folder"):
        cache = Cache(base, set_identity(index), grace_s=grace_s)

        def log_progress() -> None:
            _log.info("staging %s in %s: %s of %s", path, base, format_bytes(cache.num_bytes()), total)

        progress = Throttled(log_progress, pause_s=_PROGRESS_S)
        try:
            with locked(cache.folder.parent / "copying", progress):
                if missing := [file for file in index.files() if not cache.has(file.file, file.bytes)]:
                    _copy(root, missing, cache, progress)
        except DiskFullError as error:
            cache.close()
            remove_unused(str(cache.folder.parent))
            raise DataError(f"data.stage: {error} in {base}; write data.stage=none, or a folder with more room") from None
        except BaseException:
            cache.close()
            raise
    return cache, index


def _copy(root: Path, missing: list[File], cache: Cache, progress: Callable[[], None]) -> None:
    """Copy `missing` from `root`. Raises DiskFullError with a reason, and as `stage_set` does."""
    num_bytes, room_bytes = sum(file.bytes for file in missing), cache.room_bytes() - cache.num_bytes()
    what = f"{format_bytes(num_bytes)} of {root}"
    if num_bytes > room_bytes:
        raise DiskFullError(f"{what} do not fit into the {format_bytes(room_bytes)} that are free")
    origin, began_s = Origin(str(root)), time.monotonic()

    def copy(file: File) -> None:
        if not cache.ensure(file.file, file.bytes, partial(origin.fetch, file)):
            raise DiskFullError(f"others filled the disk before {what} were copied")

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="stage") as pool:
        for _ in pool.map(copy, missing):
            progress()
    took_s = max(time.monotonic() - began_s, 1e-3)
    _log.info("staged %s in %s in %.1f s (%s/s)", what, cache.folder, took_s, format_bytes(num_bytes / took_s))
