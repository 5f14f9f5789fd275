"""`distill clean`: removes runs, checkpoints and caches that are old and needed by no other run, and what killed jobs left."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from service.cluster.connect import session_base
from service.config import strict_yaml
from service.runs.run_directory import has_begun
from service.runs.run_log import checkpoint_kind, read_log
from service.runs.stored.stored_objects import StoredObjects, stored_run_folders
from service.runs.stored.stored_runs import COPIES, copies_base, display_name, uri_of
from service.tracking import SyncState
from trainables.data.storage import cleaner as data_cleaner
from trainables.data.storage.free_space import RAM, format_bytes
from trainables.errors import DistillError, ExperimentError
from trainables.locks import is_locked, try_lock
from trainables.rundir import RunDir
from trainables.teachers.cache import IMAGES
from trainables.user_folder import user_folder

ASIDE = ".removed-"
_KEY = re.compile(r"[0-9a-f]{16,64}")
"""The folder of a key in `teacher.cache`."""


@dataclass
class Cleaner:
    """Removes files and folders, and prints a line for each; in a dry run it only prints."""

    before_s: float
    """Unix seconds: what was used later stays."""
    dry_run: bool
    echo: Callable[[str], None]
    num_bytes: int = 0

    def is_old(self, path: Path, *, read: bool = False) -> bool:
        """Whether it is there, and nothing in it has changed, or with `read` no file been read, since then."""
        return os.path.lexists(path) and all(
            entry.st_mtime < self.before_s and not (read and stat.S_ISREG(entry.st_mode) and entry.st_atime >= self.before_s)
            for entry in _stats(path)
        )

    def remove(
        self, path: Path, what: str, by: Callable[[Path], bool] | None = None, name: str = "", num_bytes: int | None = None
    ) -> bool:
        """Remove a file or folder, `by` a function of its own that says whether it has; `name`, `num_bytes`: what is shown.

        Whether it is gone, or in a dry run would be.
        """
        name = name or str(path)
        num_bytes = sum(entry.st_size for entry in _stats(path)) if num_bytes is None else num_bytes
        self.echo(f"{format_bytes(num_bytes):>10}  {what} {name}")
        try:
            if not (self.dry_run or (by or _remove)(path)):
                self.echo(f"{name} kept: in use")
                return False
        except (OSError, DistillError) as error:
            self.echo(f"{name} cannot be removed: {getattr(error, 'strerror', None) or error}")
            return False
        self.num_bytes += num_bytes
        return True


def _remove(path: Path) -> bool:
    """A folder is renamed first: a kill leaves nothing that looks like half of a run."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return True
    aside = path if path.name.startswith(ASIDE) else path.with_name(f"{ASIDE}{path.name}")
    path.rename(aside)
    shutil.rmtree(aside)
    return True


def clean(root: Path, cleaner: Cleaner, *, unfinished: bool, checkpoints_only: bool) -> None:
    """Remove what is old below the runs' root; unless `checkpoints_only`, also this user's caches and folders on this machine."""
    stored = {path: objects for path in stored_run_folders(root) if (objects := StoredObjects(path)).entries}
    found, runs = stored if uri_of(root) else _subfolders(root), list[Run]()
    begun = [path for path in found if has_begun(path) or (path in stored and stored[path].damage)]
    for path in begun:
        with suppress(FileNotFoundError):  # it has just been removed
            runs.append(Run(path, RunDir(path).experiment.read_text(errors="replace"), stored.get(path)))
    removable = _removable(runs, cleaner, unfinished)
    if checkpoints_only:
        for run in removable:
            with_lock(run, cleaner, _remove_checkpoints)
        return
    removed = [run for run in removable if with_lock(run, cleaner, _remove_run)]
    remaining = _without(runs, removed)
    caches = {run.cache for run in removed if run.cache and run.cache.is_absolute()}
    for cache in sorted(cache for cache in caches if not any(run.uses_cache(cache) for run in remaining)):
        for folder in _subfolders(cache, _KEY.fullmatch):
            if cleaner.is_old(folder, read=True) and not (folder / IMAGES).exists():
                cleaner.remove(folder, "logits")
    for run in (Run(path, "", objects) for path, objects in stored.items() if path not in begun):
        if run.is_old(cleaner):
            with_lock(run, cleaner, partial(_remove_run, what="left by a killed command:"))
    for folder in (*_subfolders(root, re.compile(re.escape(ASIDE)).match), *_subfolders(root / ".cache")):
        if cleaner.is_old(folder):
            cleaner.remove(folder, "left by a killed command:")
    clean_machine(cleaner)


def clean_machine(cleaner: Cleaner) -> None:
    """This user's unused copies of data and runs, and sessions of Ray, on this machine."""
    for base in dict.fromkeys((RAM, tempfile.gettempdir())):
        for folder in _own_folders(base):
            if folder.name not in ("ray", COPIES) and not data_cleaner.is_used(str(folder)) and cleaner.is_old(folder):
                cleaner.remove(folder, "copy of data", by=lambda path: data_cleaner.remove_unused(str(path)))
    roots = [root for folder in _own_folders(copies_base()) if folder.name == COPIES for root in _subfolders(folder)]
    for copy in (copy for root in roots for copy in _subfolders(root)):
        if cleaner.is_old(copy, read=True):
            if is_locked(copy / ".lock"):
                cleaner.echo(f"{copy} stays: a process works on it")
            else:
                cleaner.remove(copy, "copy of a run")
    used = " ".join(word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ())
    for sessions in (folder for folder in _own_folders(session_base()) if folder.name == "ray"):
        for folder in _subfolders(sessions, re.compile("session_2").match):
            if folder.name not in used and cleaner.is_old(folder):
                cleaner.remove(folder, "session of Ray")


def _own_folders(base: str) -> list[Path]:
    return _subfolders(user_folder(base)) if os.path.lexists(f"{base}/raydistill-{os.getuid()}") else []


@dataclass(frozen=True)
class Run:
    """A directory that has a run, or is the copy of one in an object store."""

    path: Path
    text: str
    """Of its experiment."""
    objects: StoredObjects | None = None
    """Of a run in an object store."""

    @property
    def name(self) -> str:
        """As the user names it."""
        return display_name(self.path)

    def is_old(self, cleaner: Cleaner) -> bool:
        return self.objects.is_old(cleaner.before_s) if self.objects else cleaner.is_old(self.path)

    def remove(self, path: Path, what: str, cleaner: Cleaner) -> bool:
        """Remove a file of the run, or all of it. Whether it is gone."""
        if self.objects is None:
            return cleaner.remove(path, what)
        return cleaner.remove(path, what, by=self.objects.remove, name=display_name(path), num_bytes=self.objects.num_bytes(path))

    @cached_property
    def cache(self) -> Path | None:
        """Its `teacher.cache`, as it is written: a relative one began in a directory that nobody knows any more."""
        try:
            return Path((self.tree.get("teacher") or self.tree["teachers"][0])["cache"]).expanduser()
        except (AttributeError, IndexError, KeyError, TypeError, RuntimeError):
            return None

    @cached_property
    def tree(self) -> Any:
        """Its experiment; of one that is damaged its words, each of which may be a teacher's weights."""
        try:
            return strict_yaml.parse(self.text, str(self.path))
        except ExperimentError:
            return {"weights": re.split(r"[\s'\",{}\[\]]+", self.text)}

    def uses_cache(self, cache: Path) -> bool:
        own = self.cache
        return own is not None and (own == cache or (not own.is_absolute() and own.name == cache.name))

    def refers_to(self, other: "Run") -> bool:
        """Whether its experiment has the path of the other's directory, or of a file in it, as `teacher.weights` may."""
        return other.path.name in self.text and any(_is_in(text, key, other.path) for key, text in _texts(self.tree))

    def needed_reason(self, unfinished: bool) -> str | None:
        """Why it may not be removed, however old; None: it may, unless another run needs it."""
        run_dir = RunDir(self.path)
        if self.objects and self.objects.damage:
            return None if unfinished else f"{self.objects.damage}; --unfinished removes it too"
        try:
            result = read_log(run_dir).result
            if is_locked(self.path / ".lock") or (self.objects is not None and self.objects.is_driven()):
                return "a process works on it"
            state = SyncState.read(run_dir) if result.mlflow else None
            waits = result.mlflow is not None and (state is None or not state.is_sent(run_dir))
        except (DistillError, OSError) as error:
            return str(error)
        if waits:
            return f"MLflow has not all of it: distill sync {self.name}"
        if result.status != "complete" and not unfinished:
            return f"it is {result.status}, and can be resumed; --unfinished removes it too"
        return None


def _removable(runs: list[Run], cleaner: Cleaner, unfinished: bool) -> list[Run]:
    """The old runs that no other one needs. Says why the others stay."""
    removable = []
    for run in runs:
        if run.is_old(cleaner):
            if reason := run.needed_reason(unfinished):
                cleaner.echo(f"{run.name} stays: {reason}")
            else:
                removable.append(run)
    while True:
        remaining = _without(runs, removable)
        users = {run: user for run in removable for user in remaining if user.refers_to(run)}
        for run, user in users.items():
            cleaner.echo(f"{run.name} stays: {user.name} refers to it")
            removable.remove(run)
        if not users:
            return removable


def _without(runs: list[Run], others: list[Run]) -> list[Run]:
    left_out = {run.path for run in others}
    return [run for run in runs if run.path not in left_out]


def with_lock(run: Run, cleaner: Cleaner, remove: Callable[[Run, Cleaner], bool]) -> bool:
    """Remove of a run while nobody can resume it. Whether that is gone."""
    if cleaner.dry_run:
        return remove(run, cleaner)
    try:  # The runs before it took their time. Before its lock is taken, which may make a file in it.
        current = replace(run, objects=StoredObjects(run.path)) if run.objects else run
        if not current.is_old(cleaner):
            cleaner.echo(f"{run.name} {'kept: in use' if run.objects or run.path.exists() else 'is gone'}")
            return False
    except (OSError, DistillError) as error:
        cleaner.echo(f"{run.name} stays: {error}")
        return False
    lock = try_lock(run.path / ".lock")
    if lock is None:
        cleaner.echo(f"{run.name} stays: a process works on it")
        return False
    try:
        with current.objects.exclusive(cleaner.echo) if current.objects else nullcontext():
            return remove(current, cleaner)
    except DistillError as error:
        cleaner.echo(f"{run.name} stays: {error}")
        return False
    finally:
        lock.release()


def _remove_run(run: Run, cleaner: Cleaner, what: str = "run") -> bool:
    return run.remove(run.path, what, cleaner)


def _remove_checkpoints(run: Run, cleaner: Cleaner) -> bool:
    """Of a complete run all but the best ones of its stages, and of a sweep's trials those of the best trial."""
    result = read_log(RunDir(run.path)).result
    gone = True
    for file in run.objects.checkpoints() if run.objects else sorted(run.path.rglob("checkpoints/*.safetensors")):
        inside = file.relative_to(run.path).parts
        best_trial = result.best is None or inside[:2] == ("trials", result.best.id) or inside[0] != "trials"
        if checkpoint_kind(file.name) != "best" or not best_trial:
            gone &= run.remove(file, "checkpoint", cleaner)
    return gone


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The texts in an experiment, each with the last part of its key."""
    match value:
        case str():
            yield key, value
        case dict() | list():
            for name, part in value.items() if isinstance(value, dict) else ((key, part) for part in value):
                yield from _texts(part, name)


def _is_in(text: str, key: str, folder: Path) -> bool:
    """Whether the text of a key may name `folder` or a file in it, by its name: a relative path began in a directory that is
    not known any more, and a node may mount a root elsewhere. A single word is no path, such as a data set's or a recipe's name,
    unless it is of weights; an absolute path of data is one that is there."""
    path = Path(text)
    if key == "path" and path.is_absolute():
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    return folder.name in path.parts and (key == "weights" or len(path.parts) > 1)


def _subfolders(folder: Path, takes: Callable[[str], object] = bool) -> list[Path]:
    try:
        return [path for path in sorted(folder.iterdir()) if takes(path.name) and path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Of a file, or of all files and folders in a folder; links are not followed."""
    for folder, folders, files in chain([("", [], [str(path)])], os.walk(path)):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # a process has just removed it
                yield os.lstat(os.path.join(folder, name))
