import time
from pathlib import Path

import pytest

from service.commands.options import experiment_file
from service.commands.runs import resume_run
from service.config.experiment import load
from service.runs.event_log import log_lines
from service.runs.events import Event, event, first_event, to_line
from service.runs.mlflow_view import MlflowView
from service.runs.run_directory import check_writable, locked_run, reopen
from service.runs.stored import driver_lease, stored_session
from service.runs.stored.driver_lease import DriverLease, is_fresh
from service.runs.stored.stored_runs import (
    begin_attempt,
    display_name,
    fetch_checkpoint,
    fetch_records,
    ray_storage,
    root_folder,
    run_folder,
    run_store,
    uri_of,
)
from service.runs.stored.stored_session import stored_session as session_of
from tests.run_log import LocalRecorder
from tests.s3 import S3, SECRET, contents
from tests.trainables.jobs import config as job_config
from tests.waiting import wait_until
from trainables.errors import CheckpointError, ExperimentError, StorageError
from trainables.object_store.store import ObjectStore
from trainables.rundir import RunDir, write_atomic, write_json

URI = "s3://bucket/runs/one"


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lease, "RENEW_S", 0.2)
    monkeypatch.setattr(driver_lease, "LEASE_S", 2.5)  # a store knows times to the second
    monkeypatch.setattr(driver_lease, "_POLL_S", 0.1)
    monkeypatch.setattr(stored_session, "PUT_FILES_EVERY_S", 0.05)
    monkeypatch.setattr(stored_session, "ENDING_S", 0.1)


def lease(folder: Path) -> DriverLease:
    return DriverLease(URI, folder, lambda error: None)


def put_log(*events: Event, driver: int = 1, experiment: bytes = b"seed: 1\n") -> bytes:
    """A run of another machine. Returns its log."""
    log = b"".join(map(to_line, [first_event(), *events]))
    ObjectStore(URI).put("experiment.yaml", experiment)
    ObjectStore(URI).put(f"events/{driver:04}-{0:012}-{len(log):012}.jsonl", log)
    return log


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
    put_log()
    with pytest.raises(CheckpointError, match=f"^there is no {URI}/.*{stage}/checkpoints/best.safetensors"):
        fetch_checkpoint(uri)
    for driver, name in ((2, "best-1-1a.safetensors"), (3, "best-2-1b.safetensors")):
        ObjectStore(URI).put(f"{stage}/checkpoints/{name}", name.encode())
        put_log(event("checkpoint", stage, step=driver, names=[name]), driver=driver)
        path = run_folder(URI) / stage / "checkpoints" / name
        assert fetch_checkpoint(uri) == fetch_checkpoint(f"{URI}/{stage}/checkpoints/{name}") == path
        assert path.read_text() == name


def test_the_model_that_goes_to_mlflow_comes_from_the_store(s3: S3) -> None:
    name = "best-00000007-1a.safetensors"
    ObjectStore(URI).put(f"student/checkpoints/{name}", b"1")
    put_log(
        event("result", changes={"kind": "train", "name": "digits", "status": "running", "runs_root": "s3://bucket/runs"}),
        event("session_begun", tags={}),
        event("checkpoint", "student", step=7, epoch=1.0, names=[name]),
        event("stage_ended", "student", outcome={"status": "ok"}),
        experiment=load("digits", ["tracking.log_model=true"]).to_yaml().encode(),
    )
    folder = run_folder(URI)
    fetch_records(folder)
    view = MlflowView(RunDir(folder))
    for line in log_lines(folder / "events.jsonl"):
        view.take(line)
    ((checkpoint, registered),) = [item.value for item in view.runs["train"].items if item.kind == "model"]
    assert checkpoint().read_bytes() == b"1"
    assert registered is None


def test_workers_do_not_begin_with_a_checkpoint_that_was_removed_from_the_store(s3: S3) -> None:
    folder, store, best = run_folder(URI), ObjectStore(URI), "best-00000007-1a.safetensors"
    for name in (best, "last-00000006-1b.safetensors"):
        store.put(f"student/checkpoints/{name}", b"1")
    recorder = LocalRecorder(folder)
    recorder.record([event("checkpoint", "student", step=7, names=[best, "last-00000007-1b.safetensors"])])  # the last is gone
    config = job_config(folder / "student", run_store=run_store(folder))
    config, _ = begin_attempt(config, recorder)
    assert config.run_store is not None
    assert config.run_store.checkpoints == {"best": best}
    assert [*contents(URI)] == [f"student/checkpoints/{best}"]


def test_a_checkpoint_outside_every_run_is_refused_in_a_line(s3: S3) -> None:
    with pytest.raises(ExperimentError, match=r"s3://bucket/x\.safetensors is not part of a run: copy the checkpoint"):
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
    assert "waiting 0.4 s to see whether it still is" in lines[0]
    assert len(contents(URI)) == 1
    elsewhere.release()


def test_a_driver_that_was_paused_as_it_began_gives_up_to_the_one_that_took_over(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = lease(tmp_path / "b")
    other.acquire(pytest.fail)
    paused = lease(tmp_path / "a")
    monkeypatch.setattr(paused, "_others", dict)  # it looked before the other one came
    with pytest.raises(ExperimentError, match=f"another driver has taken over {URI}: stopping this one"):
        paused.acquire(pytest.fail)
    other.release()


def test_each_driver_has_a_larger_number_than_those_before_it_whether_they_put_something_or_not(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.3)
    put_log(driver=4)
    numbers = []
    for name in "ab":
        killed = lease(tmp_path / name)
        killed.acquire(lambda line: None)
        killed._ended.set()
        killed._thread.join()
        numbers.append(killed.number)
    assert numbers == [5, 6]


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
    assert contents(URI).keys() == {".drivers/other"}


def test_a_driver_that_wakes_at_its_end_puts_nothing_more(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(URI)
    monkeypatch.setattr(driver_lease, "RENEW_S", 3600.0)
    monkeypatch.setattr(driver_lease, "LEASE_S", 0.0)
    monkeypatch.setattr(stored_session, "PUT_FILES_EVERY_S", 3600.0)

    def drive() -> None:
        with session_of(RunDir(folder), pytest.fail):
            ObjectStore(URI).put(".drivers/other", b'{"drives": true, "folder": "of another"}')
            write_json(folder / "result.json", {})

    with pytest.raises(ExperimentError, match=f"another driver has taken over {URI}: stopping this one"):
        drive()
    assert contents(URI).keys() == {".drivers/other"}


def test_files_for_people_are_put_while_the_driver_works_and_at_its_end(s3: S3) -> None:
    folder = run_folder(URI)
    with session_of(RunDir(folder), pytest.fail):
        write_json(folder / "student/logs/train.log", {})
        write_atomic(folder / "student/checkpoints/best.safetensors", b"")  # the workers'
        write_atomic(folder / "events.jsonl", b"")  # the recorder's
        wait_until(lambda: "student/logs/train.log" in contents(URI))
        (folder / "student/logs/train.log").unlink()  # as a cleaner of temporary files does
        write_json(folder / "result.json", {"status": "complete"})
    assert contents(URI).keys() == {"student/logs/train.log", "result.json"}


def test_a_driver_begins_with_what_the_store_has_whatever_its_folder_had(s3: S3) -> None:
    folder = run_folder(URI)
    for name in ("events.jsonl", "result.json", "trials/000/experiment.yaml", ".mlflow.json"):
        write_atomic(folder / name, b"of an earlier session, which the store never got")
    log = put_log(event("notice", text="a line"))
    ObjectStore(URI).put("student/logs/train.log", b"1")
    with session_of(RunDir(folder), pytest.fail) as place:
        assert place is not None
        assert place.driver == 2
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}
        assert found == {"events.jsonl", "experiment.yaml", "student/logs/train.log"}
        assert (folder / "events.jsonl").read_bytes() == log
        assert not (folder / ".mlflow.json").exists()


def end_cut_off(s3: S3) -> Path:
    """A run that is complete by its log, of which the store did not take the files for people. Returns its folder."""
    folder = run_folder(URI)
    write_atomic(folder / "experiment.yaml", load("digits", []).to_yaml().encode())
    write_atomic(folder / "result.json", b"early")
    values = {"kind": "train", "name": "digits", "status": "complete", "runs_root": "s3://bucket/runs"}
    log = b"".join(map(to_line, [first_event(), event("result", changes=values)]))

    def drive() -> None:
        with session_of(RunDir(folder), pytest.fail):
            write_atomic(folder / "events.jsonl", log)
            ObjectStore(URI).put(f"events/0001-{0:012}-{len(log):012}.jsonl", log)
            s3.refuse(403, 10**6)
            for name in ("result.json", "report.html", "backbone.safetensors"):
                write_atomic(folder / name, b"final")

    with pytest.raises(StorageError):
        drive()
    s3.refuse(403, 0)
    return folder


def test_what_the_store_did_not_take_of_a_complete_run_stays_here_and_is_put_by_a_resume(
    s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = end_cut_off(s3)
    fetch_records(folder)  # as every command that reads the run
    assert {(folder / name).read_bytes() for name in ("result.json", "report.html", "backbone.safetensors")} == {b"final"}
    (folder / "experiment.yaml").unlink()  # as a cleaner of temporary files does
    resume_run(folder, accept_new_data=False)
    assert capsys.readouterr().out == f"{URI} is complete; its tables: distill report {URI}\n"
    there = contents(URI)
    assert {there[name] for name in ("result.json", "report.html", "backbone.safetensors")} == {"final"}
    assert not any(name.startswith(".drivers/") for name in there)
    ObjectStore(URI).put("report.html", b"of another machine")
    fetch_records(folder)
    assert (folder / "report.html").read_bytes() == b"of another machine"


def test_what_another_driver_has_put_since_is_what_counts(s3: S3) -> None:
    folder = end_cut_off(s3)
    log = (folder / "events.jsonl").read_bytes() + to_line(event("notice", text="of another driver"))
    ObjectStore(URI).put(f"events/0002-{0:012}-{len(log):012}.jsonl", log)
    for content in (b"of another driver", b"and its last"):
        ObjectStore(URI).put("result.json", content)
        fetch_records(folder)
        assert (folder / "result.json").read_bytes() == content
        assert not (folder / "backbone.safetensors").exists()


def test_a_store_that_is_gone_at_the_end_is_one_line_with_how_to_go_on(s3: S3) -> None:
    folder = run_folder(URI)

    def drive() -> None:
        with session_of(RunDir(folder), pytest.fail):
            s3.refuse(403, 10**6)
            write_json(folder / "result.json", {})

    with pytest.raises(StorageError, match=f"cannot be .*continue with `distill resume {URI}`"):
        drive()


def test_a_run_that_another_machine_has_begun_is_not_continued_with_this_ones_experiment(s3: S3) -> None:
    folder = run_folder(URI)
    put_log()
    write_atomic(folder / "experiment.yaml", b"seed: 2\n")
    with (
        pytest.raises(ExperimentError, match=f"^{URI} already holds a run: continue it with `distill resume {URI}`"),
        session_of(RunDir(folder), pytest.fail),
    ):
        pytest.fail("it began")
    assert contents(URI)["experiment.yaml"] == "seed: 1\n"
    assert not any(name.startswith(".drivers/") for name in contents(URI))


def test_a_run_that_died_as_it_began_elsewhere_is_begun_anew(s3: S3) -> None:
    folder = run_folder(URI)
    ObjectStore(URI).put("experiment.yaml", b"seed: 1\n")
    write_atomic(folder / "experiment.yaml", b"seed: 2\n")
    write_atomic(folder / "events.jsonl", b"{}")
    with session_of(RunDir(folder), pytest.fail):
        assert contents(URI)["experiment.yaml"] == "seed: 2\n"
    assert (folder / "events.jsonl").exists()


def test_refusals_name_the_run_as_the_user_does(s3: S3) -> None:
    folder = run_folder(URI)
    write_atomic(folder / "experiment.yaml", b"")
    with pytest.raises(ExperimentError, match=f"^{URI} holds a run that died while starting"):
        check_writable(folder.parent, folder)
    write_atomic(folder / "events.jsonl", b"")
    with pytest.raises(ExperimentError, match=f"^{URI} already holds a run: continue it with `distill resume {URI}`"):
        check_writable(folder.parent, folder)


def test_the_experiment_of_a_run_can_be_run_again_by_its_uri(s3: S3) -> None:
    put_log(experiment=b"base: digits\nseed: 3\n")
    for text in (URI, f"{URI}/experiment.yaml"):
        assert load(experiment_file(text)).experiment.seed == 3
    assert experiment_file("digits") == "digits"
    with pytest.raises(ExperimentError, match=f"^{URI}2 holds no run: give a recipe, a file, or s3://"):
        experiment_file(f"{URI}2")


def test_a_reader_gets_log_and_files_of_a_run_unless_it_is_written_here(s3: S3) -> None:
    folder, store = run_folder(URI), ObjectStore(URI)
    fetch_records(folder)
    with pytest.raises(ExperimentError, match=f"^{URI} holds no run"):
        reopen(folder)
    log = put_log()
    for name in ("student/logs/train.log", "student/checkpoints/best-1-a.safetensors", ".drivers/x"):
        store.put(name, b"1")
    fetch_records(folder)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert found == {"events.jsonl", "experiment.yaml", "student/logs/train.log"}
    store.put("student/logs/train.log", b"2")
    longer = put_log(event("notice", text="a line"), driver=2)
    with locked_run(RunDir(folder)):
        fetch_records(folder)
        assert (folder / "events.jsonl").read_bytes() == log
    fetch_records(folder)
    assert (folder / "events.jsonl").read_bytes() == longer
    assert (folder / "student/logs/train.log").read_bytes() == b"2"
