"""`distill clean` on runs in an object store: their objects are young, and old to a cleaner of the day after."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.runs.clean import Cleaner, clean
from service.runs.events import event, first_event, to_line
from service.runs.run_directory import reopen
from service.runs.stored import driver_lease
from service.runs.stored.driver_lease import DriverLease
from service.runs.stored.stored_objects import StoredObjects
from service.runs.stored.stored_runs import RAY, fetch_records, root_folder, run_folder
from tests.s3 import S3, contents
from tests.service.runs.test_clean import root as folders
from trainables.errors import ExperimentError, StorageError
from trainables.object_store.store import ObjectStore

__all__ = ["folders"]
ROOT = "s3://bucket/runs"
DAY_S = 86400.0
BEST, LAST = "best-00000007-1a.safetensors", "last-00000007-1b.safetensors"
Clean = Callable[..., list[str]]


def put_run(name: str, experiment: str = "base: digits", **result: object) -> None:
    """A run that another machine has carried out."""
    store = ObjectStore(f"{ROOT}/{name}")
    values = {"kind": "train", "name": "digits", "status": "complete", "runs_root": ROOT, **result}
    written = event("checkpoint", "student", step=7, epoch=1.0, names=[BEST, LAST])
    log = b"".join(map(to_line, [first_event(), event("result", changes=values), written])).decode()
    for part, content in {
        "experiment.yaml": experiment,
        f"events/0001-{0:012}-{len(log):012}.jsonl": log,
        f"student/checkpoints/{LAST}": "1",
        f"student/checkpoints/{BEST}": "1",
    }.items():
        store.put(part, content.encode())
    ObjectStore(f"{ROOT}/{RAY}/{name}").put("student-1/.marker", b"")


def names() -> set[str]:
    """The first parts of all objects below the root, and those of Ray's by run."""
    return {name.removeprefix(f"{RAY}/").partition("/")[0] for name in contents(ROOT)}


@pytest.fixture
def run_clean(s3: S3, folders: Path, monkeypatch: pytest.MonkeyPatch) -> Clean:
    """Clean as on the day after tomorrow; returns the lines. The folders of this machine are those of the test."""
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.2)
    monkeypatch.setattr(driver_lease, "_POLL_S", 0.05)

    def run(*, dry_run: bool = False, unfinished: bool = False, checkpoints_only: bool = False, days: float = 1) -> list[str]:
        lines: list[str] = []
        cleaner = Cleaner(time.time() + days * DAY_S, dry_run, lines.append)
        clean(root_folder(ROOT), cleaner, unfinished=unfinished, checkpoints_only=checkpoints_only)
        return lines

    return run


def test_an_old_complete_run_is_removed_with_its_copy_here_and_a_dry_run_only_prints_it(run_clean: Clean) -> None:
    put_run("one")
    run_clean(days=-1)
    assert names() == {"one"}
    reopen(run_folder(f"{ROOT}/one"))
    assert run_clean(dry_run=True)[0].endswith(f"  run {ROOT}/one")
    assert names() == {"one"}
    run_clean()
    assert names() == set()
    assert ObjectStore(ROOT).folders() == [RAY]
    assert not run_folder(f"{ROOT}/one").exists()
    with pytest.raises(ExperimentError, match="holds no run"):
        reopen(run_folder(f"{ROOT}/one"))


def test_what_can_be_resumed_is_driven_or_is_referred_to_stays(
    run_clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_run("interrupted", status="interrupted")
    put_run("driven")
    put_run("used")
    put_run("user", f"teacher: {{weights: {ROOT}/used/student}}", status="interrupted")
    lease = DriverLease(f"{ROOT}/driven", tmp_path / "elsewhere", lambda error: None)
    lease._put()
    monkeypatch.setattr(driver_lease, "LEASE_S", 60.0)
    lines = run_clean()
    assert f"{ROOT}/driven kept: in use" in lines
    assert f"{ROOT}/used kept: {ROOT}/user names it" in lines
    assert any(line.startswith(f"{ROOT}/interrupted kept: it is interrupted") for line in lines)
    assert names() == {"interrupted", "driven", "used", "user"}


def test_of_checkpoints_a_complete_run_needs_its_best_alone(run_clean: Clean) -> None:
    put_run("one")
    (line, *_) = run_clean(checkpoints_only=True)
    assert line.endswith(f"checkpoint {ROOT}/one/student/checkpoints/{LAST}")
    assert f"student/checkpoints/{BEST}" in contents(f"{ROOT}/one")
    assert f"student/checkpoints/{LAST}" not in contents(f"{ROOT}/one")


def test_what_a_kill_left_of_an_earlier_cleaning_is_removed(run_clean: Clean) -> None:
    put_run("one")
    ObjectStore(f"{ROOT}/one").delete_all("events")
    assert any("left by a killed command:" in line for line in run_clean())
    assert names() == set()


def test_a_run_with_a_damaged_log_stays_unless_it_is_asked_for_and_holds_up_no_other(run_clean: Clean) -> None:
    put_run("damaged", f"teacher: {{weights: {ROOT}/used/student}}")
    put_run("one")
    put_run("used")
    fetch_records(run_folder(f"{ROOT}/damaged"))  # of which this machine has a whole log
    ObjectStore(f"{ROOT}/damaged").delete_all("events")
    ObjectStore(f"{ROOT}/damaged").put("events/0001-000000000100-000000000200.jsonl", b"1")
    problem = f"{ROOT}/damaged kept: {ROOT}/damaged/events lacks the part after byte 0 of the log of driver 1: restore a copy"
    for checkpoints_only in (True, False):
        lines = run_clean(checkpoints_only=checkpoints_only)
        assert any(line.startswith(problem) and line.endswith("; --unfinished removes it too") for line in lines)
        assert f"{ROOT}/used kept: {ROOT}/damaged names it" in lines
    assert names() == {"damaged", "used"}
    run_clean(unfinished=True)
    assert names() == set()


def test_what_is_no_run_stays_whatever_its_age(run_clean: Clean) -> None:
    for name in ("imagenet/train-0001.arrow", "mlflow/1/artifacts/model", "team/runs-of-others/experiment.yaml"):
        ObjectStore(ROOT).put(name, b"1")
    put_run("one")
    run_clean()
    assert names() == {"imagenet", "mlflow", "team"}


def test_a_cleaning_that_is_killed_leaves_what_the_next_one_finds(run_clean: Clean, monkeypatch: pytest.MonkeyPatch) -> None:
    put_run("one")

    delete_all = ObjectStore.delete_all

    def killed(self: ObjectStore, part: str = "") -> None:
        if part != "events":
            raise KeyboardInterrupt
        delete_all(self, part)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "delete_all", killed)
        with pytest.raises(KeyboardInterrupt):
            run_clean()
    assert not any(name.startswith("events/") for name in contents(f"{ROOT}/one"))
    assert names() == {"one"}
    run_clean()
    assert names() == set()


def test_logits_of_a_run_that_could_not_be_removed_stay(
    run_clean: Clean, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logits = tmp_path / "logits" / ("0" * 16)
    logits.mkdir(parents=True)
    put_run("one", f"teacher: {{cache: {logits.parent}}}")

    def silent(self: StoredObjects, path: Path) -> None:
        raise StorageError("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(StoredObjects, "remove", silent)
        assert any("cannot be removed: the store does not answer" in line for line in run_clean())
    assert logits.exists()
    run_clean()
    assert not logits.exists()
