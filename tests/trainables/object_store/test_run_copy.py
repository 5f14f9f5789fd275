import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from service.runs.stored.stored_runs import is_of_driver_too
from service.runs.trial import cause_of
from tests.s3 import S3, contents, owner_of
from trainables.distributed.group import Group
from trainables.errors import DataError, StageInterruptedError, StorageError, TeacherServiceLostError
from trainables.failures import Failure, WorkersFailedError, read_failure, read_failures
from trainables.object_store import stage_copy
from trainables.object_store.run_copy import OF_STAGE, RunCopy, is_of_workers, put_order
from trainables.object_store.stage_copy import fetch_inputs, stored_stage
from trainables.rundir import StageDir, append_line, write_atomic, write_json
from trainables.worker.ray_failures import failure_recorded

URI = "s3://bucket/runs/one"


def of_driver(name: str) -> bool:
    return not is_of_workers(name)


def open_stage(copy: RunCopy, *, is_main: bool = True) -> AbstractContextManager[Callable[[Path], None]]:
    return stored_stage(copy, copy.folder / "student", is_main=is_main, barrier=lambda: None)


def write(path: Path, content: bytes, publish: Callable[[Path], None]) -> None:
    write_atomic(path, content)
    publish(path)


def test_a_checkpoint_is_in_the_store_when_its_write_returns_with_the_records_before_it(s3: S3, tmp_path: Path) -> None:
    copy = RunCopy(URI, tmp_path / "a")
    stage = StageDir(copy.folder / "student")
    with open_stage(copy) as publish:
        append_line(stage.metrics, {"step": 1})
        write(stage.last, b"weights", publish)
        found = contents(URI)
        assert found["student/metrics.jsonl"] == '{"step": 1}\n'
        assert found["student/checkpoints/last.safetensors"] == "weights"
        write_json(stage.heartbeats, {})  # the driver's
    assert contents(URI).keys() == found.keys()


def test_records_are_in_the_store_when_they_were_published(s3: S3, tmp_path: Path) -> None:
    copy = RunCopy(URI, tmp_path / "a")
    stage = StageDir(copy.folder / "student")
    with open_stage(copy) as publish:
        for step in (1, 2):
            append_line(stage.metrics, {"step": step})
            publish(stage.metrics)
            assert contents(URI)["student/metrics.jsonl"] == stage.metrics.read_text()


def test_a_checkpoint_that_the_store_does_not_take_is_an_error(s3: S3, tmp_path: Path) -> None:
    copy = RunCopy(URI, tmp_path / "a", retry_s=0.1)
    with open_stage(copy) as publish:
        s3.refuse(403, 10**6)
        with pytest.raises(StorageError, match=r"last.safetensors cannot be written"):
            write(StageDir(copy.folder / "student").last, b"weights", publish)


def test_a_stage_goes_on_in_another_folder_with_what_the_store_has(s3: S3, tmp_path: Path) -> None:
    first, second = (RunCopy(URI, tmp_path / name) for name in "ab")
    with open_stage(first) as publish:
        write(StageDir(first.folder / "student").last, b"1", publish)
        write(StageDir(first.folder / "student").error_of(0), b"{}", publish)
    (second.folder / "student/checkpoints").mkdir(parents=True)
    (second.folder / "student/checkpoints/best.safetensors").write_bytes(b"of an older try")
    with open_stage(second) as publish:
        assert StageDir(second.folder / "student").last.read_bytes() == b"1"
        assert not StageDir(second.folder / "student").best.exists()
        assert not StageDir(second.folder / "student").errors.exists()
        write(StageDir(second.folder / "student").last, b"2", publish)
    assert owner_of(URI, "student") == second.folder_id() != first.folder_id()
    with open_stage(first):
        assert StageDir(first.folder / "student").last.read_bytes() == b"2"


def test_where_a_kill_came_before_a_put_the_folder_counts_and_other_ranks_get_its_state(s3: S3, tmp_path: Path) -> None:
    main, other = (RunCopy(URI, tmp_path / name) for name in "ab")
    stage = StageDir(main.folder / "student")
    with open_stage(main) as publish:
        write(stage.last, b"1", publish)
    write_atomic(stage.last, b"2")
    with open_stage(main), open_stage(other, is_main=False):
        assert StageDir(other.folder / "student").last.read_bytes() == b"2"


def test_why_an_earlier_attempt_failed_is_not_put_again(s3: S3, tmp_path: Path) -> None:
    main, other, driver = (RunCopy(URI, tmp_path / name) for name in "abc")
    errors = [StageDir(copy.folder / "student").error_of(rank) for rank, copy in enumerate((main, other))]
    with open_stage(main) as publish, open_stage(other, is_main=False) as publish_other:
        write(errors[0], b"{}", publish)
        write(errors[1], b"{}", publish_other)
    driver.discard("student/errors")
    with open_stage(main), open_stage(other, is_main=False):
        assert not any(error.exists() for error in errors)
    assert not any("errors" in name for name in contents(URI))


def test_of_ranks_that_fail_on_several_nodes_the_driver_gets_all_reasons_and_takes_the_first_cause(
    s3: S3, tmp_path: Path
) -> None:
    main, other, driver = (RunCopy(URI, tmp_path / name) for name in "abc")
    with open_stage(main) as publish, open_stage(other, is_main=False) as publish_other:
        failing = ((1, other, publish_other, DataError("no images")), (0, main, publish, TeacherServiceLostError("gone")))
        for rank, copy, publish_of_rank, error in failing:
            stage = StageDir(copy.folder / "student")
            with contextlib.suppress(type(error)), failure_recorded(stage, Group(rank=rank, world_size=2), publish_of_rank):
                raise error
    driver.fetch("student", is_of_driver_too)
    stage = StageDir(driver.folder / "student")
    assert [failure.kind for failure in read_failures(stage.errors)] == ["user", "lost_peer"]
    lost = WorkersFailedError([Failure("lost_peer", "closed", rank=0), Failure("lost_peer", "closed", rank=1)])
    assert cause_of(stage, lost).message == "no images"


def test_what_a_cleaner_of_temporary_files_removed_here_stays_in_the_store_and_comes_back(s3: S3, tmp_path: Path) -> None:
    copy = RunCopy(URI, tmp_path / "a")
    for name in ("experiment.yaml", "result.json"):
        write_atomic(copy.folder / name, b"1")
    copy.own("", of_driver)
    (copy.folder / "experiment.yaml").unlink()
    copy.fetch("", of_driver)
    assert (copy.folder / "experiment.yaml").exists()
    with open_stage(copy) as publish:
        write(StageDir(copy.folder / "student").last, b"1", publish)
    for path in (copy.folder / "result.json", StageDir(copy.folder / "student").last):
        path.unlink()
    copy.own("", of_driver)
    with open_stage(copy):
        assert StageDir(copy.folder / "student").last.read_bytes() == b"1"
    assert (copy.folder / "result.json").exists()
    assert {"experiment.yaml", "result.json", "student/checkpoints/last.safetensors"} <= contents(URI).keys()


def test_a_store_that_is_gone_hides_no_exception(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_copy, "_ENDING_S", 0.1)
    copy = RunCopy(URI, tmp_path / "a")
    stage = StageDir(copy.folder / "student")

    def work() -> None:
        with open_stage(copy) as publish, failure_recorded(stage, Group(), publish):
            append_line(stage.metrics, {"step": 1})
            s3.refuse(503, 10**6)
            raise StageInterruptedError("preempted")

    with pytest.raises(StageInterruptedError):
        work()
    failure = read_failure(stage.error_of(0))
    assert failure is not None
    assert failure.kind == "preempted"


def test_another_rank_puts_why_it_failed_and_none_of_its_old_records(s3: S3, tmp_path: Path) -> None:
    main, other = (RunCopy(URI, tmp_path / name) for name in "ab")
    (other.folder / "student").mkdir(parents=True)
    (other.folder / "student/metrics.jsonl").write_text("old")
    with open_stage(main), open_stage(other, is_main=False) as publish:
        append_line(StageDir(main.folder / "student").metrics, {"step": 1})
        write(StageDir(other.folder / "student").error_of(1), b'{"rank": 1}', publish)
    assert contents(URI)["student/metrics.jsonl"] == '{"step": 1}\n'
    assert "student/errors/1.json" in contents(URI)


def test_a_stage_that_was_discarded_begins_anew_in_a_folder_that_still_has_it(s3: S3, tmp_path: Path) -> None:
    copy, driver = (RunCopy(URI, tmp_path / name) for name in "ab")
    stage = StageDir(copy.folder / "student")
    with open_stage(copy) as publish:
        write(stage.last, b"1", publish)
        append_line(stage.metrics, {"step": 1})
    driver.discard("student")
    with open_stage(copy):
        assert not stage.last.exists()
        assert not stage.metrics.exists()
    assert contents(URI).keys() == {"student/owner.json"}


def test_the_drivers_files_are_made_equal_to_those_of_the_last_driver(s3: S3, tmp_path: Path) -> None:
    first, second = (RunCopy(URI, tmp_path / name) for name in "ab")
    write_json(first.folder / "result.json", {"status": "running"})
    (first.folder / "spool").mkdir()
    (first.folder / "spool/sent.json").write_text("{}")
    (first.folder / ".lock").touch()
    first.own("", of_driver)
    assert contents(URI).keys() == {"owner.json", "result.json"}
    write_json(second.folder / "trials/000/result.json", {})
    second.own("", of_driver)
    assert [path.name for path in second.folder.rglob("*.json")] == ["result.json"]


def test_a_stages_files_are_put_in_their_order_and_the_one_that_completes_them_last() -> None:
    names = [f"student/{name}" for name in sorted(OF_STAGE)]
    order = ["metrics.jsonl", "logs/train.log", "checkpoints/last.safetensors", "checkpoints/best.safetensors"]
    assert [name.removeprefix("student/") for name in sorted(names, key=put_order)] == [*order, "stage.json"]


def test_methods_and_a_trained_teacher_come_to_a_node_that_has_them_not(s3: S3, tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    copy = RunCopy(URI, driver)
    copy.store.put("methods/own-123.py", b"text")
    with stored_stage(copy, driver / "teacher", is_main=True, barrier=lambda: None) as publish:
        write(StageDir(driver / "teacher").best, b"1", publish)
    settings = {
        "run_store": {"uri": URI, "folder": str(node)},
        "teacher": {"weights": str(StageDir(node / "teacher").best)},
    }
    write_atomic(StageDir(node / "teacher").best, b"of an older epoch")
    fetch_inputs(settings)
    assert (node / "methods/own-123.py").read_bytes() == b"text"
    assert StageDir(node / "teacher").best.read_bytes() == b"1"
    fetch_inputs({"run_store": None})


def test_processes_of_a_node_fetch_one_after_the_other(s3: S3, tmp_path: Path) -> None:
    copies = [RunCopy(URI, tmp_path / "a") for _ in range(4)]
    copies[0].store.put("methods/x.py", b"1")
    threads = [threading.Thread(target=copy.fetch_missing, args=("methods",)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a/methods/x.py").read_bytes() == b"1"
