"""The objects of a run in an object store, to be removed by `distill clean` while no driver can take the run up."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from service.runs.stored.driver_lease import FOLDER, DriverLease, is_fresh
from service.runs.stored.stored_runs import RAY, fetch_driver_files, is_to_be_put, uri_of
from trainables.errors import StorageError
from trainables.locks import is_locked
from trainables.object_store.run_copy import OWNER, RunCopy, put_order
from trainables.object_store.store import OPENING_S, ObjectStore, object_at
from trainables.rundir import RunDir


def stored_run_folders(root: Path) -> list[Path]:
    """The folders of this machine that are, or would be, the copies of the runs at a root in an object store; [] of another.

    A bucket may have data and other roots beside them: only a run has an `owner.json`. Raises StorageError.
    """
    uri = uri_of(root)
    names = [name for name in ObjectStore(uri, OPENING_S).folders() if not name.startswith(".")] if uri else []
    return [root / name for name in names if ObjectStore(f"{uri}/{name}", OPENING_S).read(OWNER) is not None]


class StoredObjects:
    """The objects of one run, as they are listed when this is made."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the run's copy, which gets its experiment, result and records. Raises StorageError."""
        uri = uri_of(folder)
        assert uri is not None
        self.copy = RunCopy(uri, folder, OPENING_S)
        self.entries = self.copy.store.entries()
        root, name = object_at(uri)
        self._ray = ObjectStore(f"{root.uri}/{RAY}/{name}", OPENING_S)
        self._lease: DriverLease | None = None
        self._is_removed = False
        if not is_locked(folder / ".lock"):
            fetch_driver_files(self.copy)

    def is_old(self, before_s: float) -> bool:
        """Whether nothing was put since then, by the store's clock."""
        return all(entry.changed_ns < before_s * 1e9 for entry in self.entries.values())

    def is_driven(self) -> bool:
        """Whether a driver works on the run. Raises StorageError."""
        return is_fresh(self.copy.store.uri)

    def num_bytes(self, path: Path) -> int:
        """Of the object of a file, or of all of the run."""
        part = str(path.relative_to(self.copy.folder))
        return sum(entry.size for name, entry in self.entries.items() if part in (".", name))

    def checkpoints(self) -> list[Path]:
        """Where the run's checkpoints are, or would be, in its copy."""
        return [self.copy.folder / name for name in sorted(self.entries) if Path(name).match("checkpoints/*.safetensors")]

    @contextlib.contextmanager
    def exclusive(self, echo: Callable[[str], None]) -> Iterator[None]:
        """Inside the context no driver takes the run up.

        Raises:
            ExperimentError: one works on it.
            StorageError: the store does not answer.
        """
        self._lease = DriverLease(self.copy, lambda: None)
        self._lease.acquire(echo)
        try:
            yield
        finally:
            self._lease.release()
            if self._is_removed:
                self.copy.store.delete_all()  # an object that stands for an empty folder is left of each that was removed

    def remove(self, path: Path) -> bool:
        """Remove a file, or the whole run, from the store and then here; inside `exclusive`.

        A run's `events.jsonl` goes first: what a kill leaves is no run that could be resumed. Its `owner.json`, by which the rest
        is found, goes last. Raises StorageError.
        """
        assert self._lease is not None
        self._lease.check()
        store = self.copy.store
        if path != self.copy.folder:
            store.delete(str(path.relative_to(self.copy.folder)))
            path.unlink(missing_ok=True)
            return True
        own = [name for name in self.entries if "/" not in name and name != OWNER]
        for name in sorted(own, key=put_order, reverse=True):
            store.delete(name)
        for folder in store.folders():
            if folder != FOLDER:
                self._lease.check()
                store.delete_all(folder)
        self._ray.delete_all()
        store.delete(OWNER)
        shutil.rmtree(path, ignore_errors=True)
        self._is_removed = True
        return True


def needed_copy_reason(folder: Path) -> str | None:
    """Why this machine's copy of a run may not be removed; None: what is missing here comes from the store."""
    try:
        if is_locked(folder / ".lock"):
            return "a process works on it"
        if uri_of(folder) and RunDir(folder).events.exists() and is_to_be_put(folder):
            return f"the store has not all of it: distill resume {uri_of(folder)}"
    except (OSError, StorageError) as error:
        return str(error)
    return None
