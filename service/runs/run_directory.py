"""Chooses, creates, locks and reopens run directories. One driver at a time holds a run's lock."""

import itertools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from service.config.batch_size import AUTO, TIMED
from service.config.dotted import flatten
from service.config.experiment import Resolved, read_resolved
from service.config.paths import absolute_paths
from service.config.space import GLOBAL_BATCH
from service.runs.events import event, first_event, to_line
from service.runs.finetuning import OTHER_CLASSES
from service.runs.method_copies import copy_methods, use_copies_of
from service.runs.result import Kind, RunResult
from service.runs.run_log import RunLog, as_json, read_log
from service.runs.stored.driver_lease import is_fresh
from service.runs.stored.stored_runs import (
    check_reachable,
    display_name,
    fetch_records,
    is_taken,
    root_folder,
    shell_name,
    uri_of,
)
from trainables.errors import ExperimentError
from trainables.locks import is_locked, locked_or_raise
from trainables.object_store.store import is_uri
from trainables.rundir import RunDir, StageDir, create_private, unwritable_reason, write_atomic, write_text
from trainables.user_code import file_of, option_key

DECIDED: dict[str, tuple[str, Any]] = {"teacher.finetune": (OTHER_CLASSES, None), GLOBAL_BATCH: (TIMED, AUTO)}
"""Keys that a run decides once: the source that they have then, and the value from which it decides."""
RUN_NAME = "RAYDISTILL_RUN_NAME"
"""Environment variable of a submitted job with the name of the run that it begins."""


def has_begun(path: Path) -> bool:
    """Whether a directory has a run that can be resumed."""
    return RunDir(path).experiment.is_file() and RunDir(path).events.is_file()


def check_same(kind: Kind, resolved: Resolved, path: Path) -> None:
    """Raise ExperimentError, with the first key that differs, if the run at `path` has another experiment."""
    begun, _, result = reopen(path)
    trees = [each.experiment.model_dump(mode="json") for each in (resolved, begun)]
    # The folder of a method's file may differ, as between Ray jobs: the run uses its copy.
    wanted, begun_with = (flatten(tree) | absolute_paths(tree, method=_by_file_name) for tree in trees)
    for key, (source, written_value) in DECIDED.items():
        if begun.sources.get(key) == source and wanted.get(key) == written_value:
            begun_with[key] = written_value
    differing = [key for key in sorted({*wanted, *begun_with}) if wanted.get(key) != begun_with.get(key)]
    if result.kind != kind or differing:
        value = begun_with.get(differing[0]) if differing else None
        written = "" if isinstance(value, list | dict) else f" ({value})"  # the points of a sweep are many
        other = f"a {result.kind}" if result.kind != kind else f"another {differing[0]}{written}"
        raise ExperimentError(f"{display_name(path)} has a run with {other}: {_instead(path)}")


def decided_keys(file: Path) -> dict[str, str]:
    """Return the keys that a run has decided, with their sources, if `file` is a run's `experiment.yaml`."""
    run_dir = RunDir(file.parent)
    if file.name != run_dir.experiment.name or not has_begun(run_dir.root):
        return {}
    sources = read_log(run_dir).result.sources
    return {key: source for key, (source, _) in DECIDED.items() if sources.get(key) == source}


def _by_file_name(method: str) -> str:
    """Return the name of a method or model without the folder of its file."""
    path = file_of(method)
    return method if path is None else f"{path.name}:{option_key(method)}"


def _instead(path: Path) -> str:
    return f"continue it with `distill resume {shell_name(path)}`, or choose another --out"


def check_writable(root: Path, out: Path | None, *, begun_ok: bool = False) -> None:
    """Refuse an `out` that has a run already, and folders that cannot be written, before anything is created.

    With `begun_ok`, a run that died before it could be resumed may start again. Raises ExperimentError.
    """
    if out is not None and not begun_ok:
        check_free(out)
    for option, path in (("--runs", root), ("--out", out)):
        if path is None:
            continue
        if reason := unwritable_reason(path):
            copy_of = f"{uri}: its copy {path}" if (uri := uri_of(path)) else path
            remedy = "set RAYDISTILL_COPIES" if uri else f"choose another {option}"
            raise ExperimentError(f"{option} {copy_of} cannot be written: {reason}; {remedy}")
        check_reachable(path)


def check_free(out: Path) -> None:
    """Raise ExperimentError if `out` holds a run."""
    if has_begun(out):
        raise ExperimentError(f"{display_name(out)} already holds a run: {_instead(out)}")
    if RunDir(out).experiment.exists() or RunDir(out).events.exists():
        remedy = "add --continue to start it again, or choose another --out"
        raise ExperimentError(f"{display_name(out)} holds a run that died while starting: {remedy}")


def new_run_dir(root: Path, name: str, out: Path | None) -> RunDir:
    """Create `out`, or a new folder ROOT/<name>-<time>/, which in a submitted job has the job's name.

    A missing root is created with access for its user only. Raises ExperimentError: it cannot be created.
    """
    stem = os.environ.pop(RUN_NAME, None) or f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for serial in itertools.count(1):
        path = (out or root / (stem if serial == 1 else f"{stem}_{serial}")).absolute()
        try:
            create_private(path.parent)
            path.mkdir(exist_ok=out is not None)
        except FileExistsError:
            if out is not None:
                raise ExperimentError(f"--out {out} cannot be written: it is not a folder; choose another --out") from None
        except OSError as error:
            raise ExperimentError(f"{path} cannot be written: {error.strerror}; choose another --out or --runs") from error
        else:
            if out is not None or not is_taken(path):  # by another machine
                break
    return RunDir(path)


def runs_root_of(result: RunResult) -> Path:
    """Return the root of a run. For a root in an object store, this is the local folder with its copies."""
    return root_folder(result.runs_root) if is_uri(result.runs_root) else Path(result.runs_root)


def begin_run(resolved: Resolved, kind: Kind, run_dir: RunDir, root: Path, notices: Sequence[str] = ()) -> None:
    """Write the resolved experiment and a first result, after which `distill resume` can continue the run.

    `notices` are those of the checks of its inputs.

    Raises ExperimentError: the folder cannot be written, or another process has just begun a run there.
    """
    result = RunResult(
        kind=kind,
        name=resolved.experiment.name,
        status="running",
        started=datetime.now().isoformat(timespec="seconds"),
        runs_root=display_name(root.absolute()),
        sources=resolved.sources,
    )
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        with locked_run(run_dir):
            if has_begun(run_dir.root):
                check_free(run_dir.root)
            copy_methods(resolved.experiment, run_dir)
            write_text(run_dir.experiment, resolved.to_yaml())
            first = [first_event(), event("result", changes=as_json(result))]
            write_atomic(run_dir.events, b"".join(map(to_line, [*first, *(event("notice", text=line) for line in notices)])))
    except OSError as error:
        raise ExperimentError(
            f"{run_dir.root} cannot be written: {error.strerror}; free space or choose another --out"
        ) from error


def reopen(path: Path, *, to_continue: bool = False) -> tuple[Resolved, RunDir, RunResult]:
    """Open an existing run directory and read its result. See `reopen_log`."""
    resolved, run_dir, log = reopen_log(path, to_continue=to_continue)
    result = log.result
    return replace(resolved, sources=result.sources), run_dir, result


def reopen_log(path: Path, *, to_continue: bool = False) -> tuple[Resolved, RunDir, RunLog]:
    """Open an existing run directory and read its log.

    Keys of its experiment that this version does not know are ignored, unless the run is `to_continue`.

    Raises ExperimentError: there is no run, it is damaged, or this version cannot continue it.
    """
    fetch_records(path)
    run_dir = RunDir(path.absolute())
    if not has_begun(run_dir.root):
        raise ExperimentError(
            f"{display_name(path)} holds no run: give a directory that `distill train` or `distill sweep` has written"
        )
    if to_continue:
        use_copies_of(run_dir)
    return read_resolved(run_dir.experiment, reading=not to_continue), run_dir, read_log(run_dir)


def locked_run(run_dir: RunDir) -> AbstractContextManager[None]:
    """Lock a run directory against a second driver, which would write to the same files.

    Raises ExperimentError: another process is working on this run.
    """
    refusal = f"{display_name(run_dir.root)} is already running in another process: wait for it, or end it first"
    return locked_or_raise(run_dir.root / ".lock", ExperimentError(refusal))


def as_it_stands(run_dir: RunDir, result: RunResult) -> RunResult:
    """Return the result, marked as interrupted if the run's driver was killed."""
    if result.status != "running" or not abandoned(run_dir):
        return result
    result = read_log(run_dir).result  # it may have ended since
    if result.status != "running":
        return result
    written = [run_dir.events, *(stage.heartbeats for stage in stages_with("heartbeats.json", run_dir, result))]
    since = datetime.fromtimestamp(max(path.stat().st_mtime for path in written if path.exists()))
    reason = f"not running since {since:%Y-%m-%d %H:%M:%S}: its process is gone"
    return result.model_copy(update={"status": "interrupted", "reason": reason})


def stages_with(name: str, run_dir: RunDir, result: RunResult) -> list[StageDir]:
    """Return the stages of a run, and of all measurements of its trials, that have a file of this name.

    Only known folders are searched, since Ray's folders have many files that come and go.
    """
    stages = [StageDir(folder) for folder in sorted(run_dir.root.glob("*"))]
    trials = [(run_dir.trial(row.id), len(row.each_measurement)) for row in result.rows]
    measured = [trial.measurement(number) for trial, count in trials for number in range(count + 1)]
    stages += [each for stage in measured for each in (stage.init, stage)]
    return [stage for stage in stages if (stage.root / name).exists()]


def abandoned(run_dir: RunDir) -> bool:
    """Whether a run has begun and no process works on it, that is, its lock is free. Does not take the lock."""
    lock = run_dir.root / ".lock"
    try:
        if uri := uri_of(run_dir.root):
            return not is_locked(lock) and not is_fresh(uri)
        return lock.exists() and not is_locked(lock)
    except OSError:  # another user's run, which cannot be read
        return False
