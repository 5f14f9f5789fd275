"""The objects of a run in an object store, as `distill clean` lists and removes them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from service.runs.stored.driver_lease import FOLDER, SEGMENTS, DriverLease, check_lease, is_fresh
from service.runs.stored.stored_runs import RAY, fetch_records, uri_of
from trainables.errors import ExperimentError
from trainables.object_store.store import OPENING_S, ObjectStore, object_at

_LAST = "experiment.yaml"
"""The object that a driver uploads first and a cleaning removes last, since it identifies a run."""


def stored_run_folders(root: Path) -> list[Path]:
    """Return the scratch folders of the runs at a root in an object store, or [] for another root.

    A bucket may have other folders too: only a run has an `experiment.yaml`. Raises StorageError.
    """
    uri = uri_of(root)
    names = [name for name in ObjectStore(uri, OPENING_S).folders() if not name.startswith(".")] if uri else []
    return [root / name for name in names if ObjectStore(f"{uri}/{name}", OPENING_S).read(_LAST) is not None]


class StoredObjects:
    """The objects of one run, listed at construction."""

    def __init__(self, folder: Path) -> None:
        """Fetch the run's log and files to its scratch folder `folder`. Raises StorageError."""
        uri = uri_of(folder)
        assert uri is not None
        self._folder, self._store = folder, ObjectStore(uri, OPENING_S)
        self.entries = self._store.entries()
        root, name = object_at(uri)
        self._ray = ObjectStore(f"{root.uri}/{RAY}/{name}", OPENING_S)
        self._lease: DriverLease | None = None
        self._is_removed = False
        self.damage: ExperimentError | None = None
        """The error if the run's log is damaged."""
        try:
            fetch_records(folder)
        except ExperimentError as error:
            self.damage = error
            self._store.get(_LAST, folder / _LAST)  # its references are needed even so

    def is_old(self, before_s: float) -> bool:
        """Whether nothing was uploaded since `before_s`, unix time by the store's clock."""
        return all(entry.changed_ns < before_s * 1e9 for entry in self.entries.values())

    def is_driven(self) -> bool:
        """Whether a driver is working on the run. Raises StorageError."""
        return is_fresh(self._store.uri)

    def num_bytes(self, path: Path) -> int:
        """Return the size of a file's object, or of the whole run if `path` is its folder."""
        part = str(path.relative_to(self._folder))
        return sum(entry.size for name, entry in self.entries.items() if part in (".", name))

    def checkpoints(self) -> list[Path]:
        """Return the local paths of the run's checkpoints, whether downloaded or not."""
        return [self._folder / name for name in sorted(self.entries) if Path(name).match("checkpoints/*.safetensors")]

    @contextlib.contextmanager
    def exclusive(self, echo: Callable[[str], None]) -> Iterator[None]:
        """Keep drivers from resuming the run inside the context.

        Raises:
            ExperimentError: a driver is working on it.
            StorageError: the store does not answer.
        """
        self._lease = DriverLease(self._store.uri, self._folder, lambda error: None)
        self._lease.acquire(echo)
        try:
            yield
        finally:
            self._lease.release()
            if self._is_removed:
                self._store.delete_all()  # removing objects may leave markers of empty folders

    def remove(self, path: Path) -> None:
        """Remove a file or the whole run, first from the store, then locally. Only inside `exclusive`.

        The log of a run is removed first, so that after a kill the rest cannot be resumed. Raises StorageError.
        """
        assert self._lease is not None
        check_lease(self._store, self._lease.name)
        if path != self._folder:
            self._store.delete(str(path.relative_to(self._folder)))
            path.unlink(missing_ok=True)
            return
        self._store.delete_all(SEGMENTS)
        for name in self.entries:
            if "/" not in name and name != _LAST:
                self._store.delete(name)
        for folder in self._store.folders():
            if folder != FOLDER:
                check_lease(self._store, self._lease.name)
                self._store.delete_all(folder)
        self._ray.delete_all()
        self._store.delete(_LAST)
        shutil.rmtree(path, ignore_errors=True)
        self._is_removed = True
