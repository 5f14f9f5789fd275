import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.s3 import S3, contents, owner_of
from trainables.errors import StorageError
from trainables.object_store.run_copy import RunCopy, is_of_workers
from trainables.object_store.stage_copy import fetch_inputs, stored_stage
from trainables.rundir import StageDir, write_atomic, write_json

URI = "s3://bucket/runs/one"


def of_driver(name: str) -> bool:
    return not is_of_workers(name)


def open_stage(copy: RunCopy, *, is_main: bool = True) -> AbstractContextManager[Callable[[Path], None]]:
    return stored_stage(copy, copy.folder / "student", is_main=is_main, barrier=lambda: None)


def write(path: Path, content: bytes, publish: Callable[[Path], None]) -> None:
    write_atomic(path, content)
    publish(path)


def test_a_checkpoint_is_in_the_store_when_its_write_returns(s3: S3, tmp_path: Path) -> None:
    copy = RunCopy(URI, tmp_path / "a")
    stage = StageDir(copy.folder / "student")
    with open_stage(copy) as publish:
        write(stage.last, b"weights", publish)
        found = contents(URI)
        assert found["student/checkpoints/last.safetensors"] == "weights"
        write_json(stage.heartbeats, {})  # the driver's
    assert contents(URI).keys() == found.keys()


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
    (second.folder / "student/checkpoints").mkdir(parents=True)
    (second.folder / "student/checkpoints/best.safetensors").write_bytes(b"of an older try")
    with open_stage(second) as publish:
        assert StageDir(second.folder / "student").last.read_bytes() == b"1"
        assert not StageDir(second.folder / "student").best.exists()
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


def test_a_stage_that_was_discarded_begins_anew_in_a_folder_that_still_has_it(s3: S3, tmp_path: Path) -> None:
    copy, driver = (RunCopy(URI, tmp_path / name) for name in "ab")
    stage = StageDir(copy.folder / "student")
    with open_stage(copy) as publish:
        write(stage.last, b"1", publish)
    driver.discard("student")
    with open_stage(copy):
        assert not stage.last.exists()
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
