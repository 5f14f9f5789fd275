"""`data.stage`: a packed set copied once per node into memory or to a local disk, shared by all workers and trials there."""

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
from trainables.data.storage.cache import GRACE_S, Cache, NoRoomError, reported_as
from trainables.data.storage.cleaner import remove_unused
from trainables.data.storage.free_space import RAM, format_bytes
from trainables.data.storage.origin import Origin
from trainables.errors import DataError
from trainables.locks import locked
from trainables.rundir import expand_home
from trainables.throttled import Throttled

_COPIES = 4  # at a time: what a disk across a network needs to be busy; locally one would do
_PROGRESS_S = 5.0
_log = logging.getLogger("raydistill")


def base_folder(stage: str) -> str:
    """The folder in which `data.stage` (`ram` or a folder) has its copies."""
    return RAM if stage == "ram" else stage


def set_identity(index: Index) -> str:
    """What two packed sets have in common only where all their files are the same."""
    return hashlib.sha256(index.model_dump_json().encode()).hexdigest()[:32]


class StagedRecords(RecordsSource):
    """One split of a packed set as this node's copy has it; see `open_staged`."""

    def __init__(self, cache: Cache, index: Index, split: Split, labels: bool) -> None:
        super().__init__(cache.folder, index, split, LocalShards(cache.folder, index.splits[split].shards), labels)
        self._cache = cache

    def close(self) -> None:
        """This process needs the copy no more."""
        self._cache.close()


def open_staged(data: DataConfig, split: Split) -> StagedRecords:
    """One split of the packed set in the folder `data.path`, copied to `data.stage` once per node. Raises as `stage_set` does."""
    cache, index = stage_set(data.path, data.stage)
    return StagedRecords(cache, index, split, data.labels)


def stage_set(path: str, to: str, *, grace_s: float = GRACE_S) -> tuple[Cache, Index]:
    """This node's copy of the packed set in the folder `path`, and its index. `to`: `ram` or a folder.

    The first process of the node copies, others wait; files that an earlier copy finished serve again.

    Raises DataError: it does not fit, a file cannot be read or is not the one of its index, or the copy cannot be written.
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
        except NoRoomError as error:
            cache.close()
            remove_unused(str(cache.folder.parent))
            raise DataError(f"data.stage: {error} in {base}; write data.stage=none, or a folder with more room") from None
        except BaseException:
            cache.close()
            raise
    return cache, index


def _copy(root: Path, missing: list[File], cache: Cache, progress: Callable[[], None]) -> None:
    """Copy `missing` from `root`. Raises NoRoomError, whose text says why, and as `stage_set` does."""
    num_bytes, room_bytes = sum(file.bytes for file in missing), cache.room_bytes() - cache.num_bytes()
    what = f"{format_bytes(num_bytes)} of {root}"
    if num_bytes > room_bytes:
        raise NoRoomError(f"{what} do not fit into the {format_bytes(room_bytes)} that are free")
    origin, began_s = Origin(str(root)), time.monotonic()

    def copy(file: File) -> None:
        if not cache.bring(file.file, file.bytes, partial(origin.fetch, file)):
            raise NoRoomError(f"others filled the disk before {what} were copied")

    with ThreadPoolExecutor(_COPIES, thread_name_prefix="stage") as pool:
        for _ in pool.map(copy, missing):
            progress()
    took_s = max(time.monotonic() - began_s, 1e-3)
    _log.info("staged %s in %s in %.1f s (%s/s)", what, cache.folder, took_s, format_bytes(num_bytes / took_s))
