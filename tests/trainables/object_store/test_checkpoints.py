"""Checkpoints in an object store count once the log names them, and one that counts is never replaced."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.s3 import S3, contents
from tests.trainables.jobs import config, equal, train_on_record
from trainables.config import RunStore
from trainables.engine import checkpoint
from trainables.errors import CheckpointError, StorageError
from trainables.object_store import checkpoints as module
from trainables.object_store.checkpoints import StageCheckpoints, fetch_inputs
from trainables.object_store.store import ObjectStore
from trainables.rundir import StageDir, write_atomic

URI = "s3://bucket/runs/one"


def run_store(folder: Path, *names: str) -> RunStore:
    """The run on a node; its log names these checkpoints of a stage."""
    return RunStore(uri=URI, folder=str(folder), checkpoints={name.partition("-")[0]: name for name in names})


def stage_of(folder: Path, *names: str) -> StageCheckpoints:
    stage = StageCheckpoints(run_store(folder, *names), folder / "student")
    stage.begin()
    return stage


def written(folder: Path, content: bytes, name: str = "last") -> Path:
    path = folder / f"student/checkpoints/{name}.safetensors"
    write_atomic(path, content)
    return path


def train_in(folder: Path, log: Path, die_after: int | None = None) -> None:
    """Train the stage `student` on the node of `folder`; a kill behind so many puts, before the log has the last one."""
    named = json.loads(log.read_text()) if log.exists() else {}
    stage, num = stage_of(folder, *named.values()), 0

    def publish(paths: Sequence[Path], step: int, epoch: float) -> None:
        nonlocal num
        names = stage.put(paths, step)
        num += 1
        if num == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        named.update({name.partition("-")[0]: name for name in names})
        log.write_text(json.dumps(named))
        stage.remove_replaced()

    train_on_record(config(folder / "student", teacher=None, train={"checkpoint_every": 2, "log_every": 1}), publish)


def test_a_training_that_is_killed_goes_on_on_another_node_to_the_bits_of_a_whole_one(s3: S3, tmp_path: Path) -> None:
    first, second, whole, log = (tmp_path / name for name in ("first", "second", "whole", "log.json"))
    code = f"from pathlib import Path; from {__name__} import train_in; train_in(Path({str(first)!r}), Path({str(log)!r}), 3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert json.loads(log.read_text())["last"].startswith("last-00000004-")
    assert len(contents(URI)) == 2  # that one, and one that the log does not name
    shutil.rmtree(first)
    train_in(second, log)
    train_on_record(config(whole / "student", teacher=None, train={"checkpoint_every": 2, "log_every": 1}))
    assert equal(*(checkpoint.read(StageDir(folder / "student").last)[0] for folder in (second, whole)))


def test_a_checkpoint_that_counts_is_removed_once_another_one_does(s3: S3, tmp_path: Path) -> None:
    stage = stage_of(tmp_path / "a")
    (first,) = stage.put([written(tmp_path / "a", b"1")], 5)
    best, second = stage.put([written(tmp_path / "a", b"2", "best"), written(tmp_path / "a", b"2")], 10)
    assert contents(URI) == {f"student/checkpoints/{first}": "1"} | {f"student/checkpoints/{x}": "2" for x in (best, second)}
    stage.remove_replaced()
    assert contents(URI).keys() == {f"student/checkpoints/{name}" for name in (best, second)}
    again = stage_of(tmp_path / "b", best, second)
    again.put([written(tmp_path / "b", b"3")], 15)
    again.remove_replaced()
    assert f"student/checkpoints/{best}" in contents(URI)
    assert f"student/checkpoints/{second}" not in contents(URI)


def test_what_the_log_does_not_name_does_not_count_on_any_node(s3: S3, tmp_path: Path) -> None:
    stage = stage_of(tmp_path / "a")
    (name,) = stage.put([written(tmp_path / "a", b"1")], 5)
    stage.put([written(tmp_path / "a", b"2")], 10)
    for folder in (tmp_path / "a", tmp_path / "b"):
        stage_of(folder, name)
        assert StageDir(folder / "student").last.read_bytes() == b"1"
    stage_of(tmp_path / "a")
    assert not StageDir(tmp_path / "a/student").last.exists()


def test_a_node_that_has_a_checkpoint_does_not_fetch_it_again(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = stage_of(tmp_path / "a").put([written(tmp_path / "a", b"1")], 5)
    monkeypatch.setattr(module.ObjectStore, "get", lambda *_: pytest.fail("it was fetched"))
    stage_of(tmp_path / "a", name)
    assert StageDir(tmp_path / "a/student").last.read_bytes() == b"1"


def test_a_checkpoint_that_the_store_does_not_take_is_an_error_and_one_that_is_gone_too(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(tmp_path / "a")
    s3.refuse(403, 10**6)
    with pytest.raises(StorageError, match=r"last-00000005-\w+.safetensors cannot be written"):
        stage.put([written(tmp_path / "a", b"1")], 5)
    s3.refuse(403, 0)
    with pytest.raises(CheckpointError, match=f"{URI}/student/checkpoints/last-1-a.safetensors does not exist: it was removed"):
        stage_of(tmp_path / "b", "last-1-a.safetensors")


def test_methods_and_a_trained_teacher_come_to_a_node_that_has_them_not(s3: S3, tmp_path: Path) -> None:
    node, store = tmp_path / "node", ObjectStore(URI)
    best = "teacher/checkpoints/best-00000007-1a.safetensors"
    for name in ("methods/own-123.py", best):
        store.put(name, b"1")
    fetch_inputs({"run_store": run_store(node).model_dump(), "teacher": {"weights": str(node / best)}})
    assert (node / "methods/own-123.py").read_bytes() == (node / best).read_bytes() == b"1"
    fetch_inputs({"run_store": None})
