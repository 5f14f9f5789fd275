import time
from pathlib import Path

import pytest

from service.commands.options import experiment_file
from service.config.experiment import load
from service.runs.run_directory import check_writable, reopen
from service.runs.stored import driver_lease, stored_session
from service.runs.stored.driver_lease import DriverLease, is_fresh
from service.runs.stored.stored_runs import (
    delete,
    display_name,
    fetch_checkpoint,
    fetch_records,
    ray_storage,
    root_folder,
    run_folder,
    run_store,
    uri_of,
)
from service.runs.stored.stored_session import put_rest
from service.runs.stored.stored_session import stored_session as session_of
from tests.s3 import S3, SECRET, contents
from tests.waiting import wait_until
from trainables.errors import CheckpointError, ExperimentError, StorageError
from trainables.object_store.run_copy import RunCopy
from trainables.object_store.store import ObjectStore
from trainables.rundir import RunDir, write_atomic, write_json

URI = "s3://bucket/runs/one"


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lease, "RENEW_S", 0.2)
    monkeypatch.setattr(driver_lease, "LEASE_S", 2.5)  # a store knows times to the second
    monkeypatch.setattr(driver_lease, "_POLL_S", 0.1)
    monkeypatch.setattr(stored_session, "EVERY_S", 0.05)
    monkeypatch.setattr(stored_session, "_ENDING_S", 0.1)


def lease(folder: Path) -> DriverLease:
    return DriverLease(RunCopy(URI, folder), lambda: None)


def test_a_uri_has_one_folder_for_its_copies_and_its_runs_know_their_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path))
    folder = root_folder("s3://bucket/runs/")
    assert folder == root_folder("s3://bucket/runs") != root_folder("s3://bucket/other/runs")
    assert run_folder("s3://bucket/runs/one/") == folder / "one"
    assert uri_of(folder) == "s3://bucket/runs"
    assert display_name(folder / "one" / "result.json") == f"{URI}/result.json"
    (tmp_path / ".raydistill-origin").write_text("somebody's own file")
    assert uri_of(tmp_path) is None
    assert run_store(tmp_path / "run") is None
    store = run_store(folder / "one/trials/000/student")
    assert store is not None
    assert (store.uri, store.folder) == (URI, str(folder / "one"))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (f"s3://key:{SECRET}@bucket/runs", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket/runs?endpoint_override=x", "AWS_ENDPOINT_URL"),
        ("gs://bucket/runs", "write a folder, or s3://BUCKET/PREFIX"),
        ("s3://", "write a folder, or s3://BUCKET/PREFIX"),
        ("s3://bucket/../x", "write a folder, or s3://BUCKET/PREFIX"),
    ],
)
def test_another_uri_is_refused_in_a_line_without_a_secret(uri: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message) as error:
        root_folder(uri)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("part", ["", "/trials/000", "/trials/000/student", "/trials/000/student/checkpoints/best.safetensors"])
def test_a_checkpoint_is_found_by_its_uri_its_stages_or_its_runs(s3: S3, part: str) -> None:
    uri, stage = (URI, "student") if not part else (f"{URI}{part}", "trials/000/student")
    store = ObjectStore(URI)
    for name in ("owner.json", f"{stage}/owner.json"):
        store.put(name, b'{"folder": "elsewhere"}')
    store.put("experiment.yaml", b"")
    with pytest.raises(CheckpointError, match=f"^there is no {URI}/.*{stage}/checkpoints/best.safetensors"):
        fetch_checkpoint(uri)
    store.put(f"{stage}/checkpoints/best.safetensors", b"1")
    assert fetch_checkpoint(uri) == run_folder(URI) / stage / "checkpoints/best.safetensors"
    store.put(f"{stage}/checkpoints/best.safetensors", b"2")
    assert fetch_checkpoint(uri).read_bytes() == b"2"


def test_a_checkpoint_outside_every_run_is_refused_in_a_line(s3: S3) -> None:
    with pytest.raises(ExperimentError, match=r"s3://bucket/x\.safetensors is in no run: copy the checkpoint to a folder"):
        fetch_checkpoint("s3://bucket/x.safetensors")


def test_rays_own_objects_are_not_below_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path))
    assert ray_storage(RunDir(run_folder(URI))) == "s3://bucket/runs/.ray/one"
    assert ray_storage(RunDir(run_folder(URI)).trial("000")) == "s3://bucket/runs/.ray/one/trials/000"
    assert ray_storage(RunDir(tmp_path / "one")) == str(tmp_path / "one/ray")


def test_a_second_driver_is_refused_while_the_first_renews_its_lease(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lease(tmp_path / "a"), lease(tmp_path / "b")
    first.acquire(lambda line: None)
    assert is_fresh(URI)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e12)  # this machine's clock does not matter
        assert is_fresh(URI)
    with pytest.raises(ExperimentError, match=r"is already running in a driver on .*: wait for it, or end it first"):
        second.acquire(lambda line: None)
    first.release()
    assert contents(URI) == {}
    second = lease(tmp_path / "b")
    second.acquire(pytest.fail)
    second.release()


def test_the_lease_of_a_killed_driver_ends_and_at_once_in_its_own_folder(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.4)
    killed = lease(tmp_path / "a")
    killed._put()
    lines: list[str] = []
    again = lease(tmp_path / "a")
    again.acquire(lines.append)
    assert not lines
    again._ended.set()  # and killed too
    again._thread.join()
    began_s = time.monotonic()
    elsewhere = lease(tmp_path / "b")
    elsewhere.acquire(lines.append)
    assert time.monotonic() - began_s >= 0.4
    assert "waiting 0.4 s to see whether it still has" in lines[0]
    assert len(contents(URI)) == 1
    elsewhere.release()


def test_a_driver_that_was_paused_while_another_took_over_ends_and_puts_nothing_more(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(URI)
    monkeypatch.setattr(driver_lease, "RENEW_S", 3600.0)  # as in a pause: nothing renews the lease, and it has ended
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.0)

    def drive() -> None:
        with session_of(RunDir(folder), pytest.fail):
            ObjectStore(URI).put(".drivers/other", b'{"drives": true, "folder": "of another"}')
            write_json(folder / "result.json", {})
            wait_until(lambda: False)

    with pytest.raises(KeyboardInterrupt):
        drive()
    assert contents(URI).keys() == {"owner.json", ".drivers/other"}


def test_a_driver_that_wakes_at_its_end_puts_nothing_more(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(URI)
    monkeypatch.setattr(driver_lease, "RENEW_S", 3600.0)
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.0)
    monkeypatch.setattr(stored_session, "EVERY_S", 3600.0)

    def drive() -> None:
        with session_of(RunDir(folder), pytest.fail):
            ObjectStore(URI).put(".drivers/other", b'{"drives": true, "folder": "of another"}')
            write_json(folder / "result.json", {})

    with pytest.raises(ExperimentError, match=f"another driver has taken over {URI}: this one ends"):
        drive()
    assert contents(URI).keys() == {"owner.json", ".drivers/other"}


def test_what_the_driver_writes_is_put(s3: S3) -> None:
    folder = run_folder(URI)
    with session_of(RunDir(folder), pytest.fail):
        write_json(folder / "student/logs/train.log", {})
        write_atomic(folder / "student/checkpoints/best.safetensors", b"")  # the workers'
        wait_until(lambda: "student/logs/train.log" in contents(URI))
        (folder / "student/logs/train.log").unlink()  # as a cleaner of temporary files does
        write_json(folder / "result.json", {"status": "complete"})
    assert contents(URI).keys() == {"owner.json", "student/logs/train.log", "result.json"}


def test_the_log_is_put_behind_all_else_that_it_tells_of(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, put, names = run_folder(URI), ObjectStore.put, list[str]()

    def noted(store: ObjectStore, name: str, content: Path | bytes) -> None:
        put(store, name, content)
        names.append(name)

    monkeypatch.setattr(stored_session, "EVERY_S", 3600.0)
    monkeypatch.setattr(ObjectStore, "put", noted)
    with session_of(RunDir(folder), pytest.fail):
        names.clear()
        for name in ("events.jsonl", "result.json", "trials/000/experiment.yaml"):
            write_json(folder / name, {})
    assert [name for name in names if not name.startswith(".")] == ["trials/000/experiment.yaml", "result.json", "events.jsonl"]


def test_a_file_that_the_driver_deletes_is_not_in_the_store_either(s3: S3) -> None:
    folder = run_folder(URI)
    with session_of(RunDir(folder), pytest.fail):
        write_json(folder / "scores.json", {})
        wait_until(lambda: "scores.json" in contents(URI))
        delete(folder / "scores.json")
    assert contents(URI).keys() == {"owner.json"}


def test_what_workers_put_elsewhere_comes_to_the_driver(s3: S3, tmp_path: Path) -> None:
    folder, node = run_folder(URI), RunCopy(URI, tmp_path / "node")
    with session_of(RunDir(folder), pytest.fail):
        node.own("student", lambda name: True)
        node.store.put("student/checkpoints/best.safetensors", b"1")
        wait_until((folder / "student/checkpoints/best.safetensors").exists)
        node.store.put("student/checkpoints/best.safetensors", b"12")
        wait_until(lambda: (folder / "student/checkpoints/best.safetensors").read_bytes() == b"12")


def test_a_store_that_is_gone_at_the_end_is_one_line_with_how_to_go_on(s3: S3) -> None:
    folder = run_folder(URI)

    def drive() -> None:
        with session_of(RunDir(folder), pytest.fail):
            s3.refuse(403, 10**6)
            write_json(folder / "result.json", {})

    with pytest.raises(StorageError, match=f"cannot be .*continue with `distill resume {URI}`"):
        drive()
    s3.refuse(403, 0)
    put_rest(RunDir(folder), pytest.fail)
    assert "result.json" in contents(URI)


def test_a_run_that_another_machine_has_begun_is_not_continued_with_this_ones_experiment(s3: S3) -> None:
    folder, store = run_folder(URI), ObjectStore(URI)
    store.put("owner.json", b'{"folder": "elsewhere"}')
    store.put("experiment.yaml", b"seed: 1\n")
    store.put("events.jsonl", b"{}")
    write_atomic(folder / "experiment.yaml", b"seed: 2\n")
    with (
        pytest.raises(ExperimentError, match=f"^{URI} already holds a run: continue it with `distill resume {URI}`"),
        session_of(RunDir(folder), pytest.fail),
    ):
        pytest.fail("it began")
    assert contents(URI)["experiment.yaml"] == "seed: 1\n"
    assert not any(name.startswith(".drivers/") for name in contents(URI))


def test_a_run_that_died_as_it_began_elsewhere_is_begun_anew(s3: S3) -> None:
    folder, store = run_folder(URI), ObjectStore(URI)
    store.put("owner.json", b'{"folder": "elsewhere"}')
    store.put("experiment.yaml", b"seed: 1\n")
    write_atomic(folder / "experiment.yaml", b"seed: 2\n")
    write_atomic(folder / "events.jsonl", b"{}")
    with session_of(RunDir(folder), pytest.fail):
        assert contents(URI)["experiment.yaml"] == "seed: 2\n"
    assert (folder / "events.jsonl").exists()


def test_refusals_name_the_run_as_the_user_does(s3: S3) -> None:
    folder = run_folder(URI)
    write_atomic(folder / "experiment.yaml", b"")
    with pytest.raises(ExperimentError, match=f"^{URI} holds a run that died as it began"):
        check_writable(folder.parent, folder)
    write_atomic(folder / "events.jsonl", b"")
    with pytest.raises(ExperimentError, match=f"^{URI} already holds a run: continue it with `distill resume {URI}`"):
        check_writable(folder.parent, folder)


def test_the_experiment_of_a_run_can_be_run_again_by_its_uri(s3: S3) -> None:
    ObjectStore(URI).put("experiment.yaml", b"base: digits\nseed: 3\n")
    for text in (URI, f"{URI}/experiment.yaml"):
        assert load(experiment_file(text)).experiment.seed == 3
    assert experiment_file("digits") == "digits"
    with pytest.raises(ExperimentError, match=f"^{URI}2 holds no run: give a recipe, a file, or s3://"):
        experiment_file(f"{URI}2")


def test_records_are_fetched_unless_the_run_is_written_here(s3: S3) -> None:
    folder, store = run_folder(URI), ObjectStore(URI)
    fetch_records(folder)
    with pytest.raises(ExperimentError, match=f"^{URI} holds no run"):
        reopen(folder)
    store.put("owner.json", b'{"folder": "elsewhere"}')
    store.put("student/owner.json", b'{"folder": "elsewhere"}')
    for name in ("events.jsonl", "student/logs/train.log", "student/checkpoints/best.safetensors", ".drivers/x"):
        store.put(name, b"1")
    fetch_records(folder)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert found == {"events.jsonl", "student/logs/train.log"}
    store.put("events.jsonl", b"2")
    fetch_records(folder)
    assert (folder / "events.jsonl").read_bytes() == b"2"
