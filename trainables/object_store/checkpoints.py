"""Checkpoints of a run in an object store, on the nodes that write and read them.

Each is a separate object, `STAGE/checkpoints/last-STEP-RANDOM.safetensors`, that is never replaced; the run's log names the valid
ones. A node stores its copy under the same name.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.config import RunStore
from trainables.errors import CheckpointError
from trainables.locks import locked
from trainables.object_store.store import RETRY_S, ObjectStore
from trainables.rundir import fsync_directory
from trainables.user_folder import user_folder


def own_folder(folder: Path) -> None:
    """Create the folder for this node's copy of a run, which no other user can enter. Raises OSError."""
    for parent in folder.parents:
        if parent.name == f"raydistill-{os.getuid()}":
            user_folder(parent.parent)
    folder.mkdir(parents=True, exist_ok=True)


def fetch(run_store: RunStore, name: str, retry_s: float = RETRY_S) -> Path:
    """Download an immutable object of the run to this node, unless it is there already. Returns its path.

    Raises:
        CheckpointError: there is no such object.
        StorageError: the store does not answer.
    """
    folder = Path(run_store.folder)
    store, path = ObjectStore(run_store.uri, retry_s), folder / name
    own_folder(folder)
    with locked(folder / ".copying"):  # one process of this node at a time
        is_current = path.exists() and "-" in path.stem  # without a random suffix it may be from an earlier run of this name
        if not is_current and not store.get(name, path):
            raise CheckpointError(f"{run_store.uri}/{name} does not exist: it was removed")
    return path


def fetch_inputs(settings: Mapping[str, Any]) -> None:
    """Download the files of a run that its workers read: copies of method files, and checkpoints that the run trained.

    `settings` is a `TrainConfig` or `EvaluateConfig` as plain data. Raises StorageError.
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
    """The checkpoints of the stage in `folder`, as one of its workers downloads and uploads them."""

    def __init__(self, run_store: RunStore, folder: Path) -> None:
        self._run_store, self._folder = run_store, folder
        self._store, self._part = ObjectStore(run_store.uri), str(folder.relative_to(run_store.folder))
        self._newest, self._replaced = dict(run_store.checkpoints), list[str]()

    def begin(self) -> None:
        """Make the newest valid checkpoint the stage's last on this node, and remove the others. Raises StorageError."""
        folder, newest = self._folder / "checkpoints", self._newest.get("last")
        own_folder(Path(self._run_store.folder))
        if newest is not None:
            _link(fetch(self._run_store, f"{self._part}/checkpoints/{newest}"), folder / "last.safetensors")
        with locked(Path(self._run_store.folder, ".copying")):
            for path in folder.glob("*.safetensors"):
                if path.name not in ({"last.safetensors"} if newest else set()) | {*self._newest.values()}:
                    path.unlink(missing_ok=True)

    def put(self, paths: Sequence[Path], step: int) -> list[str]:
        """Upload files that this rank has written, and return their object names. Raises StorageError."""
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
        """Remove replaced checkpoints, once the log names their successors. Raises StorageError."""
        for name in self._replaced:
            self._store.delete(f"{self._part}/checkpoints/{name}")
            (self._folder / "checkpoints" / name).unlink(missing_ok=True)
        self._replaced.clear()


def _link(path: Path, other: Path) -> None:
    """Atomically replace `other` with a hard link to `path`."""
    temporary = other.with_name(f".{other.name}.{secrets.token_hex(4)}.tmp")
    os.link(path, temporary)
    os.replace(temporary, other)
    fsync_directory(other.parent)
