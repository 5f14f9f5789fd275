"""`distill clean`: removes old runs and caches that nothing needs, and says in a line why each other old run is kept."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from service.config import strict_yaml
from service.runs.run_directory import has_begun
from service.runs.run_log import checkpoint_kind, read_log
from service.runs.stored.stored_objects import StoredObjects, stored_run_folders
from service.runs.stored.stored_runs import display_name, shell_name, uri_of
from service.tracking.run_view import SyncState
from trainables.config.models import FOLDER_SCHEME
from trainables.data.storage.free_space import format_bytes
from trainables.errors import DistillError, ExperimentError
from trainables.locks import is_locked, try_lock
from trainables.object_store.store import is_uri
from trainables.rundir import RunDir
from trainables.teachers.cache import IMAGES

ASIDE = ".removed-"
_KEY = re.compile(r"[0-9a-f]{16,64}")
"""The folder of a key in `teacher.cache`."""


@dataclass
class Cleaner:
    """Removes files and folders, and prints a line for each; in a dry run it only prints."""

    before_s: float
    """Unix seconds: what changed later is kept."""
    dry_run: bool
    echo: Callable[[str], None]
    num_bytes: int = 0

    def is_old(self, path: Path, *, read: bool = False) -> bool:
        """Whether it is there, and nothing in it has changed, or with `read` no file been read, since then."""
        return os.path.lexists(path) and all(
            entry.st_mtime < self.before_s and not (read and stat.S_ISREG(entry.st_mode) and entry.st_atime >= self.before_s)
            for entry in _stats(path)
        )

    def remove(self, path: Path, what: str, objects: StoredObjects | None = None) -> bool:
        """Remove a file or folder, here or in an object store. Whether it is gone, or in a dry run would be."""
        name = display_name(path)
        num_bytes = objects.num_bytes(path) if objects else sum(entry.st_size for entry in _stats(path))
        self.echo(f"{format_bytes(num_bytes):>10}  {what} {name}")
        try:
            if not self.dry_run:
                objects.remove(path) if objects else _remove(path)
        except (OSError, DistillError) as error:
            self.echo(f"{name} cannot be removed: {getattr(error, 'strerror', None) or error}")
            return False
        self.num_bytes += num_bytes
        return True


def _remove(path: Path) -> None:
    """A folder is renamed first: a kill leaves nothing that looks like half of a run."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    aside = path if path.name.startswith(ASIDE) else path.with_name(f"{ASIDE}{path.name}")
    path.rename(aside)
    shutil.rmtree(aside)


@dataclass(frozen=True)
class Run:
    """A directory that has a run, or is the copy of one in an object store."""

    path: Path
    text: str = ""
    """Its experiment's."""
    objects: StoredObjects | None = None
    """Those of a run in an object store."""

    @cached_property
    def tree(self) -> Any:
        """Its experiment; of a damaged one its words."""
        try:
            return strict_yaml.parse(self.text, str(self.path))
        except ExperimentError:
            return re.split(r"[\s'\",{}\[\]]+", self.text)

    @property
    def cache(self) -> Path | None:
        """Its `teacher.cache`, or the one that all its `teachers` have."""
        try:
            cache = (self.tree.get("teacher") or self.tree["teachers"][0])["cache"]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
        return Path(cache) if isinstance(cache, str) and os.path.isabs(cache) else None

    @property
    def is_leftover(self) -> bool:
        """Whether a killed command has left it, of which nothing can be resumed."""
        return not has_begun(self.path) and not (self.objects and self.objects.damage)

    @cached_property
    def paths(self) -> list[str]:
        """What its experiment names; a run's experiment has absolute paths."""
        texts = [text.removeprefix(FOLDER_SCHEME) for text in _texts(self.tree)]
        return [text if is_uri(text) else os.path.realpath(text) for text in texts if is_uri(text) or text[:1] == "/"]

    def names(self, path: Path) -> bool:
        """Whether its experiment names a file or folder, or what lies in it."""
        location = uri_of(path) or os.path.realpath(path)
        return any(f"{each}/".startswith(f"{location}/") for each in self.paths)

    def is_old(self, cleaner: Cleaner) -> bool:
        return self.objects.is_old(cleaner.before_s) if self.objects else cleaner.is_old(self.path)

    def needed_reason(self, unfinished: bool) -> str | None:
        """Why it is kept, however old; None: it is not, unless another run names it."""
        if self.is_leftover:
            return None
        run_dir = RunDir(self.path)
        if self.objects and self.objects.damage:
            return None if unfinished else f"{self.objects.damage}; --unfinished removes it too"
        try:
            result = read_log(run_dir).result
            if is_locked(self.path / ".lock") or (self.objects is not None and self.objects.is_driven()):
                return "in use"
            if result.mlflow is not None and not ((state := SyncState.read(run_dir)) and state.is_sent(run_dir)):
                return f"MLflow has not all of it: distill sync {shell_name(self.path)}"
        except (DistillError, OSError) as error:
            return str(error)
        if result.status != "complete" and not unfinished:
            return f"it is {result.status}, and can be resumed; --unfinished removes it too"
        return None

    def with_lock(self, cleaner: Cleaner, remove: Callable[["Run"], bool]) -> bool:
        """Call `remove` while no process can resume the run, unless one has since it was listed. Whether that is gone."""
        if cleaner.dry_run:
            return remove(self)
        lock = None
        try:
            current = replace(self, objects=StoredObjects(self.path)) if self.objects else self
            # First: taking the lock changes the folder.
            if current.is_old(cleaner) and (lock := try_lock(self.path / ".lock")):
                with current.objects.exclusive(cleaner.echo) if current.objects else nullcontext():
                    return remove(current)
            if self.objects or self.path.exists():
                cleaner.echo(f"{display_name(self.path)} kept: in use")
        except (OSError, DistillError) as error:
            cleaner.echo(f"{display_name(self.path)} kept: {error}")
        finally:
            if lock:
                lock.release()
        return False


def clean(root: Path, cleaner: Cleaner, *, unfinished: bool, checkpoints_only: bool) -> None:
    """Remove the old runs below a root that nothing needs, or with `checkpoints_only` their checkpoints but the best ones; and
    the caches that these runs alone have named."""
    stored = {path: objects for path in stored_run_folders(root) if (objects := StoredObjects(path)).entries}
    folders, runs = [*_subfolders(root), *_subfolders(root / ".cache")], list[Run]()
    for path in stored if uri_of(root) else folders:
        with suppress(FileNotFoundError):  # it has just been removed
            if has_begun(path) or path in stored:
                runs.append(Run(path, RunDir(path).experiment.read_text(errors="replace"), stored.get(path)))
            elif path.name.startswith(ASIDE) or path.parent.name == ".cache":
                runs.append(Run(path))
    removable = _removable(runs, cleaner, unfinished)
    if checkpoints_only:
        for run in removable:
            if not run.is_leftover:
                run.with_lock(cleaner, lambda run: _remove_checkpoints(run, cleaner))
        return
    removed = [run for run in removable if run.with_lock(cleaner, lambda run: _remove_run(run, cleaner))]
    for cache in sorted({run.cache for run in removed if run.cache}):
        if not any(run.names(cache) for run in runs if run not in removed):
            for folder in _subfolders(cache):
                published = (folder / IMAGES).exists()
                if _KEY.fullmatch(folder.name) and not published and cleaner.is_old(folder, read=True):
                    cleaner.remove(folder, "logits")


def _removable(runs: list[Run], cleaner: Cleaner, unfinished: bool) -> list[Run]:
    """The old runs that nothing needs. Says why the other old ones are kept."""
    removable = []
    for run in runs:
        if run.is_old(cleaner):
            if reason := run.needed_reason(unfinished):
                cleaner.echo(f"{display_name(run.path)} kept: {reason}")
            else:
                removable.append(run)
    kept = [run for run in runs if run not in removable]
    while kept:
        user = kept.pop()
        for run in [each for each in removable if user.names(each.path)]:
            cleaner.echo(f"{display_name(run.path)} kept: {display_name(user.path)} names it")
            removable.remove(run)
            kept.append(run)
    return removable


def _remove_run(run: Run, cleaner: Cleaner) -> bool:
    return cleaner.remove(run.path, "left by a killed command:" if run.is_leftover else "run", run.objects)


def _remove_checkpoints(run: Run, cleaner: Cleaner) -> bool:
    """Remove a complete run's checkpoints but the best ones of its stages; of a sweep's trials those of the best trial stay."""
    result = read_log(RunDir(run.path)).result
    gone = True
    for file in run.objects.checkpoints() if run.objects else sorted(run.path.rglob("checkpoints/*.safetensors")):
        inside = file.relative_to(run.path).parts
        best_trial = result.best is None or inside[:2] == ("trials", result.best.id) or inside[0] != "trials"
        if checkpoint_kind(file.name) != "best" or not best_trial:
            gone &= cleaner.remove(file, "checkpoint", run.objects)
    return gone


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Stat a file, or all files and folders in a folder; links are not followed."""
    for folder, folders, files in chain([("", [], [str(path)])], os.walk(path)):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # a process has just removed it
                yield os.lstat(os.path.join(folder, name))
