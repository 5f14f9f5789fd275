"""A node's copy of a run that is in an object store: which files it has, who writes them, and what is brought to it.

A run has one writer for each of its objects. The driver writes the run's own files, the checkpoints (`OF_STAGE`) of a stage are
written by its workers. `owner.json`, of the run and of each stage, names the folder
where they are written: that copy is the newest there is, and whatever is elsewhere is made equal to the store before it is
continued.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainables.locks import locked
from trainables.object_store.store import RETRY_S, ObjectStore
from trainables.rundir import write_atomic
from trainables.user_folder import user_folder

OF_STAGE = ("checkpoints/last.safetensors", "checkpoints/best.safetensors")
"""What workers write, in the order in which it is put."""
OWNER = "owner.json"
_SETTLED_NS = 5 * 10**9
"""Stores know times to the second: a younger object may be replaced by one of the same size and time."""
_SYNC_STATE = ".mlflow.json"
"""How much of the run's log, as it is in this copy, MLflow has: it can be found out again."""


def is_of_workers(name: str) -> bool:
    """Whether a stage's workers write the object, named relative to its run."""
    return stage_of(name) is not None


def stage_of(name: str) -> str | None:
    """The stage whose workers write the object, named relative to its run; None where they do not."""
    return next((name.removesuffix(f"/{each}") for each in OF_STAGE if name.endswith(f"/{each}")), None)


def is_of_run(name: str) -> bool:
    """Whether the object, named relative to its run, is one that every copy has: leases, owners and this node's are not."""
    parts = name.split("/")
    return parts[-1] != OWNER and not any(part.startswith(".") for part in parts)


class RunCopy:
    """The copy of the run at `uri` in `folder`."""

    def __init__(self, uri: str, folder: Path, retry_s: float = RETRY_S) -> None:
        self.store, self.folder = ObjectStore(uri, retry_s), folder

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One process of this node at a time brings files here, or begins to write them."""
        for parent in self.folder.parents:
            if parent.name == f"raydistill-{os.getuid()}":
                user_folder(parent.parent)  # which no other user can enter
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".copying"):
            yield

    def folder_id(self) -> str:
        """What distinguishes this folder from every other copy; it goes where the folder goes."""
        path = self.folder / ".folder-id"
        if not path.exists():
            write_atomic(path, secrets.token_hex(16).encode())
        return path.read_text(encoding="utf-8")

    def owner(self, part: str = "") -> str | None:
        """The id of the folder where the run, or a stage of it, is written, or was last; None: nowhere yet."""
        content = self.store.read(_join(part, OWNER))
        return None if content is None else str(json.loads(content)["folder"])

    def own(self, part: str, includes: Callable[[str], bool]) -> None:
        """Begin to write the run, or a stage of it, here: what the store has of it and this folder has not comes here first.

        Where it was last written here, what is here is put: a kill may have come before a put. A file that is missing here was
        lost, as to a cleaner of temporary files: it comes from the store. Nothing is deleted: see `stored_runs.delete`.

        Raises StorageError: the store does not answer.
        """
        with self._exclusive():
            owner = self.owner(part)
            if owner not in (None, self.folder_id()):
                self._get_all(part, includes, remove_others=True)
            if part and owner is None:  # what is here of the stage was discarded since
                for name in filter(includes, self.files(part)):
                    (self.folder / name).unlink(missing_ok=True)
            if owner != self.folder_id():
                self.store.put(_join(part, OWNER), json.dumps({"folder": self.folder_id()}).encode())
            if owner in (None, self.folder_id()):
                self._get_missing(part, includes)
                self._put_all(part, includes)

    def fetch(self, part: str, includes: Callable[[str], bool]) -> None:
        """Bring here what the store has of the run, or a stage of it; where this copy is the newest, only files that it lost.

        Raises StorageError: the store does not answer.
        """
        with self._exclusive():
            if self.owner(part) != self.folder_id():
                self._get_all(part, includes)
            else:
                self._get_missing(part, includes)

    def fetch_checkpoint(self, name: str) -> None:
        """Bring here a stage's checkpoint, `STAGE/checkpoints/…`. Raises StorageError."""
        self.fetch(str(Path(name).parent.parent), lambda each: each == name)

    def fetch_missing(self, part: str) -> None:
        """Bring here the files of a folder that never change and are not here. Raises StorageError."""
        with self._exclusive():
            self._get_missing(part, lambda name: True)

    def discard(self, part: str) -> None:
        """Remove a stage from the store. Raises StorageError."""
        for name in self.store.entries(part):
            self.store.delete(name)

    def files(self, part: str = "") -> list[str]:
        """The run's files that are here, named relative to the run."""
        found = []
        for folder, _, names in os.walk(self.folder / part):  # which passes over a folder that vanishes meanwhile
            found += [str(Path(folder, name).relative_to(self.folder)) for name in names]
        return [name for name in found if is_of_run(name) and (self.folder / name).is_file()]

    def _get_all(self, part: str, includes: Callable[[str], bool], *, remove_others: bool = False) -> None:
        entries = {name: entry for name, entry in self.store.entries(part).items() if is_of_run(name)}
        for name, entry in entries.items():
            path = self.folder / name
            if not includes(name) or _is_same(path, entry.size, entry.changed_ns) or not self.store.get(name, path):
                continue
            if time.time_ns() - entry.changed_ns > _SETTLED_NS:
                os.utime(path, ns=(entry.changed_ns, entry.changed_ns))
        if remove_others:
            for name in self.files(part):
                if includes(name) and name not in entries:
                    (self.folder / name).unlink(missing_ok=True)
            if not part:  # of records that another driver may have written otherwise
                (self.folder / _SYNC_STATE).unlink(missing_ok=True)

    def _get_missing(self, part: str, includes: Callable[[str], bool]) -> None:
        for name in self.store.entries(part):
            if is_of_run(name) and includes(name) and not (self.folder / name).exists():
                self.store.get(name, self.folder / name)

    def _put_all(self, part: str, includes: Callable[[str], bool]) -> None:
        files = [name for name in self.files(part) if includes(name)]
        for name in sorted(files, key=put_order):
            self.store.put(name, self.folder / name)


def put_order(name: str) -> tuple[bool, bool, int]:
    """Sorts a run's log, which says what else is there, last, and a stage's files as `OF_STAGE` has them."""
    of_stage = next((index for index, each in enumerate(OF_STAGE) if name.endswith(f"/{each}")), -1)
    return name in ("result.json", "events.jsonl"), name == "events.jsonl", of_stage


def _join(part: str, name: str) -> str:
    return f"{part}/{name}" if part else name


def _is_same(path: Path, size: int, changed_ns: int) -> bool:
    """Whether a file is the object that was brought here with this size and time."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return found.st_size == size and found.st_mtime_ns == changed_ns
