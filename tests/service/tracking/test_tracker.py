"""Tracking on a real SQLite store, without a server."""

import contextlib
import http.server
import json
import math
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.tracking import Tracker, compare_urls, default_uri, saved_views, sync, sync_neighbours, ui_command
from service.tracking.sender import CLIENT_ENVIRONMENT, NO_TELEMETRY, Sender
from service.tracking.spool import Spool, Target
from tests.service.tracking.store import metrics_of, query, run_of, write_steps
from tests.waiting import wait_until
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, append_line, append_lines, read_lines

ROOT = Path(__file__).resolve().parents[3]


def test_a_sweep_and_its_trials_arrive_with_parameters_tags_artifacts_and_every_followed_line(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    run_dir.experiment.write_text("name: digits\n")
    params = {"data": {"path": "digits", "global_batch_size": 64}, "optim": {"milestones": [30, 60]}, "note": "é" * 7000}
    tracker.start_run("sweep", "digits sweep", params=params, tags={"raydistill.commit": "abc123"})
    tracker.artifact("sweep", run_dir.experiment)
    tracker.start()
    stage = run_dir.trial("t1").stage("student").metrics
    tracker.start_run("trial/t1", "t1", parent_key="sweep", params={"scale.num_workers": 2})
    tracker.follow("trial/t1", stage, "")
    write_steps(stage, range(1500))
    tracker.metrics("trial/t1", 1500, {"top1_pct": np.float32(96.5), "reason": "a word, no number"}, time_ms=1_700_000_009_999)
    tracker.end_run("trial/t1", "FINISHED")
    tracker.end_run("sweep", "KILLED")
    delivery = tracker.close(60)

    assert (delivery.num_sent, delivery.num_pending) == (7 + 1500, 0)
    sweep_id, status, _ = run_of(runs_root, run_dir, "sweep")
    assert status == "KILLED"
    values = dict(query(runs_root, "SELECT key, value FROM params WHERE run_uuid = ?", sweep_id))
    assert values == {"data.path": "digits", "data.global_batch_size": "64", "optim.milestones": "[30, 60]", "note": "é" * 6000}
    trial_id, status, ended = run_of(runs_root, run_dir, "trial/t1")
    assert status == "FINISHED"
    assert abs(ended / 1000 - time.time()) < 60
    tags = dict(query(runs_root, "SELECT key, value FROM tags WHERE run_uuid IN (?, ?)", sweep_id, trial_id))
    assert tags["mlflow.parentRunId"] == sweep_id
    assert tags["raydistill.commit"] == tags["mlflow.source.git.commit"] == "abc123"
    expected = [(step, round(1 / (step + 1), 4), 1_700_000_000_000 + step) for step in range(1500)]
    assert metrics_of(runs_root, trial_id, "train/loss") == expected
    assert metrics_of(runs_root, trial_id, "top1_pct") == [(1500, 96.5, 1_700_000_009_999)]
    assert (runs_root / "mlartifacts" / sweep_id / "artifacts" / "experiment.yaml").read_text() == "name: digits\n"


def test_of_a_followed_file_each_epoch_is_sent_under_the_names_of_the_final_numbers(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    stage = run_dir.stage("student").metrics
    epoch = {
        "val/loss": 2.00004,
        "val/top1_pct": 94.0845,
        "epoch/train/loss": 0.5,
        "epoch/node0/cpu_pct": 50.04,
        "epoch/eval_s": 1.0,
    }
    append_line(stage, {"kind": "start", "step": 0, "time_ms": 1, "metrics": {"epochs": 2}})
    append_line(stage, {"kind": "step", "step": 5, "time_ms": 2, "metrics": {"train/loss": 1.0}})
    append_line(stage, {"kind": "resume", "step": 5, "time_ms": 3, "metrics": {}})
    append_line(stage, {"kind": "epoch", "step": 10, "time_ms": 4, "metrics": epoch})
    append_line(stage, {"kind": "summary", "step": 10, "time_ms": 5, "metrics": {"images_per_s": 8.0}})
    tracker.start_run("train", "run")
    tracker.follow("train", stage, "")
    tracker.metrics("train", 10, {"images_per_s": 8.0})
    tracker.end_run("train", "FINISHED")
    assert sync(run_dir).num_pending == 0
    run_id, _, _ = run_of(runs_root, run_dir, "train")
    sent = query(runs_root, "SELECT key, value FROM metrics WHERE run_uuid = ? ORDER BY key", run_id)
    assert dict(sent) == {
        "images_per_s": 8.0,
        "system/cpu_utilization_percentage": 50.0,
        "top1_pct": 94.08,
        "train/loss": 0.5,
        "val_loss": 2.0,
    }
    assert len(sent) == 5


def test_mlflows_compare_page_opens_on_the_first_metric_of_a_run_and_that_is_what_trials_are_compared_by(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    from mlflow import MlflowClient

    stage = run_dir.stage("student").metrics
    write_steps(stage, range(3))
    tracker.start_run("accurate", "its accuracy is known last", first_metric="top1_pct")
    tracker.follow("accurate", stage, "")
    assert sync(run_dir).num_pending == 0
    tracker.start_run("accurate", "resumed", first_metric="top1_pct")
    tracker.metrics("accurate", 3, {"data_pct": 1.0, "top1_pct": 50.0})
    tracker.start_run("timed", "all is known at its end")
    tracker.metrics("timed", 3, {"images_per_s": 100.0, "data_pct": 1.0})
    tracker.follow("timed", stage, "")
    for key in ("accurate", "timed"):
        tracker.end_run(key, "FINISHED")
    assert sync(run_dir).num_pending == 0
    client = MlflowClient(default_uri(runs_root))
    ids = {key: run_of(runs_root, run_dir, key)[0] for key in ("accurate", "timed")}
    metrics = {key: client.get_run(run_id).data.metrics for key, run_id in ids.items()}
    assert {key: next(iter(values)) for key, values in metrics.items()} == {"accurate": "top1_pct", "timed": "images_per_s"}
    assert metrics["accurate"]["top1_pct"] == 50.0
    history = client.get_metric_history(ids["accurate"], "top1_pct")
    assert [(point.step, str(point.value)) for point in history] == [(0, "nan"), (3, "50.0")]


def test_saved_views_are_written_once_and_never_over_what_a_user_has_made_of_them(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    from mlflow import MlflowClient

    views = [saved_views("trial", {key: key}, "top1_pct", ascending=False, has_accuracy=True) for key in ("lr", "lr", "seed")]
    same, again, other = ({f"mlflow.sharedViewState.{key}": value for key, value in each.items()} for each in views)
    assert same.keys() == again.keys()
    assert not same.keys() & other.keys()
    tracker.start_run("sweep", "run")
    tracker.views("sweep", views[0])
    assert sync(run_dir).num_pending == 0
    client = MlflowClient(default_uri(runs_root))
    experiment = Spool(run_dir).cursor(default_uri(runs_root)).experiment_id
    client.set_experiment_tag(experiment, next(iter(same)), "the user's own")
    tracker.views("sweep", views[1])
    tracker.views("sweep", views[2])
    assert sync(run_dir).num_pending == 0
    assert client.get_experiment(experiment).tags == same | other | {next(iter(same)): "the user's own"}
    page = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey="
    table, charts = views[2]
    assert compare_urls(run_dir) == [f"{page}{table}", f"{page}{charts}&compareRunsMode=CHART"]


def test_a_server_that_is_too_old_for_saved_views_gets_none_and_one_line_says_so(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
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
        tracker = Tracker(run_dir, f"http://127.0.0.1:{server.server_port}", "e")
        tracker.views("sweep", {"key": "{}"})
        assert sync(run_dir).num_pending == 0
        server.shutdown()
    assert caplog.text.count("has no saved views of the trials: they need MLflow 3.16, and it has 3.15.2") == 1
    assert compare_urls(run_dir) == []


def test_a_description_is_what_mlflow_shows_on_the_runs_page(runs_root: Path, run_dir: RunDir, tracker: Tracker) -> None:
    tracker.start_run("sweep", "run")
    tracker.end_run("sweep", "FINISHED")
    tracker.describe("sweep", ["best: trial 3", "it has the most images/s"])
    assert sync(run_dir).num_pending == 0
    run_id, _, _ = run_of(runs_root, run_dir, "sweep")
    tags = dict(query(runs_root, "SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
    assert tags["mlflow.note.content"] == "best: trial 3\n\nit has the most images/s"


def test_what_was_sent_is_sent_again_without_arriving_twice(runs_root: Path, run_dir: RunDir, tracker: Tracker) -> None:
    stage = run_dir.stage("student").metrics
    write_steps(stage, range(50))
    tracker.start_run("train", "run", params={"seed": 1}, tags={"a": "b"})
    tracker.follow("train", stage, "")
    tracker.metrics("train", 3, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "odd name (µs)!": 1.0})
    tracker.end_run("train", "FINISHED")
    assert sync(run_dir).num_pending == 0
    before = {table: query(runs_root, f"SELECT count(*) FROM {table}") for table in ("runs", "metrics", "params", "tags")}
    (run_dir.spool / "sent.json").unlink()
    assert sync(run_dir).num_sent == 54
    assert {table: query(runs_root, f"SELECT count(*) FROM {table}") for table in before} == before
    run_id, status, _ = run_of(runs_root, run_dir, "train")
    assert status == "FINISHED"
    stored = dict(
        query(
            runs_root,
            "SELECT key, value || ' ' || is_nan FROM metrics WHERE run_uuid = ? AND step = 3 AND key LIKE '%n%'",
            run_id,
        )
    )
    assert stored["nan"] == "0.0 1"
    assert stored["inf"].startswith("1.797")
    assert stored["minus"].startswith("-1.797")
    assert "odd name _µs__" in stored


def test_a_run_that_is_resumed_goes_on_in_the_same_mlflow_run(runs_root: Path, run_dir: RunDir) -> None:
    stage = run_dir.stage("student").metrics
    for part, status in ((range(10), "KILLED"), (range(10, 20), "FINISHED")):
        tracker = Tracker(run_dir, default_uri(runs_root), run_dir.root.name)
        tracker.start_run("train", "run", params={"seed": 1})
        tracker.follow("train", stage, "")
        write_steps(stage, part)
        with open(stage, "a") as file:
            file.write('{"kind": "step", "torn')  # the worker dies in the middle of a line
        tracker.end_run("train", status)  # type: ignore[arg-type]
        assert sync(run_dir).num_pending == 0
        run_id, stored, _ = run_of(runs_root, run_dir, "train")
        assert stored == status
        append_line(stage, {"kind": "start", "step": part.stop, "time_ms": 1, "metrics": {}})  # closes the torn line
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "train/loss")] == list(range(20))


def test_records_that_mlflow_refuses_are_set_aside_and_hold_up_nothing(
    runs_root: Path, run_dir: RunDir, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.start_run("train", "run", params={f"p{i}": i for i in range(150)})
    tracker.params("train", {"p7": "another value", "late": 1})
    tracker.metrics("train", 0, {"good": 1.0, "..": 2.0, "fine": 3.0})
    tracker.metrics("nobody", 0, {"lost": 1.0})
    append_line(run_dir.spool / "events.jsonl", {"op": "of a later version", "key": "train", "time_ms": 0})
    tracker.artifact("train", run_dir.root / "no such file")
    append_line(run_dir.stage("student").metrics, {"kind": "epoch", "step": "first", "time_ms": 0, "metrics": {}})
    tracker.follow("train", run_dir.stage("student").metrics, "")
    tracker.end_run("train", "FINISHED")
    delivery = sync(run_dir)
    assert delivery.num_pending == 0
    assert "but for 6 that it cannot take" in delivery.message
    run_id, status, _ = run_of(runs_root, run_dir, "train")
    assert status == "FINISHED"
    values = dict(query(runs_root, "SELECT key, value FROM params WHERE run_uuid = ?", run_id))
    assert len(values) == 151
    assert values["p7"] == "7"
    assert {name for (name,) in query(runs_root, "SELECT key FROM metrics WHERE run_uuid = ?", run_id)} == {"good", "fine"}
    refused = read_lines(run_dir.spool / "refused.jsonl")
    assert len(refused) == 6, refused
    assert all(record["reason"] and "\n" not in record["reason"] for record in refused)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not caplog.records[0].exc_info


def test_a_file_that_is_gone_has_a_reason_of_its_own_and_what_cannot_be_sent_does_not_count_as_sent(
    run_dir: RunDir, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    gone = run_dir.root / "no such file"
    tracker.start_run("train", "run")
    tracker.artifact("train", gone)
    append_line(run_dir.spool / "events.jsonl", {"op": "metrics", "key": "train"})
    assert sync(run_dir).num_sent == 1
    assert f"{gone} is gone: not sent" in caplog.text
    assert "MLflow refuses" not in caplog.text


def test_files_that_cannot_be_uploaded_hold_up_no_metric_and_arrive_once_they_can(
    runs_root: Path, run_dir: RunDir, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.start_run("train", "run")
    assert sync(run_dir).num_pending == 0
    run_id, _, _ = run_of(runs_root, run_dir, "train")
    folder = runs_root / "mlartifacts" / run_id
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file, so that no folder can be made here")
    run_dir.experiment.write_text("name: digits\n")
    run_dir.result.write_text("{}\n")
    for path in (run_dir.experiment, run_dir.result, run_dir.experiment):
        tracker.artifact("train", path)
    tracker.metrics("train", 1, {"loss": 1.0})
    tracker.end_run("train", "FINISHED")
    for _ in range(2):
        delivery = sync(run_dir, max_failures=1)
        assert delivery.num_pending == 2
        assert "metrics are sent" in delivery.message
        assert "; 2 artifacts wait: [Errno " in delivery.message
        assert delivery.message.endswith(f"; later: distill sync {run_dir.root}")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # one for each sender
    assert [(step, value) for step, value, _ in metrics_of(runs_root, run_id, "loss")] == [(1, 1.0)]
    assert run_of(runs_root, run_dir, "train")[1] == "FINISHED"
    folder.unlink()
    assert sync(run_dir).num_pending == 0
    assert sorted(path.name for path in (folder / "artifacts").iterdir()) == ["experiment.yaml", "result.json"]


def test_records_of_a_run_that_was_deleted_in_mlflow_arrive_once_it_is_restored(
    runs_root: Path, run_dir: RunDir, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(default_uri(runs_root))
    tracker.start_run("train", "run")
    assert sync(run_dir).num_pending == 0
    run_id, _, _ = run_of(runs_root, run_dir, "train")
    client.delete_run(run_id)
    tracker.start_run("train", "resumed")
    for step in range(30):
        tracker.metrics("train", step, {"loss": 1.0})
    tracker.end_run("train", "FINISHED")
    reason = f"run {run_id} (train) was deleted in MLflow: restore it there, then distill sync {run_dir.root}"
    for _ in range(2):
        delivery = sync(run_dir)
        assert delivery.num_pending == 0
        assert delivery.message.endswith(f", but for 32 that it cannot take, which are in {Spool(run_dir).refused}: {reason}")
        refused = read_lines(run_dir.spool / "refused.jsonl")
        assert len(refused) == 32
        assert {record["reason"] for record in refused} == {reason}
    assert caplog.text.count(reason) == 2  # once for each time that it was tried
    client.restore_run(run_id)
    delivery = sync(run_dir)
    assert delivery.message == f"MLflow was sent every record ({default_uri(runs_root)})"
    assert not (run_dir.spool / "refused.jsonl").exists()
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "loss")] == list(range(30))
    assert run_of(runs_root, run_dir, "train")[1] == "FINISHED"


def test_records_of_an_experiment_that_was_deleted_in_mlflow_arrive_with_the_next_sync_which_says_that_it_restores_it(
    runs_root: Path, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    uri, name = default_uri(runs_root), run_dir.root.name
    tracker = Tracker(run_dir, uri, name, poll_s=0.05)
    tracker.start_run("sweep", "sweep")
    tracker.start()
    wait_until(lambda: bool(Spool(run_dir).cursor(uri).runs))
    client = MlflowClient(uri)
    client.delete_experiment(Spool(run_dir).cursor(uri).experiment_id)
    for trial in ("trial/0", "trial/1"):
        tracker.start_run(trial, trial, parent_key="sweep")
        tracker.metrics(trial, 1, {"loss": 1.0})
    delivery = tracker.close(60)
    reason = f"experiment {name!r} was deleted in MLflow: distill sync {run_dir.root} restores it, with its runs"
    assert delivery.message.endswith(f"but for 4 that it cannot take, which are in {Spool(run_dir).refused}: {reason}")
    assert caplog.text.count(reason) == 1
    assert sync(run_dir).message == f"MLflow was sent every record ({uri})"
    assert f"experiment {name!r} had been deleted in MLflow: it is restored, with its runs" in caplog.text
    for trial in ("trial/0", "trial/1"):
        assert len(metrics_of(runs_root, run_of(runs_root, run_dir, trial)[0], "loss")) == 1


def test_a_run_that_is_gone_from_mlflow_for_good_can_be_sent_as_a_new_one(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    tracker.start_run("train", "run")
    tracker.metrics("train", 1, {"loss": 1.0})
    assert sync(run_dir).num_pending == 0
    run_id, _, _ = run_of(runs_root, run_dir, "train")
    with contextlib.closing(sqlite3.connect(runs_root / "mlflow.db", timeout=20)) as store, store:
        for table in ("metrics", "latest_metrics", "tags", "runs"):  # as `mlflow gc` does
            store.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))
    tracker.metrics("train", 2, {"loss": 0.5})
    instead = (
        f"remove sent.json and refused.jsonl in {run_dir.spool}, and distill sync {run_dir.root} sends everything as a new one"
    )
    assert sync(run_dir).message.endswith(f"run {run_id} (train) is gone from MLflow for good: {instead}")
    for name in ("sent.json", "refused.jsonl"):
        (run_dir.spool / name).unlink()
    assert sync(run_dir).message == f"MLflow was sent every record ({default_uri(runs_root)})"
    assert [step for step, _, _ in metrics_of(runs_root, run_of(runs_root, run_dir, "train")[0], "loss")] == [1, 2]


def test_a_sync_with_nothing_left_to_send_asks_nothing_of_the_store_and_says_one_thing(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    Tracker(run_dir, "http://127.0.0.1:9", "e")
    assert sync(run_dir) == (0, 0, "MLflow was sent every record (http://127.0.0.1:9)")
    assert not caplog.records


def test_a_retry_of_refused_records_that_fails_midway_doubles_and_hides_none_of_them(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    tracker.start_run("train", "run")
    assert sync(run_dir).num_pending == 0
    run_id, _, _ = run_of(runs_root, run_dir, "train")
    row = {"kind": "params", "reason": "the server was older"}
    refused = [{"key": key, "row": [key, "1"], **row} for key in ("nobody", "train", "no one")]
    append_lines(Spool(run_dir).refused, refused)
    query(runs_root, "ALTER TABLE params RENAME TO elsewhere")
    try:
        for _ in range(2):
            delivery = sync(run_dir, max_failures=1)
            assert delivery.num_pending == 3
            assert delivery.message.startswith("3 records wait on disk: ")
            assert delivery.message.endswith(f"; later: distill sync {run_dir.root}")
            assert read_lines(Spool(run_dir).refused) == refused
    finally:
        query(runs_root, "ALTER TABLE elsewhere RENAME TO params")
    delivery = sync(run_dir)
    assert delivery.num_pending == 0
    assert f"but for 2 that it cannot take, which are in {Spool(run_dir).refused}" in delivery.message
    assert [record["key"] for record in read_lines(Spool(run_dir).refused)] == ["nobody", "no one"]
    assert query(runs_root, "SELECT value FROM params WHERE run_uuid = ?", run_id) == [("1",)]
    assert [path.name for path in run_dir.spool.glob("refused*")] == ["refused.jsonl"]


def test_refused_records_wait_where_the_store_that_they_are_sent_to_again_is_away(run_dir: RunDir) -> None:
    Tracker(run_dir, "http://127.0.0.1:1", "refused")
    append_line(Spool(run_dir).refused, {"key": "train", "kind": "params", "row": ["a", "1"], "reason": "its reason"})
    delivery = sync(run_dir, max_failures=1)
    assert delivery.num_pending == 1
    assert "1 record waits on disk: " in delivery.message
    assert " takes no records now (" in delivery.message
    assert delivery.message.endswith(f"; later: distill sync {run_dir.root}")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to a process")
def test_training_goes_before_delivery(tracker: Tracker, thread_priorities: list[tuple[int, ...]]) -> None:
    tracker.start()
    tracker.close(60)
    assert thread_priorities == [(os.PRIO_PROCESS, tracker._thread.native_id, 19)]


def test_a_locked_database_is_a_reason_to_wait(runs_root: Path, run_dir: RunDir, tracker: Tracker) -> None:
    tracker.start_run("train", "run")
    with contextlib.closing(sqlite3.connect(runs_root / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        tracker.start()
        began = time.perf_counter()
        tracker.metrics("train", 1, {"loss": 1.0})
        assert time.perf_counter() - began < 1.0
        time.sleep(2)
        other.execute("ROLLBACK")
    assert tracker.close(60).num_pending == 0
    run_of(runs_root, run_dir, "train")


SEND = """
import sys
from pathlib import Path
from service.tracking import sync
from trainables.rundir import RunDir
print(sync(RunDir(Path(sys.argv[1]))), flush=True)
"""

RECORD = """
import os, sys
from pathlib import Path
from service.tracking import Tracker, default_uri
from trainables.rundir import RunDir
os.setpriority = lambda *arguments: None  # as `thread_priorities` has it
root, name = Path(sys.argv[1]), sys.argv[2]
tracker = Tracker(RunDir(root / name), default_uri(root), "both", poll_s=0.01)
tracker.start()
tracker.start_run("sweep", name)
for step in range(200):
    tracker.metrics("sweep", step, {"loss": step})
tracker.end_run("sweep", "FINISHED")
delivery = tracker.close(1000)
assert delivery.num_pending == 0, delivery
"""


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, **options)


def test_a_sender_that_is_killed_in_the_middle_loses_and_doubles_nothing(
    runs_root: Path, run_dir: RunDir, tracker: Tracker
) -> None:
    num_steps = 8_000
    stage = run_dir.stage("student").metrics
    write_steps(stage, range(num_steps))
    tracker.start_run("train", "run")
    tracker.follow("train", stage, "")
    tracker.end_run("train", "FINISHED")

    def num_pending() -> int:
        return Spool(run_dir).num_pending(default_uri(runs_root))

    for _ in range(2):
        process, before = python(SEND, str(run_dir.root)), min(num_pending(), num_steps)
        wait_until(lambda before=before: num_pending() < before)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)  # most likely inside a later request
        process.wait()
    assert 0 < num_pending() < num_steps
    assert sync(run_dir).num_pending == 0
    run_id, status, _ = run_of(runs_root, run_dir, "train")
    assert status == "FINISHED"
    assert [step for step, _, _ in metrics_of(runs_root, run_id, "train/loss")] == list(range(num_steps))
    assert len(metrics_of(runs_root, run_id, "images_per_s")) == num_steps


def test_two_sweeps_that_start_at_once_on_a_store_that_does_not_exist_lose_nothing(tmp_path: Path) -> None:
    processes = [python(RECORD, str(tmp_path), name) for name in ("one", "two")]
    assert [process.wait() for process in processes] == [0, 0]
    counted = query(tmp_path, "SELECT r.name, count(*), max(m.step) FROM runs r JOIN metrics m USING (run_uuid) GROUP BY r.name")
    assert sorted(counted) == [("one", 200, 199), ("two", 200, 199)]
    assert query(tmp_path, "SELECT count(*) FROM experiments WHERE name = 'both'") == [(1,)]
    assert query(tmp_path, "SELECT status FROM runs") == [("FINISHED",), ("FINISHED",)]


def test_only_one_process_sends_a_spool(run_dir: RunDir, tracker: Tracker) -> None:
    tracker.start_run("train", "run")
    with Spool(run_dir).sender_lock() as acquired:
        assert acquired
        delivery = sync(run_dir)
        assert (delivery.num_sent, delivery.num_pending) == (0, 1)
        assert "another process" in delivery.message
        tracker.start()
        assert tracker.close(0.5).num_pending == 1
    assert sync(run_dir).num_pending == 0


def test_what_was_begun_and_how_it_ended_is_known_without_the_store(run_dir: RunDir, tracker: Tracker) -> None:
    for key in ("sweep", "trial/0", "trial/1"):
        tracker.start_run(key, key)
    tracker.end_run("trial/0", "FINISHED")
    tracker.end_run("trial/1", "KILLED")
    assert tracker.runs() == {"sweep": None, "trial/0": "FINISHED", "trial/1": "KILLED"}
    tracker.start_run("trial/1", "again")
    assert tracker.runs()["trial/1"] is None


def test_recording_never_raises_even_where_the_spool_cannot_be_written(
    run_dir: RunDir, tracker: Tracker, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir.spool / "events.jsonl").mkdir()
    tracker.start_run("train", "run")
    tracker.metrics("train", 1, {"loss": 1.0})
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(run_dir: RunDir, tracker: Tracker) -> None:
    tracker.start_run("train", "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    events = run_dir.spool / "events.jsonl"
    resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size + 20, hard))  # a line is cut off, as on a full disk
    try:
        tracker.metrics("train", 1, {"loss": 1.0})
        tracker.metrics("train", 2, {"loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["op"] for line in read_lines(events)] == ["run"]
    tracker.end_run("train", "FINISHED")
    assert [(line["op"], line.get("step")) for line in read_lines(events)] == [
        ("run", None),
        ("metrics", 1),
        ("metrics", 2),
        ("end", None),
    ]


def test_what_the_disk_has_not_taken_when_a_run_ends_is_pending(run_dir: RunDir, tracker: Tracker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        tracker.start_run("train", "run")
        tracker.end_run("train", "FINISHED")
        delivery = tracker.close(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert delivery.num_pending == 2
    assert delivery.message.startswith(f"2 records are lost: {run_dir.spool / 'events.jsonl'} could not be written")


def test_a_sender_without_a_store_waits_and_says_so_once_with_no_stack_trace(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(run_dir, "http://user:secret@127.0.0.1:9", "e")
    tracker.start_run("train", "run")
    target = Target(spool_id="id", uri="http://user:secret@127.0.0.1:9", experiment="e")
    sender = Sender(Spool(run_dir), target, "s3://bucket/run")
    assert [sender.try_deliver() for _ in range(3)] == [False] * 3
    delivery = sender.summary()
    assert (delivery.num_sent, delivery.num_pending) == (0, 1)
    assert delivery.message.endswith("; later: distill sync s3://bucket/run")
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text + delivery.message
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/x", "ftp://host/x", "", "sqlite:////tmp/a%20b/mlflow.db"])
def test_a_uri_that_mlflow_cannot_write_to_is_refused_in_one_line(run_dir: RunDir, uri: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        Tracker(run_dir, uri, "e")
    assert "\n" not in str(caught.value)


def test_a_relative_sqlite_path_is_made_absolute(run_dir: RunDir) -> None:
    Tracker(run_dir, "sqlite:///some.db", "e")
    target = Spool(run_dir).target()
    assert target is not None
    assert target.uri == f"sqlite:///{os.getcwd()}/some.db"


EXIT = """
import sys, time
from pathlib import Path
from service.tracking import Tracker
from trainables.rundir import RunDir
tracker = Tracker(RunDir(Path(sys.argv[1])), sys.argv[2], "e")
tracker.start_run("train", "run")
tracker.start()
sys.stdin.readline()
began = time.monotonic()
delivery = tracker.close(0.5)
assert delivery.num_pending == 1, delivery
print(time.monotonic() - began)
"""


def test_a_server_that_never_answers_keeps_neither_close_nor_the_interpreter_waiting(run_dir: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        port = silent.getsockname()[1]
        process = python(EXIT, str(run_dir.root), f"http://127.0.0.1:{port}", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(10)  # the request is on its way, and stays so
            began = time.monotonic()
            out, _ = process.communicate("go\n", timeout=30)
            assert process.returncode == 0
            assert 0.5 <= float(out) < 5.0
            assert time.monotonic() - began < 20.0


def test_a_moved_run_directory_can_still_be_sent(runs_root: Path, run_dir: RunDir, tracker: Tracker) -> None:
    write_steps(run_dir.stage("student").metrics, range(5))
    tracker.start_run("train", "run")
    tracker.follow("train", run_dir.stage("student").metrics, "")
    tracker.end_run("train", "FINISHED")
    moved = RunDir(run_dir.root.with_name(run_dir.root.name + " moved"))
    run_dir.root.rename(moved.root)
    assert sync(moved).num_pending == 0
    run_id, _, _ = run_of(runs_root, moved, "train")
    assert len(metrics_of(runs_root, run_id, "train/loss")) == 5


def test_nothing_is_sent_to_the_makers_of_mlflow() -> None:
    code = """
import os
import service.tracking.sender as sender
os.environ.update(sender.CLIENT_ENVIRONMENT)
import service.tracking.mlflow_store
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


def test_what_an_earlier_run_could_not_deliver_arrives_with_the_next_runs_contact(
    tracker: Tracker, run_dir: RunDir, runs_root: Path
) -> None:
    tracker.start_run("train", "earlier")
    tracker.metrics("train", 1, {"loss": 0.5})
    tracker.end_run("train", "FINISHED")
    broken = RunDir(run_dir.root.with_name(f"{run_dir.root.name}-broken"))
    Tracker(broken, default_uri(runs_root), run_dir.root.name)
    (broken.spool / "events.jsonl").mkdir()
    later = RunDir(run_dir.root.with_name(f"{run_dir.root.name}-later"))
    Tracker(later, default_uri(runs_root), run_dir.root.name)
    assert run_dir.root in sync_neighbours(runs_root, later, 0.0)[1], "there was no time for it"
    assert run_dir.root in sync_neighbours(runs_root, later, 60.0)[0]
    assert Spool(run_dir).num_pending(default_uri(runs_root)) == 0
    assert run_dir.root not in sync_neighbours(runs_root, later, 0.0)[1]


def test_a_delivery_whose_time_has_passed_begins_no_further_request_and_says_what_sends_the_rest(
    tracker: Tracker, run_dir: RunDir, runs_root: Path
) -> None:
    tracker.start_run("train", "long")
    tracker.metrics("train", 1, {"loss": 0.5})
    delivery = sync(run_dir, max_failures=1, until_s=time.monotonic())
    assert delivery[:2] == (0, 2)
    assert delivery.message.endswith(f"later: distill sync {run_dir.root}")
    assert sync(run_dir).num_pending == 0
    assert len(metrics_of(runs_root, run_of(runs_root, run_dir, "train")[0], "loss")) == 1


OTHER_VERSIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "target.json": lambda values: {**values, "version": 2},
    "sent.json": lambda values: {"version": 2, "stores": []},
    "events.jsonl": lambda values: {"operation": "run"},
}


@pytest.mark.parametrize("name", OTHER_VERSIONS)
def test_a_neighbour_of_a_newer_version_is_no_reason_to_fail(
    name: str, tracker: Tracker, run_dir: RunDir, runs_root: Path
) -> None:
    tracker.start_run("train", "earlier")
    tracker.end_run("train", "FINISHED")
    assert sync(run_dir).num_pending == 0
    experiment_id = Spool(run_dir).cursor(default_uri(runs_root)).experiment_id
    path = run_dir.spool / name
    values = json.loads(path.read_text().splitlines()[0] if name == "events.jsonl" else path.read_text())
    path.write_text(json.dumps(OTHER_VERSIONS[name](values)) + "\n")
    later = RunDir(run_dir.root.with_name(f"{run_dir.root.name}-later"))
    Tracker(later, default_uri(runs_root), run_dir.root.name)
    sync_neighbours(runs_root, later, 60.0)
    assert query(runs_root, "SELECT count(*) FROM runs WHERE name = 'earlier' AND experiment_id = ?", experiment_id) == [(1,)]


def test_keys_that_another_version_has_written_are_left_out(tracker: Tracker, run_dir: RunDir) -> None:
    tracker.start_run("train", "run")
    assert sync(run_dir).num_sent == 1
    for name in ("target.json", "sent.json"):
        values = json.loads((run_dir.spool / name).read_text())
        inner = next((cursor for cursor in values.values() if isinstance(cursor, dict)), values)
        inner["of_another_version"] = 1
        (run_dir.spool / name).write_text(json.dumps(values))
    assert sync(run_dir)[:2] == (0, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spool_id": "a", "uri": "sqlite:////a.db"}', '{"spool_id'])
def test_a_damaged_target_ends_in_one_line_and_doubles_no_run(text: str, tracker: Tracker, run_dir: RunDir) -> None:
    target = run_dir.spool / "target.json"
    target.write_text(text)
    for act in (lambda: sync(run_dir), lambda: Tracker(run_dir, "sqlite:////a.db", "e")):
        with pytest.raises(ExperimentError, match="put back a copy, or remove it to send everything anew") as caught:
            act()
        assert str(caught.value).startswith(f"{target} is damaged")
        assert "\n" not in str(caught.value)
