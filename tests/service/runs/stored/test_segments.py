"""The log of a run in an object store: what counts is there before it counts, from one driver at a time."""

import asyncio
import time
from pathlib import Path

import pytest

from service.runs.driver_log import DriverLog
from service.runs.event_log import EventLog
from service.runs.events import Event, event
from service.runs.recorder import Recorder
from service.runs.stored import segments
from service.runs.stored.driver_lease import LeaseLostError
from service.runs.stored.segments import LogStore, SegmentWriter, read_segments
from tests.s3 import S3, contents
from trainables.errors import ExperimentError, StorageError
from trainables.object_store.store import ObjectStore

URI = "s3://bucket/runs/one"


def step(number: int) -> Event:
    return event("step", "student", step=number, epoch=0.0, metrics={"train/loss": 1.0})


def checkpoint(number: int) -> Event:
    return event("checkpoint", "student", step=number, epoch=0.0, names=[f"last-{number}"])


def drive(number: int) -> LogStore:
    """The place of a driver that has the run."""
    store = ObjectStore(URI)
    store.delete_all(".drivers")
    store.put(f".drivers/{number}", b'{"drives": true}')
    return LogStore(URI, number, f".drivers/{number}")


def names() -> list[str]:
    return sorted(name.removeprefix("events/") for name in contents(URI) if name.startswith("events/"))


def log_there() -> bytes | None:
    return read_segments(ObjectStore(URI))


def test_the_segments_together_are_the_log_whoever_puts_them(s3: S3, tmp_path: Path) -> None:
    place, path = drive(1), tmp_path / "events.jsonl"
    for number in range(3):
        log = EventLog(path)
        writer = SegmentWriter(place, log)  # as of another process of the driver's
        log.append([step(number)])
        writer.put()
        log.append([step(10 * number + 10)])
        writer.put()
        writer.put()
        log.close()
    assert log_there() == path.read_bytes()
    assert len(names()) == 6


def test_many_segments_become_one(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 3)
    log = EventLog(tmp_path / "events.jsonl")
    writer = SegmentWriter(drive(1), log)
    for number in range(8):
        log.append([step(number)])
        writer.put()
        assert log_there() == log.path.read_bytes()
        assert len(names()) <= 4


def test_a_driver_goes_on_with_the_log_and_nobody_reads_what_the_one_before_it_puts_late(s3: S3, tmp_path: Path) -> None:
    first = EventLog(tmp_path / "a")
    late = SegmentWriter(drive(1), first)
    first.append([step(1)])
    late.put()
    found = log_there()
    assert found is not None
    (tmp_path / "b").write_bytes(found)
    second = EventLog(tmp_path / "b")
    writer = SegmentWriter(drive(2), second)
    for log in (first, second):
        log.append([checkpoint(2)])
    with pytest.raises(LeaseLostError, match=f"another driver has taken over {URI}"):
        late.put()
    writer.put()
    assert log_there() == second.path.read_bytes()
    first.append([step(3)])
    with pytest.raises(LeaseLostError):
        late.put()
    assert log_there() == second.path.read_bytes()


def test_a_driver_that_was_taken_over_before_it_put_anything_puts_nothing(s3: S3, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    writer = SegmentWriter(drive(1), log)
    drive(2)  # whose number may be the same, since none has put a segment
    with pytest.raises(LeaseLostError):
        writer.put()
    assert names() == []


def test_a_log_that_lacks_a_part_is_damaged(s3: S3, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    writer = SegmentWriter(drive(1), log)
    for number in range(3):
        log.append([step(number)])
        writer.put()
    ObjectStore(URI).delete(f"events/{names()[1]}")
    with pytest.raises(ExperimentError, match=f"{URI}/events lacks the part after byte .* of the log of driver 1: restore"):
        log_there()
    assert read_segments(ObjectStore("s3://bucket/none")) is None


def test_a_checkpoint_counts_once_all_before_it_is_in_the_store_and_steps_wait_for_nothing(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.runs.recorder.PUT_LOG_EVERY_S", 0.3)

    async def use(recorder: Recorder) -> None:
        await recorder.append([step(1)])
        assert log_there() is None
        await recorder.append([checkpoint(1)])
        assert log_there() == path.read_bytes()
        await recorder.append([step(2)])
        assert log_there() != path.read_bytes()
        until = time.monotonic() + 10
        while log_there() != path.read_bytes() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert log_there() == path.read_bytes()

    path = tmp_path / "events.jsonl"
    asyncio.run(use(Recorder(str(path), drive(1))))


def test_late_events_are_put_whatever_failed_before_and_not_again_once_another_driver_has_the_run(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.runs.recorder.PUT_LOG_EVERY_S", 0.05)
    put = SegmentWriter.put

    def failing(self: SegmentWriter) -> None:
        monkeypatch.setattr(SegmentWriter, "put", put)
        raise OSError("the disk does not answer")

    monkeypatch.setattr(SegmentWriter, "put", failing)

    async def use(recorder: Recorder) -> None:
        await recorder.append([step(1)])
        until = time.monotonic() + 10
        while log_there() != path.read_bytes() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert log_there() == path.read_bytes()
        drive(2)
        for number in range(2, 6):
            await recorder.append([step(number)])
            await asyncio.sleep(0.3)

    path = tmp_path / "events.jsonl"
    asyncio.run(use(Recorder(str(path), drive(1))))
    assert [line for line in caplog.messages if "still trying" in line] == ["the disk does not answer; still trying"]
    assert len([line for line in caplog.messages if "another driver has taken over" in line]) == 1


def test_a_checkpoint_is_refused_where_the_store_is_gone_and_counts_once_it_is_back(s3: S3, tmp_path: Path) -> None:
    async def use(recorder: Recorder) -> None:
        assert recorder._segments is not None
        recorder._segments.store.retry_s = 0.1
        s3.refuse(503, 10**6)
        with pytest.raises(StorageError, match=f"{URI}/events.* cannot be"):
            await recorder.append([step(1), checkpoint(1)])
        await recorder.append([step(2)])
        s3.refuse(503, 0)
        await recorder.append([checkpoint(2)])
        assert log_there() == path.read_bytes()

    path, place = tmp_path / "events.jsonl", drive(1)
    asyncio.run(use(Recorder(str(path), place)))


def test_a_checkpoint_is_refused_once_another_driver_has_the_run(s3: S3, tmp_path: Path) -> None:
    async def use(recorder: Recorder) -> None:
        await recorder.append([checkpoint(1)])
        drive(2)
        with pytest.raises(LeaseLostError):
            await recorder.append([checkpoint(2)])

    asyncio.run(use(Recorder(str(tmp_path / "events.jsonl"), drive(1))))


def test_the_drivers_own_log_is_put_where_something_must_outlive_its_node(s3: S3, tmp_path: Path) -> None:
    log = DriverLog(tmp_path / "events.jsonl", drive(1))
    log.record("session_begun", tags={})
    assert log_there() == log.path.read_bytes()
    log.record("result", changes={})
    assert log_there() != log.path.read_bytes()
    log.record("session_ended", status="complete", reason="")
    assert log_there() == log.path.read_bytes()
    log.close()
