"""MLflow is made equal to a run's log: on a real SQLite store, without a server."""

import contextlib
import http.server
import json
import math
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.runs.events import event
from service.runs.mlflow_view import MlflowView
from service.tracking.run_view import SyncState, lock_path, state_path
from service.tracking.stores import CLIENT_ENVIRONMENT, NO_TELEMETRY, compare_urls, default_uri, ui_command
from service.tracking.sync import Syncing, sync, sync_pending_runs
from tests.service.tracking.store import FIRST_MS, Run, epoch, metrics_of, query, row, run_of
from tests.waiting import wait_until
from trainables.errors import ExperimentError
from trainables.locks import locked
from trainables.rundir import RunDir

ROOT = Path(__file__).resolve().parents[3]
SENT = "MLflow has every event"


def client(runs_root: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(default_uri(runs_root))


def remove_for_good(runs_root: Path, run_id: str) -> None:
    """As `mlflow gc` does."""
    with contextlib.closing(sqlite3.connect(runs_root / "mlflow.db", timeout=20)) as store, store:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            store.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))


def test_a_log_that_grows_arrives_with_parameters_tags_files_and_each_epoch_once(runs_root: Path, run: Run) -> None:
    with contextlib.ExitStack() as stack:
        syncing = run.syncing()
        syncing.start()
        stack.callback(syncing.close, 1)
        for first in range(0, 1500, 300):
            run.add_epochs(range(first, first + 300))
            wait_until(lambda first=first: count(runs_root, run, "train/loss") == first + 300)  # type: ignore[misc]
        run.add(event("summary", "student", step=1500, epoch=9.0, metrics={"steps": 1500.0, "top1_pct": 96.504}))
        run.end("interrupted")
        run.run_dir.result.write_text("{}\n")
        delivery = syncing.close(60)
    assert delivery == (True, f"{SENT} ({run.uri}), except 1 that cannot be sent: {run.run_dir.report} no longer exists")
    run_id, status, ended_ms = run_of(runs_root, run)
    assert status == "KILLED"
    assert abs(ended_ms / 1000 - time.time()) < 60
    params = dict(query(runs_root, "SELECT key, value FROM params WHERE run_uuid = ?", run_id))
    assert (params["data.path"], params["optim.epochs"]) == ("digits", "12")
    tags = dict(query(runs_root, "SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
    assert tags["raydistill.commit"] == tags["mlflow.source.git.commit"] == "abc123"
    expected = [(step, round(1 / (step + 1), 4), FIRST_MS + step) for step in range(1500)]
    assert metrics_of(runs_root, run_id, "train/loss") == expected
    assert [row[:2] for row in metrics_of(runs_root, run_id, "top1_pct")] == [(1500, 96.5)]
    folder = runs_root / "mlartifacts" / run_id / "artifacts"
    assert sorted(path.name for path in folder.iterdir()) == ["experiment.yaml", "result.json"]


def count(runs_root: Path, run: Run, metric: str) -> int:
    """Values of a metric in runs of the name."""
    sql = "SELECT count(*) FROM metrics JOIN runs r USING (run_uuid) WHERE r.name = ? AND key = ?"
    return int(query(runs_root, sql, run.run_dir.root.name, metric)[0][0])


def test_five_thousand_epochs_are_few_requests(run: Run, runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.add_epochs(range(5000))
    run.end()
    requests = rows_of_requests(monkeypatch)
    assert run.sync().is_complete
    assert count(runs_root, run, "images_per_s") == count(runs_root, run, "train/loss") == 5000
    assert len(requests) <= 16
    assert max(len(kinds) for kinds in requests) > 500


def rows_of_requests(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A list that grows with each log_batch from now on: by the kinds of its rows."""
    from mlflow import MlflowClient

    requests, log_batch = list[list[str]](), MlflowClient.log_batch

    def counting(client: Any, run_id: str, **entities: Any) -> None:
        requests.append([kind for kind, rows in entities.items() if kind != "synchronous" for _ in rows])
        log_batch(client, run_id, **entities)

    monkeypatch.setattr(MlflowClient, "log_batch", counting)
    return requests


def test_what_was_sent_is_sent_again_without_arriving_twice(runs_root: Path, run: Run) -> None:
    values = {"train/loss": math.nan, "val_loss": math.inf, "cka": -math.inf}
    run.add_epochs(range(50))
    run.add(epoch(60, metrics=values))
    run.end()
    assert run.sync().is_complete
    tables = ("runs", "metrics", "params", "tags", "inputs")
    before = {table: query(runs_root, f"SELECT count(*) FROM {table}") for table in tables}
    run_id, _, _ = run_of(runs_root, run)
    for position in ("0:00000000", "nonsense", ""):
        query(runs_root, "SELECT 1")
        client(runs_root).set_tag(run_id, "raydistill.position", position)
        state_path(run.run_dir).unlink()
        assert run.sync().is_complete
    assert {table: query(runs_root, f"SELECT count(*) FROM {table}") for table in tables} == before
    stored = dict(query(runs_root, "SELECT key, value || ' ' || is_nan FROM metrics WHERE run_uuid = ? AND step = 60", run_id))
    assert stored["train/loss"] == "0.0 1"
    assert stored["val_loss"].startswith("1.797")
    assert stored["cka"].startswith("-1.797")


def test_what_mlflow_has_is_not_sent_again_by_another_process(run: Run, runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.add_epochs(range(50))
    assert run.sync().is_complete
    requests = rows_of_requests(monkeypatch)
    state_path(run.run_dir).unlink()
    run.add_epochs(range(50, 53))
    assert run.sync().is_complete
    assert requests == [["metrics"] * 6]
    assert count(runs_root, run, "train/loss") == 53


def test_a_log_that_lost_its_end_with_a_node_and_went_on_otherwise_arrives_whole(run: Run, runs_root: Path) -> None:
    """As of a run in an object store, which another driver continues."""
    run.add_epochs(range(10))
    raw = run.run_dir.events.read_bytes()
    run.add_epochs(range(10, 20))
    assert run.sync().is_complete
    run.run_dir.events.write_bytes(raw)
    state_path(run.run_dir).unlink()
    run.add(*(epoch(step) | {"time_ms": FIRST_MS + 10**6 + step} for step in range(10, 15)))
    assert run.sync().is_complete
    run_id, _, _ = run_of(runs_root, run)
    assert {time_ms for step, _, time_ms in metrics_of(runs_root, run_id, "train/loss") if step == 12} == {
        FIRST_MS + 12,
        FIRST_MS + 10**6 + 12,
    }


def test_a_run_that_is_resumed_goes_on_in_the_same_mlflow_run(runs_root: Path, run: Run) -> None:
    for part, status in ((range(10), "interrupted"), (range(10, 20), "complete")):
        run.add_epochs(part)
        with open(run.run_dir.events, "a") as file:
            file.write('{"kind": "epoch", "torn')  # the writer dies in the middle of a line
        run.end(status)
        assert run.sync().is_complete
        run_id, stored, _ = run_of(runs_root, run)
        assert stored == {"interrupted": "KILLED", "complete": "FINISHED"}[status]
        run.add(event("session_begun"))
        assert run.sync().is_complete
        assert run_of(runs_root, run)[1] == "RUNNING"
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "train/loss")] == list(range(20))


def test_what_mlflow_never_takes_is_left_out_and_holds_up_nothing(
    runs_root: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.add(epoch(1, "..", {"epoch/train/loss": 1.0}), epoch(1), epoch(2, "..", {"epoch/train/loss": 1.0}))
    run.add(epoch(3, metrics={"train/loss": "no number"}))  # type: ignore[dict-item]
    with open(run.run_dir.events, "a") as file:
        file.write('{"kind": "of a later version"}\n{"kind": "epoch", "time_ms": "no time"}\n')
    run.add(epoch(4))
    delivery = run.sync()
    assert delivery.is_complete
    assert ", except 2 that cannot be sent: " in delivery.message
    run_id, _, _ = run_of(runs_root, run)
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "train/loss")] == [1, 4]
    assert caplog.text.count("MLflow refuses it") == 1
    assert caplog.text.count("the event that ends at byte") == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_files_that_cannot_be_uploaded_hold_up_no_metric_and_arrive_once_they_can(
    runs_root: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = client(runs_root).create_experiment(run.run_dir.root.name, (runs_root / "mlartifacts").as_uri())
    run_id = client(runs_root).create_run(experiment, tags={"raydistill.key": f"{run.tag}/train"}).info.run_id
    folder = runs_root / "mlartifacts" / run_id
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file, so that no folder can be made here")
    for path in (run.run_dir.result, run.run_dir.report):
        path.write_text("{}\n")
    run.add_epochs(range(3))
    run.end()
    for _ in range(2):
        delivery = run.sync(max_failures=2)
        assert not delivery.is_complete
        assert "has the metrics but lacks" in delivery.message
        assert " lacks 3 artifacts: [Errno " in delivery.message
        assert delivery.message.endswith(f"; later, run distill sync {shlex.quote(str(run.run_dir.root))}")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # one for each process
    assert run_of(runs_root, run)[1] == "FINISHED"
    folder.unlink()
    assert run.sync().is_complete
    names = {"experiment.yaml", "result.json", "report.html"}
    assert {path.name for path in (folder / "artifacts").iterdir()} == names
    assert count(runs_root, run, "train/loss") == 0 or len(metrics_of(runs_root, run_id, "train/loss")) == 3


def test_a_run_that_was_deleted_in_mlflow_gets_everything_once_it_is_restored(
    runs_root: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.sync().is_complete
    run_id, _, _ = run_of(runs_root, run)
    client(runs_root).delete_run(run_id)
    run.add_epochs(range(30))
    run.end()
    reason = f"{run.uri} did not accept all events (deleted in MLflow, so restore there: run {run_id} (train))"
    for _ in range(2):
        delivery = run.sync(max_failures=2)
        assert delivery == (False, f"{reason}; later, run distill sync {shlex.quote(str(run.run_dir.root))}")
    assert caplog.text.count(reason) == 2  # once for each process
    client(runs_root).restore_run(run_id)
    assert run.sync() == (True, f"{SENT} ({run.uri})") or run.sync().is_complete
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "train/loss")] == list(range(30))
    assert run_of(runs_root, run)[1] == "FINISHED"


def test_a_trial_that_was_deleted_while_the_sweep_goes_on_holds_up_no_other_one(
    runs_root: Path, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(run_dir, default_uri(runs_root), "sweep")
    run.change(trials=[row("000"), row("001")])
    run.add(*(event("stage_begun", f"trials/{trial}/student", trial=trial, model="resnet8") for trial in ("000", "001")))
    syncing = run.syncing()
    syncing.start()
    wait_until(lambda: bool(query(runs_root, "SELECT 1 FROM tags WHERE value = ?", f"{run.tag}/trial/001")))
    deleted, _, _ = run_of(runs_root, run, "trial/000")
    client(runs_root).delete_run(deleted)
    for trial in ("000", "001"):
        run.add_epochs(range(5), f"trials/{trial}/student")
    wait_until(lambda: "deleted in MLflow" in caplog.text)
    delivery = syncing.close(0.5)
    assert f"(deleted in MLflow, so restore there: run {deleted} (trial/000)); later, run distill sync" in delivery.message
    assert caplog.text.count("deleted in MLflow") == 1
    assert len(metrics_of(runs_root, run_of(runs_root, run, "trial/001")[0], "train/loss")) == 5
    client(runs_root).restore_run(deleted)
    assert run.sync().is_complete
    assert len(metrics_of(runs_root, deleted, "train/loss")) == 5


def test_an_experiment_that_was_deleted_in_mlflow_is_restored_with_its_runs_and_a_line(
    runs_root: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    name = run.run_dir.root.name
    syncing = run.syncing()
    syncing.start()
    wait_until(lambda: bool(query(runs_root, "SELECT 1 FROM tags WHERE value = ?", f"{run.tag}/train")))
    client(runs_root).delete_experiment(client(runs_root).get_experiment_by_name(name).experiment_id)
    run.add_epochs(range(3))
    assert syncing.close(60).is_complete
    assert caplog.text.count(f"restored experiment {name!r}, which was deleted in MLflow, with its runs") == 1
    assert len(metrics_of(runs_root, run_of(runs_root, run)[0], "train/loss")) == 3


def test_a_run_that_is_gone_from_mlflow_for_good_is_sent_as_a_new_one(runs_root: Path, run: Run) -> None:
    run.add_epochs(range(3))
    assert run.sync().is_complete
    remove_for_good(runs_root, run_of(runs_root, run)[0])
    run.add_epochs(range(3, 5))
    assert run.sync().is_complete
    assert [step for step, _, _ in metrics_of(runs_root, run_of(runs_root, run)[0], "train/loss")] == list(range(5))
    syncing = run.syncing()
    syncing.start()
    remove_for_good(runs_root, run_of(runs_root, run)[0])
    run.add_epochs(range(5, 7))
    assert syncing.close(60).is_complete
    assert [step for step, _, _ in metrics_of(runs_root, run_of(runs_root, run)[0], "train/loss")] == list(range(7))


def test_a_sync_with_nothing_left_to_send_asks_nothing_of_the_store_and_says_one_thing(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.sync().is_complete
    state = SyncState.read(run.run_dir)
    assert state is not None
    run.uri = "http://127.0.0.1:9"
    state.model_copy(update={"uri": run.uri}).write(run.run_dir)
    assert run.sync() == (True, f"{SENT} (http://127.0.0.1:9)")
    assert not caplog.records


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to a process")
@pytest.mark.parametrize(("of_workers", "expected"), [(None, 19), ("0", 5)], ids=["cluster", "local"])
def test_training_goes_before_mlflow(
    of_workers: str | None,
    expected: int,
    run: Run,
    thread_priorities: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    if of_workers is not None:
        monkeypatch.setenv("RAY_worker_niceness", of_workers)
    syncing = run.syncing()
    assert syncing.close(60).is_complete
    assert thread_priorities == [(os.PRIO_PROCESS, syncing._thread.native_id, expected)]


def test_a_locked_database_is_a_reason_to_wait(runs_root: Path, run: Run) -> None:
    syncing = run.syncing()
    with contextlib.closing(sqlite3.connect(runs_root / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        syncing.start()
        time.sleep(2)
        other.execute("ROLLBACK")
    assert syncing.close(60).is_complete
    run_of(runs_root, run)


SYNC = """
import sys
from pathlib import Path
from service.runs.mlflow_view import MlflowView
from service.tracking.sync import sync
from trainables.rundir import RunDir
print(sync(RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3], MlflowView), flush=True)
"""

KILLS = """
import os, random, signal, sys, threading
from pathlib import Path
from service.runs.mlflow_view import MlflowView
from service.tracking import sender
from service.tracking.sync import sync
from mlflow import MlflowClient
from trainables.rundir import RunDir

def kill_within(requests, delay_s):
    log_batch, left = MlflowClient.log_batch, iter(range(requests, -1, -1))
    def counted(*arguments, **entities):
        if next(left) == 0:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        log_batch(*arguments, **entities)
    MlflowClient.log_batch = counted

generator = random.Random(5)
for _ in range(int(sys.argv[4])):
    requests, delay_s = generator.randrange(4), generator.uniform(0, 0.15)
    if not (child := os.fork()):
        kill_within(requests, delay_s)
        sync(RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3], MlflowView)
        signal.pause()
    print(os.waitpid(child, 0)[1], flush=True)
"""


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, **options)


def test_a_sync_that_is_killed_at_random_moments_loses_and_doubles_nothing(runs_root: Path, run: Run) -> None:
    num_steps, num_kills = 20_000, 8
    run.add_epochs(range(num_steps))
    run.end()
    process = python(KILLS, str(run.run_dir.root), run.uri, run.run_dir.root.name, str(num_kills), stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=200)
    assert out.split() == [str(int(signal.SIGKILL))] * num_kills
    assert run.sync().is_complete
    run_id, status, _ = run_of(runs_root, run)
    assert status == "FINISHED"
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "train/loss")] == list(range(num_steps))
    assert len(metrics_of(runs_root, run_id, "images_per_s")) == num_steps


def test_two_sweeps_that_start_at_once_on_a_store_that_does_not_exist_lose_nothing(tmp_path: Path) -> None:
    runs = [Run(RunDir(tmp_path / name), default_uri(tmp_path)) for name in ("one", "two")]
    for each in runs:
        each.add_epochs(range(200))
        each.end()
    processes = [python(SYNC, str(each.run_dir.root), each.uri, "both") for each in runs]
    assert [process.wait() for process in processes] == [0, 0]
    counted = query(
        tmp_path,
        "SELECT r.name, count(*), max(m.step) FROM runs r JOIN metrics m USING (run_uuid) WHERE m.key = 'train/loss' GROUP BY 1",
    )
    assert sorted(counted) == [("one", 200, 199), ("two", 200, 199)]
    assert query(tmp_path, "SELECT count(*) FROM experiments WHERE name = 'both'") == [(1,)]
    assert query(tmp_path, "SELECT status FROM runs") == [("FINISHED",), ("FINISHED",)]


def test_a_trial_is_few_requests(runs_root: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    num_trials, requests = 40, Counter[str]()
    run = Run(run_dir, default_uri(runs_root), "sweep")
    trials = [f"{number:03d}" for number in range(num_trials)]
    run.change(trials=[row(trial, kind="timing") for trial in trials])
    metrics = {"images_per_s": 100.0, "steps": 8.0} | {f"phase/{name}_ms": 1.5 for name in ("data", "h2d", "student", "step")}
    for trial in trials:
        begun = event("stage_begun", f"trials/{trial}/student", trial=trial, model="resnet8")
        run.add(begun, event("trial_ended", trial=trial, outcome={"status": "ok", "metrics": metrics}))
    run.end()
    for name in ("search_runs", "create_run", "log_batch", "log_inputs", "log_artifact", "set_terminated", "set_tag"):
        function = getattr(MlflowClient, name)

        def counted(*arguments: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            requests.update([name])
            return function(*arguments, **options)

        monkeypatch.setattr(MlflowClient, name, counted)
    assert run.sync().is_complete
    assert sum(requests.values()) <= 5 * num_trials + 12
    names = "SELECT count(*) FROM metrics JOIN runs r USING (run_uuid) JOIN tags t USING (run_uuid) WHERE t.value = ?"
    assert query(runs_root, names, f"{run.tag}/trial/039") == [(6,)]
    of_sweep = "SELECT count(*) FROM tags WHERE key = 'raydistill.key' AND value LIKE ?"
    assert query(runs_root, of_sweep, f"{run.tag}/%") == [(num_trials + 1,)]


def test_only_one_process_sends_a_run(run: Run) -> None:
    with locked(lock_path(run.run_dir)):
        delivery = run.sync()
        assert not delivery.is_complete
        assert "another process" in delivery.message
        assert not run.syncing().close(0.5).is_complete
    assert run.sync().is_complete


def test_a_store_that_is_away_is_a_reason_to_wait_and_one_line_with_no_stack_trace(
    run: Run, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run.uri = "http://user:secret@127.0.0.1:9"
    delivery = run.sync(max_failures=2, name="s3://bucket/run")
    assert not delivery.is_complete
    assert delivery.message.endswith("; later, run distill sync s3://bucket/run")
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text + delivery.message
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/x", "ftp://host/x", "", "sqlite:////tmp/a%20b/mlflow.db"])
def test_a_uri_that_mlflow_cannot_write_to_is_refused_in_one_line(run: Run, uri: str) -> None:
    for act in (lambda: Syncing(run.run_dir, uri, "e", MlflowView), lambda: sync(run.run_dir, uri, "e", MlflowView)):
        with pytest.raises(ExperimentError) as caught:
            act()
        assert "\n" not in str(caught.value)


def test_a_relative_sqlite_path_is_made_absolute(run: Run) -> None:
    Syncing(run.run_dir, "sqlite:///some.db", "e", MlflowView)
    state = SyncState.read(run.run_dir)
    assert state is not None
    assert state.uri == f"sqlite:///{os.getcwd()}/some.db"


CLOSE = """
import sys, time
from pathlib import Path
from service.runs.mlflow_view import MlflowView
from service.tracking.sync import Syncing
from trainables.rundir import RunDir
syncing = Syncing(RunDir(Path(sys.argv[1])), sys.argv[2], "e", MlflowView)
syncing.start()
sys.stdin.readline()
began = time.monotonic()
delivery = syncing.close(0.5)
assert not delivery.is_complete, delivery
print(time.monotonic() - began)
"""


def test_a_server_that_never_answers_keeps_neither_close_nor_the_interpreter_waiting(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(200)
        port = silent.getsockname()[1]
        arguments = (str(run.run_dir.root), f"http://127.0.0.1:{port}")
        process = python(CLOSE, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(10)  # the request is on its way, and stays so
            began = time.monotonic()
            out, _ = process.communicate("go\n", timeout=30)
            assert process.returncode == 0
            assert 0.5 <= float(out) < 5.0
            assert time.monotonic() - began < 20.0


def test_a_moved_run_directory_can_still_be_sent(runs_root: Path, run: Run) -> None:
    run.add_epochs(range(5))
    moved = RunDir(run.run_dir.root.with_name(run.run_dir.root.name + " moved"))
    run.run_dir.root.rename(moved.root)
    run.run_dir = moved
    assert run.sync().is_complete
    assert len(metrics_of(runs_root, run_of(runs_root, run)[0], "train/loss")) == 5


def test_nothing_is_sent_to_the_makers_of_mlflow() -> None:
    code = """
import os
import shlex
from service.tracking.stores import CLIENT_ENVIRONMENT
os.environ.update(CLIENT_ENVIRONMENT)
import service.tracking.sender
from mlflow.telemetry.client import get_telemetry_client
from mlflow.telemetry.utils import fetch_ui_telemetry_config, is_telemetry_disabled
assert is_telemetry_disabled() and get_telemetry_client() is None
assert fetch_ui_telemetry_config()["disable_ui_telemetry"] is True
"""
    # MLflow also holds its tongue in tests and on CI machines, which would prove nothing.
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHONPATH")}
    assert python(code, env=environment).wait(60) == 0
    assert NO_TELEMETRY.items() <= CLIENT_ENVIRONMENT.items()


def test_importing_tracking_does_not_import_mlflow() -> None:
    assert python("import sys, service.tracking; assert 'mlflow' not in sys.modules and 'torch' not in sys.modules").wait(30) == 0


def test_the_ui_command_names_the_store_and_listens_on_loopback(runs_root: Path) -> None:
    command = ui_command(runs_root, port=5055)
    assert command[command.index("--backend-store-uri") + 1] == f"sqlite:///{runs_root}/mlflow.db"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "5055"


@pytest.fixture
def later(run: Run) -> Run:
    """A run of the same root that has ended and was sent; the one before it had begun to be sent."""
    run.syncing()
    later = Run(RunDir(run.run_dir.root.with_name(f"{run.run_dir.root.name}-later")), run.uri)
    later.end()
    assert later.sync().is_complete
    return later


def neighbours(later: Run, limit_s: float) -> tuple[list[Path], list[Path]]:
    return sync_pending_runs(later.run_dir.root.parent, later.uri, MlflowView, limit_s)


def test_what_an_earlier_run_could_not_send_arrives_with_the_next_runs_contact(run: Run, later: Run) -> None:
    broken = Run(RunDir(run.run_dir.root.with_name(f"{run.run_dir.root.name}-broken")), run.uri)
    broken.syncing()
    broken.run_dir.events.unlink()
    broken.run_dir.events.mkdir()
    assert run.run_dir.root in neighbours(later, 0.0)[1], "there was no time for it"
    assert run.run_dir.root in neighbours(later, 60.0)[0]
    assert run.sync().is_complete
    assert run.run_dir.root not in neighbours(later, 0.0)[1]


def test_a_sync_whose_time_has_passed_begins_no_further_request_and_says_what_sends_the_rest(run: Run, runs_root: Path) -> None:
    run.add_epochs(range(3))
    delivery = run.sync(max_failures=1, until_s=time.monotonic())
    assert not delivery.is_complete
    assert delivery.message.endswith(f"later, run distill sync {shlex.quote(str(run.run_dir.root))}")
    assert run.sync().is_complete
    assert len(metrics_of(runs_root, run_of(runs_root, run)[0], "train/loss")) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"uri": "sqli', '{"uri": "a", "experiment": "b", "position": "c"}'])
def test_a_damaged_state_is_found_out_again(text: str, run: Run, runs_root: Path) -> None:
    run.add_epochs(range(3))
    assert run.sync().is_complete
    state_path(run.run_dir).write_text(text)
    assert run.sync().is_complete
    assert len(metrics_of(runs_root, run_of(runs_root, run)[0], "train/loss")) == 3


def test_saved_views_are_written_once_and_never_over_what_a_user_has_made_of_them(runs_root: Path, run_dir: RunDir) -> None:
    uri, name = default_uri(runs_root), run_dir.root.name
    spaces = [f"sweep.space={{{key}: [1]}}" for key in ("optim.lr", "optim.lr", "seed")]
    runs = [Run(RunDir(run_dir.root / str(number)), uri, "sweep", [space]) for number, space in enumerate(spaces)]
    assert sync(runs[0].run_dir, uri, name, MlflowView).is_complete
    experiment = client(runs_root).get_experiment_by_name(name)
    first = {tag for tag in experiment.tags if tag.startswith("mlflow.sharedViewState.")}
    assert len(first) == 2
    client(runs_root).set_experiment_tag(experiment.experiment_id, min(first), "the user's own")
    for each in runs[1:]:
        assert sync(each.run_dir, uri, name, MlflowView).is_complete
    tags = client(runs_root).get_experiment(experiment.experiment_id).tags
    assert len([tag for tag in tags if tag.startswith("mlflow.sharedViewState.")]) == 4
    assert tags[min(first)] == "the user's own"
    page = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey="
    state = SyncState.read(runs[2].run_dir)
    assert state is not None
    table, charts = state.views
    assert compare_urls(runs[2].run_dir) == [f"{page}{table}", f"{page}{charts}&compareRunsMode=CHART"]
    assert {table, charts} == {tag.removeprefix("mlflow.sharedViewState.") for tag in tags if "sharedViewState" in tag} - {
        tag.removeprefix("mlflow.sharedViewState.") for tag in first
    }


def test_a_server_that_is_too_old_for_saved_views_gets_none() -> None:
    experiment = {"experiment_id": "1", "name": "e", "lifecycle_stage": "active", "artifact_location": "file:///tmp"}

    class OldServer(http.server.BaseHTTPRequestHandler):
        """Answers as MLflow 3.15 does to what is asked here; that version is not installed."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"3.15.2" if self.path == "/version" else json.dumps({"experiment": experiment}).encode())

        def log_message(self, *_: object) -> None:
            """Nothing to the test's output."""

    with http.server.HTTPServer(("127.0.0.1", 0), OldServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        from mlflow import MlflowClient

        from service.tracking.sender import add_views

        uri = f"http://127.0.0.1:{server.server_port}"
        reason = add_views(MlflowClient(uri), SyncState(uri=uri, experiment="e", experiment_id="1"), {"key": "{}"})
        server.shutdown()
    assert reason == "they need MLflow 3.16, and the server is 3.15.2"
