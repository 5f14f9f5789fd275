"""Writes happen in another thread, in their order, and none after one that failed."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from trainables.disk_writer import DiskWriter


def wait_for(event: threading.Event) -> None:
    event.wait()


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_what_is_put_in_behind_a_write_is_done_behind_it() -> None:
    may_write, done = threading.Event(), list[str]()
    with DiskWriter() as disk:
        disk.put(lambda: wait_for(may_write))
        for name in ("checkpoint", "event"):
            disk.put(partial(done.append, name))
        assert done == []
        may_write.set()
    assert done == ["checkpoint", "event"]


@pytest.mark.parametrize(
    "call", [DiskWriter.check, DiskWriter.wait, lambda disk: disk.put(lambda: None)], ids=["check", "wait", "put"]
)
def test_nothing_is_written_after_a_failure_which_every_later_call_raises(call: Callable[[DiskWriter], object]) -> None:
    may_write, done = threading.Event(), list[str]()
    disk = DiskWriter()
    disk.put(lambda: fail() if may_write.wait() else None)
    event = disk.put(lambda: done.append("of an epoch whose checkpoint was not written"))
    may_write.set()
    with pytest.raises(OSError, match="No space left"):
        event.result()
    with pytest.raises(OSError, match="No space left"):
        call(disk)
    disk.close()
    assert done == []


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
