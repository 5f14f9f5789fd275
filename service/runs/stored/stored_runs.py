"""Runs in an object store, `s3://BUCKET/PREFIX/RUN`: each has a scratch folder on this machine, to which files are fetched."""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.config.uris import secret_refusal
from service.runs.events import Event
from service.runs.run_log import RunLog, checkpoint_names
from service.runs.stored.driver_lease import SEGMENTS
from service.runs.stored.segments import read_segments
from service.tracking.run_view import state_path
from trainables.config import RunStore, TrainConfig
from trainables.errors import CheckpointError, ExperimentError
from trainables.locks import is_locked, locked
from trainables.models.checkpoint_header import checkpoints_of, locate_checkpoint
from trainables.object_store.checkpoints import fetch, own_folder
from trainables.object_store.store import OPENING_S, Entry, ObjectStore, is_uri, object_at
from trainables.redact import redact_uris
from trainables.rundir import RunDir, StageDir, write_atomic
from trainables.user_folder import user_folder

if TYPE_CHECKING:
    from trainables.worker.recorder import RunRecorder

_ORIGIN = ".raydistill-origin"
"""File in the scratch folder of a runs' root that has the root's URI."""
COPIES = "runs"
RAY = ".ray"
"""Folder below a runs' root for Ray's objects, by run."""
NOT_PUT = ".not-put"
"""File in a scratch folder while a driver works on the run, and afterwards if uploads are missing. It says that, while the
store has the same log, local files are newer."""
_SETTLED_NS = 5 * 10**9
"""Stores have times in seconds: a younger object may still be replaced by one of the same size and time."""
_THREADS = 16


def root_folder(uri: str, option: str = "--runs") -> Path:
    """Return the folder, the same on every node, that has the copies of the runs at a root's URI.

    Raises ExperimentError: it is not a URI of an object store, or one with a key or an option in it.
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
    """Return the scratch folder of the run at a URI. Raises ExperimentError: see `root_folder`."""
    root, _, name = uri.rstrip("/").rpartition("/")
    if not name or root.endswith(":/"):
        raise ExperimentError(f"{uri} is not a run: write s3://BUCKET/PREFIX/RUN")
    return root_folder(root, "run") / name


def uri_of(path: Path) -> str | None:
    """Return the URI that `path` is the local copy of, or None if it is not a copy."""
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
    """Return `path` as the user knows it: its URI if it is a copy."""
    return uri_of(path) or str(path)


def shell_name(path: Path) -> str:
    """`path` as the user types it in a command line."""
    return shlex.quote(display_name(path))


def run_store(path: Path) -> RunStore | None:
    """Return the store of the run or sweep that contains `path`, or None if the run is not in an object store."""
    path = path.absolute()
    for folder, root in zip((path, *path.parents), path.parents, strict=False):
        if (root / _ORIGIN).exists() and (uri := uri_of(folder)):
            return RunStore(uri=uri, folder=str(folder))
    return None


def ray_storage(run_dir: RunDir) -> str:
    """Return where Ray Tune and Ray Train write their files: outside a run in an object store, to keep its listings short."""
    if (store := run_store(run_dir.root)) is None:
        return str(run_dir.tune)
    root, _, name = store.uri.rpartition("/")
    part = run_dir.root.absolute().relative_to(store.folder)
    return f"{root}/{Path(RAY, name, part)}"


def check_reachable(root: Path) -> None:
    """Raise StorageError if nothing can be written to a root in an object store."""
    if uri := uri_of(root):
        store = ObjectStore(uri, OPENING_S)
        store.put(".probe", b"")
        store.delete(".probe")


def is_taken(path: Path) -> bool:
    """Whether the store already has a run whose scratch folder would be `path`. Raises StorageError."""
    uri = uri_of(path)
    return bool(uri and ObjectStore(uri, OPENING_S).entries())


def fetch_records(path: Path) -> None:
    """Update a run's scratch folder from the store, without checkpoints, unless a process on this machine works on the run.

    Raises:
        StorageError: the store does not answer.
        ExperimentError: its log is damaged.
    """
    if (uri := uri_of(path)) is None or is_locked(path / ".lock"):
        return
    own_folder(path)
    with locked(path / ".copying"):
        if not is_locked(path / ".lock"):
            rebuild(path, ObjectStore(uri, OPENING_S))


def rebuild(folder: Path, store: ObjectStore) -> None:
    """Do the work of `fetch_records`, also for the process that works on the run. Raises what that raises."""
    found = store.entries()
    entries = {name: entry for name, entry in found.items() if is_for_people(name)}
    log, file = read_segments(store), RunDir(folder).events
    before, here = file.read_bytes() if file.exists() else b"", people_files(folder)
    if log == before and (folder / NOT_PUT).exists():
        entries = {name: entry for name, entry in entries.items() if name not in here}
    else:
        (folder / NOT_PUT).unlink(missing_ok=True)
        for name in here:
            if name not in entries:
                (folder / name).unlink(missing_ok=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda name: _get(store, name, folder / name, entries[name]), entries))
    if log is None:
        file.unlink(missing_ok=True)
    elif log != before:
        write_atomic(file, log)
        written_ns = max((entry.changed_ns for name, entry in found.items() if name.startswith(SEGMENTS)), default=time.time_ns())
        os.utime(file, ns=(written_ns, written_ns))  # shown as the time since when the run is not running
    if log is None or not log.startswith(before):  # forget how much of the log MLflow has; the next sync asks MLflow
        state_path(RunDir(folder)).unlink(missing_ok=True)


def _get(store: ObjectStore, name: str, path: Path, entry: Entry) -> None:
    """Download an object, unless the local file is up to date."""
    if path.exists() and (path.stat().st_size, path.stat().st_mtime_ns) == entry:
        return
    if store.get(name, path) and time.time_ns() - entry.changed_ns > _SETTLED_NS:
        os.utime(path, ns=(entry.changed_ns, entry.changed_ns))


def is_for_people(name: str) -> bool:
    """Whether a file of a run, named relative to it, is neither its log, nor a checkpoint, nor a hidden local file."""
    parts = name.split("/")
    return name != "events.jsonl" and not {SEGMENTS, "checkpoints"} & {*parts} and not any(part.startswith(".") for part in parts)


def people_files(folder: Path) -> list[str]:
    """Return the names of the local files for people."""
    found = []
    for parent, _, names in os.walk(folder):  # it skips folders that vanish meanwhile
        found += [str(Path(parent, name).relative_to(folder)) for name in names]
    return [name for name in found if is_for_people(name) and (folder / name).is_file()]


def copies_base() -> str:
    """Return the base of the user's folder, which has in `COPIES` the scratch folders of all roots in object stores."""
    return os.environ.get("RAYDISTILL_COPIES") or tempfile.gettempdir()


def find_checkpoint(text: str) -> Path | None:
    """See `locate_checkpoint`, and `fetch_checkpoint` for a URI."""
    return fetch_checkpoint(text) if is_uri(text) else locate_checkpoint(text)


def fetch_checkpoint(uri: str) -> Path:
    """Download a checkpoint of a run in an object store: that at `uri`, or the best one of the run or stage at `uri`.

    Raises:
        ExperimentError, CheckpointError: there is none.
        StorageError: the store does not answer.
    """
    run = _run_of(uri)
    folder, part = run_folder(run), uri.removeprefix(run).strip("/")
    fetch_records(folder)
    log, names = RunLog(RunDir(folder).events), [part]
    if not part.endswith(".safetensors"):
        names = [str(path.relative_to(folder)) for path in checkpoints_of(folder / part)]
    for name in names:
        stage, file = Path(name).parents[1], Path(name).stem
        written = checkpoint_names(log.of_stage(str(stage), "checkpoint"))
        found = name if f"{file}.safetensors" in written.values() else f"{stage}/checkpoints/{written.get(file)}"
        if file in written or name == found:
            return fetch(RunStore(uri=run, folder=str(folder)), found, OPENING_S)
    raise CheckpointError(f"there is no {' or '.join(f'{run}/{name}' for name in names)}: give a run, a stage or a checkpoint")


def _run_of(uri: str) -> str:
    """Return the URI of the run that contains `uri`.

    Raises:
        ExperimentError: there is none.
        StorageError: the store does not answer.
    """
    run = uri.rstrip("/")
    run_folder(run)  # refuses other URIs
    while run.count("/") > 3:
        if ObjectStore(run, OPENING_S).entries(SEGMENTS):
            return run
        run = run.rpartition("/")[0]
    raise ExperimentError(f"{uri} is not part of a run: copy the checkpoint to a folder that all nodes mount, and give that path")


def checkpoint(stage: StageDir, events: Iterable[Event], kind: str = "best") -> Path | None:
    """Return the path of a stage's newest checkpoint of a kind according to its events, or None. It may not exist locally."""
    name = checkpoint_names(events).get(kind)
    return None if name is None else stage.best.with_name(name)


def local_checkpoint(path: Path) -> Path:
    """Return the local path of a checkpoint, downloading it from an object store. Raises CheckpointError, StorageError."""
    store = run_store(path)
    return path if store is None else fetch(store, str(path.relative_to(store.folder)), OPENING_S)


def is_there(path: Path, store: RunStore | None) -> bool:
    """Whether a checkpoint exists, locally or in the run's object store. Raises StorageError."""
    if store is None:
        return path.exists()
    name = str(path.relative_to(store.folder))
    return name in ObjectStore(store.uri).entries(str(Path(name).parent))


def begin_attempt(config: TrainConfig, log: RunRecorder) -> tuple[TrainConfig, RunRecorder]:
    """Begin an attempt at a stage. Returns the configuration and the recorder for its workers.

    In an object store, they resume from the newest checkpoint that the log names, and all other checkpoints are removed.

    Raises StorageError.
    """
    stage = Path(config.output_dir)
    if config.run_store is None:
        return config, log.begin_attempt(stage)
    store, part = ObjectStore(config.run_store.uri), log.stage(stage)
    found = store.entries(f"{part}/checkpoints")
    recorder = log.begin_attempt(stage)  # earlier workers can no longer add checkpoints to the log
    present = {Path(name).name for name in store.entries(f"{part}/checkpoints")}
    newest = {kind: name for kind, name in checkpoint_names(log.of(part)).items() if name in present}  # `clean` removes some
    for name in found:
        if Path(name).name not in newest.values():
            store.delete(name)
    changes: dict[str, Any] = {"run_store": config.run_store.model_copy(update={"checkpoints": newest})}
    if config.init_checkpoint is not None:
        init = Path(config.init_checkpoint)
        changes["init_checkpoint"] = str(init.with_name(checkpoint_names(log.of(log.stage(init.parents[1])))[init.stem]))
    return config.model_copy(update=changes), recorder


def upload(path: Path) -> None:
    """Upload a file that the driver has written, if its run is in an object store. Raises StorageError."""
    if uri := uri_of(path):
        store, name = object_at(uri)
        store.put(name, path)


def fetch_result(path: Path) -> None:
    """Download a file that a worker has uploaded, if the run is in an object store. Raises StorageError."""
    if uri := uri_of(path):
        store, name = object_at(uri)
        store.get(name, path)


def delete(path: Path) -> None:
    """Remove a file, first from the object store if its run is in one. Raises StorageError."""
    if uri := uri_of(path):
        store, name = object_at(uri)
        store.delete(name)
    path.unlink(missing_ok=True)
