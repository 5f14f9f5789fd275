"""`data.stage`: a packed set copied once per node into memory or to a local disk, shared by all workers and trials there."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from trainables.config import DataConfig
from trainables.data.index import INDEX, File, Index, read_index
from trainables.data.order import Split
from trainables.data.sources.records import RecordsSource, open_records
from trainables.data.sources.shards import LocalShards
from trainables.data.storage.shared_folder import (
    GRACE_S,
    RAM,
    FolderLease,
    folder_bytes,
    format_bytes,
    free_bytes,
    lease_folder,
    remove_others,
    reported_as,
)
from trainables.data.storage.transfer import Folder, NoRoomError, StoppedError, fetch
from trainables.errors import DataError
from trainables.locks import locked
from trainables.rundir import expand_home, write_atomic

_COPIES = 4  # at a time: what a disk across a network needs to be busy; locally one would do
_PROGRESS_S = 5.0
_log = logging.getLogger("raydistill")


def base_folder(stage: str) -> str:
    """The folder in which `data.stage` (`ram` or a folder) keeps its copies."""
    return RAM if stage == "ram" else stage


def stage_set(path: str, to: str, *, grace_s: float = GRACE_S) -> tuple[str, FolderLease]:
    """The folder of this node's copy of the packed set in the folder `path`, and what keeps it there.

    The first process of the node copies, others wait; files that an earlier copy finished serve again. `to`: `ram` or a folder.

    Raises DataError: it does not fit, a file cannot be read or is not the one of its index, or the copy cannot be written.
    """
    root = expand_home(path)
    index = read_index(root)
    content = (root / INDEX).read_bytes()
    with reported_as("data.stage", base_folder(to), "give another folder"):
        lease = lease_folder(base_folder(to), hashlib.sha256(content).hexdigest()[:32], grace_s=grace_s)
        target = lease.folder / "data"
        progress = StagingProgress(f"staging {path} in {base_folder(to)}", target, index)
        try:
            target.mkdir(mode=0o700, exist_ok=True)
            with locked(lease.folder / "copying", progress):
                if missing := [file for file in index.files() if not is_whole(target, file)]:
                    _copy(root, missing, lease, progress)
                write_atomic(target / INDEX, content)
        except BaseException:
            lease.close()
            raise
    return str(target), lease


class StagedRecords(RecordsSource):
    """One split of a packed set as this node's copy has it; see `open_staged`."""

    def __init__(self, root: Path, index: Index, split: Split, lease: FolderLease) -> None:
        super().__init__(root, index, split, LocalShards(root, index.splits[split].shards))
        self._root, self._split, self._lease = root, split, lease

    def close(self) -> None:
        """This process needs the copy no more."""
        self._lease.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """For a process that ends before this one, whose lease does for both."""
        return open_records, (str(self._root), self._split)


def open_staged(data: DataConfig, split: Split) -> StagedRecords:
    """One split of the packed set `data.path`, copied to `data.stage` once per node. Raises DataError, see `stage_set`."""
    path, lease = stage_set(data.path, data.stage)
    return StagedRecords(Path(path), read_index(Path(path)), split, lease)


def is_whole(folder: Path, file: File) -> bool:
    """Whether a file that was verified before it was given its name is still all there."""
    try:
        return os.stat(folder / file.file).st_size == file.bytes
    except FileNotFoundError:
        return False


class StagingProgress:
    """Logs every few seconds that it is called how much of a set is in a folder, in processes that copy and that wait."""

    def __init__(self, what: str, folder: Path, index: Index) -> None:
        self._what, self._folder, self._total_bytes = what, folder, sum(file.bytes for file in index.files())
        self._logged_at = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._logged_at < _PROGRESS_S:
            return
        self._logged_at = now
        _log.info("%s: %s of %s", self._what, format_bytes(folder_bytes(self._folder)), format_bytes(self._total_bytes))


def _copy(root: Path, missing: list[File], lease: FolderLease, progress: Callable[[], None]) -> None:
    """Copy `missing` from `root`; where the room runs out, nothing of the copy stays."""
    target, base = lease.folder / "data", lease.folder.parent.parent
    for unfinished in target.glob(".*"):
        unfinished.unlink()
    needed_bytes = sum(file.bytes for file in missing)
    if needed_bytes > free_bytes(target):
        remove_others(lease, within_grace=True)
    if needed_bytes > (room_bytes := free_bytes(target)):
        raise DataError(
            f"data.stage: {format_bytes(needed_bytes)} of {root} do not fit into the {format_bytes(room_bytes)} "
            f"that are free in {base}; write data.stage=none, or a folder with more room"
        )
    began, stop = time.monotonic(), threading.Event()

    def check_stopped() -> None:
        if stop.is_set():
            raise StoppedError

    with ThreadPoolExecutor(_COPIES, thread_name_prefix="stage") as pool:
        copies = {pool.submit(fetch, Folder(root), file, target, check_stopped) for file in missing}
        try:
            running = copies
            while running and not any(copy.done() and copy.exception() for copy in copies):
                _, running = wait(running, timeout=1, return_when=FIRST_EXCEPTION)
                progress()
        finally:
            stop.set()
            for copy in copies:
                copy.cancel()
    failures = [failure for copy in copies if not copy.cancelled() and (failure := copy.exception())]
    if any(isinstance(failure, NoRoomError) for failure in failures):
        for file in target.iterdir():
            file.unlink()
        raise DataError(
            f"data.stage: {base} was full before {format_bytes(needed_bytes)} of {root} were copied there: "
            "others write to it too; write data.stage=none, or a folder with more room"
        )
    for failure in failures:
        if not isinstance(failure, StoppedError):
            raise failure
    took_s = time.monotonic() - began
    bytes_per_s = needed_bytes / max(took_s, 1e-3)
    _log.info("staged %s of %s in %s in %.1f s (%s/s)", format_bytes(needed_bytes), root, base, took_s, format_bytes(bytes_per_s))
