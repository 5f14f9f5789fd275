import errno
import fcntl
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainables import locks
from trainables.locks import is_locked, locked, try_lock

ROOT = Path(__file__).parents[2]
_HOLDER = """
import sys, time
from trainables.locks import try_lock
lock = try_lock(sys.argv[1])
print("locked" if lock else "taken", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that takes a lock and has it until it is killed."""

    def __init__(self, path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, "-c", _HOLDER, str(path)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def hold() -> Iterator[Callable[[Path], Holder]]:
    holders: list[Holder] = []

    def start(path: Path) -> Holder:
        holders.append(Holder(path))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()


def _no_flock_below(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """As on a network file system that cannot lock files: no such one can be counted on where tests run."""
    real = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder):
            raise OSError(kind, os.strerror(kind))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_lock_excludes_other_processes_and_ends_when_its_process_is_killed(
    tmp_path: Path, hold: Callable[[Path], Holder]
) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()
    first, second = hold(path), hold(path)
    assert (first.line, second.line) == ("locked", "taken")
    assert is_locked(path)
    assert try_lock(path) is None
    first.kill()
    with locked(path):
        assert is_locked(path)
    assert not is_locked(path)


def test_threads_exclude_each_other_and_wait_in_turn(tmp_path: Path) -> None:
    waited, inside = threading.Event(), list[str]()

    def work() -> None:
        with locked(tmp_path / "lock", waited.set):
            inside.append("thread")

    thread = threading.Thread(target=work)
    with locked(tmp_path / "lock"):
        thread.start()
        assert waited.wait(20)
        inside.append("main")
    thread.join()
    assert inside == ["main", "thread"]


def test_the_lock_of_a_file_that_was_replaced_is_not_had(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    old = try_lock(path)
    path.unlink()
    new = try_lock(path)  # another file
    assert old is not None
    assert new is not None
    old.release()
    assert is_locked(path)
    new.release()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write every file")
def test_whoever_may_only_read_a_file_finds_out_whether_it_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(mode=0o400)
    assert not is_locked(path)


@pytest.mark.parametrize("kind", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_the_file_system_has_no_locks_processes_of_the_node_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: int
) -> None:
    far = tmp_path / "far"
    far.mkdir()
    monkeypatch.setattr(locks, "_NODE_FOLDER", str(tmp_path))
    _no_flock_below(far, monkeypatch, kind)
    path = far / f"lock-{kind}"
    with caplog.at_level(logging.WARNING, "raydistill"), locked(path):
        assert is_locked(path)
        assert not is_locked(far / "other")
        child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(try_lock(path) is None))
        child.start()
        child.join(20)
        assert child.exitcode == 1
    assert not is_locked(path)
    expected = f"{path}: its file system cannot lock files ({os.strerror(kind)}): only processes of this node exclude each other"
    assert caplog.messages == [expected]


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file on a file system without locks; the one that is locked in its place is removed at the end."""
    folder = tmp_path / "far"
    folder.mkdir()
    _no_flock_below(folder, monkeypatch, errno.ENOLCK)
    yield folder / "lock"
    Path(locks._on_this_node(str(folder / "lock"), "No locks available")).unlink()


def test_processes_of_a_node_exclude_each_other_whatever_their_temporary_folder(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(far):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        locks._on_this_node.cache_clear()
        assert is_locked(far)


def test_the_lock_of_a_replaced_file_is_not_had_without_locks_of_the_file_system_either(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, files = fcntl.flock, []

    def after_a_cleaner(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not files:
            files.append(path)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", after_a_cleaner)
    lock = try_lock(far)
    assert lock is not None
    assert is_locked(far)
    lock.release()


def test_several_may_find_out_at_once_whether_a_file_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open(path, "w") as asker:
        fcntl.flock(asker, fcntl.LOCK_SH)
        assert not is_locked(path)


def test_a_released_lock_is_free_also_while_a_forked_child_lives_and_a_childs_end_frees_none(tmp_path: Path) -> None:
    path, context = tmp_path / "lock", multiprocessing.get_context("fork")
    lock = try_lock(path)
    assert lock is not None
    child = context.Process(target=lock.release)
    child.start()
    child.join()
    assert is_locked(path)
    long = context.Process(target=threading.Event().wait)
    long.start()
    try:
        lock.release()
        assert not is_locked(path)
    finally:
        long.kill()
        long.join()


def test_an_error_of_the_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_flock_below(tmp_path, monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / "lock"):
        pass


def test_a_file_whose_folder_is_removed_while_it_is_looked_at_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: True)  # as it was a moment before
    assert not is_locked(tmp_path / "removed" / "lock")
