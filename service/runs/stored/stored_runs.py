"""Runs in an object store, `s3://BUCKET/PREFIX/RUN`: the folder of this machine that is a copy of each, and what fills it."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from service.config.uris import secret_refusal
from trainables.config import RunStore, TrainConfig
from trainables.errors import CheckpointError, ExperimentError
from trainables.locks import is_locked
from trainables.models.checkpoint_header import checkpoints_of
from trainables.object_store.run_copy import OWNER, RunCopy, is_of_workers
from trainables.object_store.store import OPENING_S, ObjectStore
from trainables.redact import redact_uris
from trainables.rundir import RunDir, StageDir, write_atomic
from trainables.user_folder import user_folder

_ORIGIN = ".raydistill-origin"
"""In the folder of a runs' root that is a copy: its URI."""
COPIES = "runs"
RAY = ".ray"
"""Below a runs' root: Ray's own objects, by run."""
_CHECKPOINTS = "checkpoints/"


class _PathInCopy(NamedTuple):
    """A file or folder of a run in an object store."""

    copy: RunCopy
    name: str
    """Relative to the run."""


def _path_in_copy(store: RunStore | None, path: Path) -> _PathInCopy | None:
    return None if store is None else _PathInCopy(RunCopy(store.uri, Path(store.folder)), str(path.relative_to(store.folder)))


def root_folder(uri: str, option: str = "--runs") -> Path:
    """The folder, the same on every node, that has the copies of the runs at a root's URI.

    Raises ExperimentError: no URI of an object store, or one that has a key or an option in it.
    """
    if redact_uris(uri) != uri:
        raise ExperimentError(secret_refusal(option, uri))
    scheme, _, path = uri.partition("://")
    bucket, _, prefix = path.strip("/").partition("/")
    parts = [bucket, *prefix.split("/")] if prefix else [bucket]
    if scheme != "s3" or not all(parts) or {".", ".."} & {*parts} or any(c in path for c in "?#@%\\") or not path.isprintable():
        raise ExperimentError(f"{option} {uri}: write a folder, or s3://BUCKET/PREFIX (the server's address: AWS_ENDPOINT_URL)")
    uri = "s3://" + "/".join(parts)
    try:
        folder = user_folder(copies_base()) / COPIES / f"{parts[-1]}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"
        if not (folder / _ORIGIN).exists():
            write_atomic(folder / _ORIGIN, uri.encode())
    except OSError as error:
        raise ExperimentError(f"{option} {uri}: its copies cannot be written: {error}; set RAYDISTILL_COPIES") from error
    return folder


def run_folder(uri: str) -> Path:
    """The folder that is, or will be, the copy of the run at a URI. Raises ExperimentError: see `root_folder`."""
    root, _, name = uri.rstrip("/").rpartition("/")
    if not name or root.endswith(":/"):
        raise ExperimentError(f"{uri} is no run: write s3://BUCKET/PREFIX/RUN")
    return root_folder(root, "run") / name


def uri_of(path: Path) -> str | None:
    """The URI of what `path` is a copy of; None: of nothing."""
    path = path.absolute()
    for folder in (path, *path.parents):
        try:
            root = (folder / _ORIGIN).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if root.startswith("s3://"):
            return f"{root}/{path.relative_to(folder)}".removesuffix("/.")
    return None


def display_name(path: Path) -> str:
    """`path` as the user names it."""
    return uri_of(path) or str(path)


def run_store(path: Path) -> RunStore | None:
    """The store of the run, or sweep, that has `path`, a folder or file in it; None where that is no copy."""
    path = path.absolute()
    for folder, root in zip((path, *path.parents), path.parents, strict=False):
        if (root / _ORIGIN).exists() and (uri := uri_of(folder)):
            return RunStore(uri=uri, folder=str(folder))
    return None


def ray_storage(run_dir: RunDir) -> str:
    """Where Ray Tune and Ray Train write their own files: not below a run in an object store, whose listings would have them."""
    if (store := run_store(run_dir.root)) is None:
        return str(run_dir.tune)
    root, _, name = store.uri.rpartition("/")
    part = run_dir.root.absolute().relative_to(store.folder)
    return f"{root}/{Path(RAY, name, part)}"


def check_reachable(root: Path) -> None:
    """Refuse a root in an object store where nothing can be written. Raises StorageError."""
    if uri := uri_of(root):
        store = RunCopy(uri, root, OPENING_S).store
        store.put(".probe", b"")
        store.delete(".probe")


def is_taken(path: Path) -> bool:
    """Whether there is a run already of which `path` would be the copy. Raises StorageError."""
    uri = uri_of(path)
    return bool(uri and RunCopy(uri, path, OPENING_S).store.entries())


def fetch_records(path: Path) -> None:
    """Bring a run's records here, checkpoints apart, unless they are written by a process of this machine.

    Raises StorageError: the store does not answer.
    """
    uri = uri_of(path)
    if uri is None or is_locked(path / ".lock"):
        return
    copy = RunCopy(uri, path, OPENING_S)
    entries = copy.store.entries()
    if not entries:
        return
    copy.fetch("", lambda name: not is_of_workers(name))
    for part in stages(entries):
        copy.fetch(part, lambda name: is_of_workers(name) and _CHECKPOINTS not in name)


def fetch_driver_files(copy: RunCopy) -> None:
    """Bring here what a driver needs of a run to judge it: experiment, result and records. Raises StorageError."""
    copy.fetch("", lambda name: name in ("experiment.yaml", "events.jsonl"))


def is_to_be_put(folder: Path) -> bool:
    """Whether the newest copy of a run is in this folder, and its result is not the store's.

    Raises:
        StorageError: the store does not answer.
        OSError: the copy cannot be read.
    """
    uri = uri_of(folder)
    assert uri is not None
    copy = RunCopy(uri, folder, OPENING_S)
    return copy.owner() == copy.folder_id() and copy.store.read("events.jsonl") != RunDir(folder).events.read_bytes()


def copies_base() -> str:
    """Where this user's folder is that has, in `COPIES`, the copies of all roots in object stores."""
    return os.environ.get("RAYDISTILL_COPIES") or tempfile.gettempdir()


def fetch_checkpoint(uri: str) -> Path:
    """Bring a checkpoint of a run in an object store here; of a run's URI the student's best, of a stage's its own.

    Raises:
        ExperimentError, CheckpointError: there is none.
        StorageError: the store does not answer.
    """
    run = _run_of(uri)
    copy, part = RunCopy(run, run_folder(run), OPENING_S), uri.removeprefix(run).strip("/")
    names = [part]
    if not part.endswith(".safetensors"):
        names = [str(path.relative_to(copy.folder)) for path in checkpoints_of(copy.folder / part)]
    for name in names:
        if name in copy.store.entries(str(Path(name).parent)):
            copy.fetch_checkpoint(name)
            return copy.folder / name
    raise CheckpointError(f"there is no {' or '.join(f'{run}/{name}' for name in names)}: give a run, a stage or a checkpoint")


def _run_of(uri: str) -> str:
    """The URI of the run that has what is at `uri`.

    Raises:
        ExperimentError: there is none.
        StorageError: the store does not answer.
    """
    run = uri.rstrip("/")
    run_folder(run)  # refuses what is no URI of ours
    while run.count("/") > 3:
        store = ObjectStore(run, OPENING_S)
        if store.read(OWNER) is not None and store.read("experiment.yaml") is not None:
            return run
        run = run.rpartition("/")[0]
    raise ExperimentError(f"{uri} is in no run: copy the checkpoint to a folder that all nodes mount, and give its path there")


def stages(entries: Iterable[str]) -> list[str]:
    """The stages that workers have begun, of those that a listing of their run has."""
    return [name.removesuffix(f"/{OWNER}") for name in entries if name.endswith(f"/{OWNER}")]


def fetch_stage(config: TrainConfig) -> None:
    """Bring here what a stage's workers have put of it, but for the state that they continue from.

    Raises StorageError: the store does not answer.
    """
    if found := _path_in_copy(config.run_store, Path(config.output_dir)):
        found.copy.fetch(found.name, is_of_driver_too)


def put(path: Path) -> None:
    """Put a file that the driver writes in its workers' stead, where the run is in an object store. Raises StorageError."""
    if found := _path_in_copy(run_store(path), path):
        found.copy.store.put(found.name, path)


def fetch(path: Path) -> None:
    """Bring here a file that a worker put in an object store. Raises StorageError."""
    if found := _path_in_copy(run_store(path), path):
        found.copy.store.get(found.name, path)


def delete(path: Path) -> None:
    """Remove a file of the driver's, first in an object store: from there it would come back. Raises StorageError."""
    if found := _path_in_copy(run_store(path), path):
        found.copy.store.delete(found.name)
    path.unlink(missing_ok=True)


def discard(stage: StageDir) -> None:
    """Remove what there is of a stage, in an object store and then here. Raises StorageError."""
    if found := _path_in_copy(run_store(stage.root), stage.root):
        found.copy.discard(found.name)
    shutil.rmtree(stage.root, ignore_errors=True)


def is_of_driver_too(name: str) -> bool:
    """Whether the driver reads what the stage's workers write."""
    return is_of_workers(name) and not name.endswith("/last.safetensors")
