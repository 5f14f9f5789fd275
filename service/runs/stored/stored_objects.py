"""The objects of a run in an object store, to be removed by `distill clean` while no driver can take the run up."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from service.runs.stored.driver_lease import FOLDER, SEGMENTS, DriverLease, is_fresh
from service.runs.stored.stored_runs import RAY, fetch_records, uri_of
from trainables.errors import ExperimentError
from trainables.object_store.store import OPENING_S, ObjectStore, object_at

_LAST = "experiment.yaml"
"""What a run's driver puts first and a cleaning removes last: by it the rest is found."""


def stored_run_folders(root: Path) -> list[Path]:
    """The scratch folders of the runs at a root in an object store; [] of another root.

    A bucket may have data and other roots beside them: only a run has an `experiment.yaml`. Raises StorageError.
    """
    uri = uri_of(root)
    names = [name for name in ObjectStore(uri, OPENING_S).folders() if not name.startswith(".")] if uri else []
    return [root / name for name in names if ObjectStore(f"{uri}/{name}", OPENING_S).read(_LAST) is not None]


class StoredObjects:
    """The objects of one run, as they are listed when this is made."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's scratch folder, which gets its log and files. Raises StorageError."""
        uri = uri_of(folder)
        assert uri is not None
        self._folder, self._store = folder, ObjectStore(uri, OPENING_S)
        self.entries = self._store.entries()
        root, name = object_at(uri)
        self._ray = ObjectStore(f"{root.uri}/{RAY}/{name}", OPENING_S)
        self._lease: DriverLease | None = None
        self._is_removed = False
        self.damage: ExperimentError | None = None
        """What is wrong with the run's log."""
        try:
            fetch_records(folder)
        except ExperimentError as error:
            self.damage = error
            self._store.get(_LAST, folder / _LAST)  # what it refers to is needed all the same

    def is_old(self, before_s: float) -> bool:
        """Whether nothing was put since then, by the store's clock."""
        return all(entry.changed_ns < before_s * 1e9 for entry in self.entries.values())

    def is_driven(self) -> bool:
        """Whether a driver works on the run. Raises StorageError."""
        return is_fresh(self._store.uri)

    def num_bytes(self, path: Path) -> int:
        """Of the object of a file, or of all of the run."""
        part = str(path.relative_to(self._folder))
        return sum(entry.size for name, entry in self.entries.items() if part in (".", name))

    def checkpoints(self) -> list[Path]:
        """Where the run's checkpoints are, or would be, in its folder."""
        return [self._folder / name for name in sorted(self.entries) if Path(name).match("checkpoints/*.safetensors")]

    @contextlib.contextmanager
    def exclusive(self, echo: Callable[[str], None]) -> Iterator[None]:
        """Inside the context no driver takes the run up.

        Raises:
            ExperimentError: one works on it.
            StorageError: the store does not answer.
        """
        self._lease = DriverLease(self._store.uri, self._folder, lambda: None)
        self._lease.acquire(echo)
        try:
            yield
        finally:
            self._lease.release()
            if self._is_removed:
                self._store.delete_all()  # an object that stands for an empty folder is left of each that was removed

    def remove(self, path: Path) -> bool:
        """Remove a file, or the whole run, from the store and then here; inside `exclusive`.

        A run's log goes first: what a kill leaves is no run that could be resumed. Raises StorageError.
        """
        assert self._lease is not None
        self._lease.check()
        if path != self._folder:
            self._store.delete(str(path.relative_to(self._folder)))
            path.unlink(missing_ok=True)
            return True
        self._store.delete_all(SEGMENTS)
        for name in self.entries:
            if "/" not in name and name != _LAST:
                self._store.delete(name)
        for folder in self._store.folders():
            if folder != FOLDER:
                self._lease.check()
                self._store.delete_all(folder)
        self._ray.delete_all()
        self._store.delete(_LAST)
        shutil.rmtree(path, ignore_errors=True)
        self._is_removed = True
        return True
