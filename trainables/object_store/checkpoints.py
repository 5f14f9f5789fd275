"""Checkpoints of a run in an object store, on the nodes that write and read them.

Each is an object of its own, `STAGE/checkpoints/last-STEP-RANDOM.safetensors`, which nobody replaces; the run's log names those
that count. A node that has one has the file of the same name.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.config import RunStore
from trainables.errors import CheckpointError
from trainables.locks import locked
from trainables.object_store.store import ObjectStore
from trainables.rundir import fsync_directory
from trainables.user_folder import user_folder


def own_folder(folder: Path) -> None:
    """Make the folder for what this node has of a run; no other user can enter it. Raises OSError."""
    for parent in folder.parents:
        if parent.name == f"raydistill-{os.getuid()}":
            user_folder(parent.parent)
    folder.mkdir(parents=True, exist_ok=True)


def fetch(run_store: RunStore, name: str, retry_s: float | None = None) -> Path:
    """The file on this node of an object of the run that never changes.

    Raises:
        CheckpointError: there is no such object.
        StorageError: the store does not answer.
    """
    folder = Path(run_store.folder)
    store, path = ObjectStore(run_store.uri, *([] if retry_s is None else [retry_s])), folder / name
    own_folder(folder)
    with locked(folder / ".copying"):  # one process of this node at a time
        is_fixed = path.exists() and "-" in path.stem  # others may be of an earlier run of this name
        if not is_fixed and not store.get(name, path):
            raise CheckpointError(f"there is no {run_store.uri}/{name}: it was removed")
    return path


def fetch_inputs(settings: Mapping[str, Any]) -> None:
    """Bring to this node what workers read of a run: copies of method files, checkpoints that it has trained.

    `settings`: a `TrainConfig` or an `EvaluateConfig` as plain data. Raises StorageError.
    """
    if settings.get("run_store") is None:
        return
    run_store = RunStore.model_validate(settings["run_store"])
    for name in ObjectStore(run_store.uri).entries("methods"):
        fetch(run_store, name)
    for weights in ((settings.get("teacher") or {}).get("weights"), settings.get("checkpoint"), settings.get("init_checkpoint")):
        if weights and Path(weights).is_relative_to(run_store.folder):
            fetch(run_store, str(Path(weights).relative_to(run_store.folder)))


class StageCheckpoints:
    """Those of the stage in `folder`, as one of its workers brings them here and puts them."""

    def __init__(self, run_store: RunStore, folder: Path) -> None:
        self._run_store, self._folder = run_store, folder
        self._store, self._part = ObjectStore(run_store.uri), str(folder.relative_to(run_store.folder))
        self._newest, self._replaced = dict(run_store.checkpoints), list[str]()

    def begin(self) -> None:
        """Make the stage's last checkpoint on this node the newest that counts, or none. Raises StorageError."""
        folder, newest = self._folder / "checkpoints", self._newest.get("last")
        own_folder(Path(self._run_store.folder))
        if newest is not None:
            _link(fetch(self._run_store, f"{self._part}/checkpoints/{newest}"), folder / "last.safetensors")
        with locked(Path(self._run_store.folder, ".copying")):
            for path in folder.glob("*.safetensors"):
                if path.name not in ({"last.safetensors"} if newest else set()) | {*self._newest.values()}:
                    path.unlink(missing_ok=True)

    def put(self, paths: Sequence[Path], step: int) -> list[str]:
        """Put files that this rank has written, and return their names there. Raises StorageError."""
        names = []
        for path in paths:
            name = f"{path.stem}-{step:08}-{secrets.token_hex(4)}{path.suffix}"
            self._store.put(f"{self._part}/checkpoints/{name}", path)
            _link(path, path.with_name(name))
            self._replaced += [self._newest[path.stem]] if path.stem in self._newest else []
            self._newest[path.stem] = name
            names.append(name)
        return names

    def remove_replaced(self) -> None:
        """Remove what was put before, once the log names what was put since. Raises StorageError."""
        for name in self._replaced:
            self._store.delete(f"{self._part}/checkpoints/{name}")
            (self._folder / "checkpoints" / name).unlink(missing_ok=True)
        self._replaced.clear()


def _link(path: Path, other: Path) -> None:
    """Give a file another name too, in place of what has that name."""
    temporary = other.with_name(f".{other.name}.{secrets.token_hex(4)}.tmp")
    os.link(path, temporary)
    os.replace(temporary, other)
    fsync_directory(other.parent)
