"""Writes happen in another thread, in their order, and none after one that failed."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainables import disk_writer
from trainables.disk_writer import DiskWriter
from trainables.rundir import append_lines, read_lines


def wait_for(event: threading.Event) -> None:
    event.wait()


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_a_record_that_is_put_in_behind_a_write_is_on_disk_behind_it(tmp_path: Path) -> None:
    path, may_write, at_the_write = tmp_path / "metrics.jsonl", threading.Event(), list[list[dict[str, int]]]()

    def checkpoint() -> None:
        may_write.wait()
        at_the_write.append(read_lines(path))

    with DiskWriter() as disk:
        before = disk.put_line(path, {"step": 1})
        written = disk.put(checkpoint)
        after = disk.put_line(path, {"step": 2})
        before.result()
        assert not written.done()
        may_write.set()
        after.result()
    assert at_the_write == [[{"step": 1}]]
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_lines_that_wait_together_are_fsynced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, may_write, sizes, append = tmp_path / "metrics.jsonl", threading.Event(), list[int](), append_lines

    def count(path: Path, records: list[dict[str, int]]) -> None:
        sizes.append(len(records))
        append(path, records)

    monkeypatch.setattr(disk_writer, "append_lines", count)
    with DiskWriter() as disk:
        disk.put(lambda: wait_for(may_write))
        for step in range(100):
            disk.put_line(path, {"step": step})
        may_write.set()
    assert sizes == [100]
    assert read_lines(path) == [{"step": step} for step in range(100)]


@pytest.mark.parametrize(
    "call",
    [DiskWriter.check, DiskWriter.wait, lambda disk: disk.put(lambda: None), lambda disk: disk.put_line(Path("x"), {})],
    ids=["check", "wait", "put", "put_line"],
)
def test_nothing_is_written_after_a_failure_which_every_later_call_raises(
    tmp_path: Path, call: Callable[[DiskWriter], object]
) -> None:
    path, may_write = tmp_path / "metrics.jsonl", threading.Event()
    disk = DiskWriter()
    disk.put(lambda: fail() if may_write.wait() else None)
    record = disk.put_line(path, {"of": "an epoch whose checkpoint was not written"})
    may_write.set()
    with pytest.raises(OSError, match="No space left"):
        record.result()
    with pytest.raises(OSError, match="No space left"):
        call(disk)
    disk.close()
    assert not path.exists()


def test_leaving_the_context_raises_a_failure_unless_something_else_ends_it() -> None:
    with pytest.raises(OSError, match="No space left"), DiskWriter() as disk:
        disk.put(fail)
    disk = DiskWriter()
    disk.put(fail)
    disk.__exit__(KeyError)


def test_the_thread_begins_with_the_first_write_and_ends_when_it_is_closed() -> None:
    def num_threads() -> int:
        return sum(thread.name.startswith("disk writer") for thread in threading.enumerate())

    before = num_threads()
    with DiskWriter() as disk:
        assert num_threads() == before
        disk.put(lambda: None)
        assert num_threads() == before + 1
        disk.wait()
    assert num_threads() == before
    disk.put(lambda: None).result()  # as of the job after an init stage
    disk.close()
    assert num_threads() == before
