"""Tracking against a real MLflow server that is away, slow, cut off and killed."""

import contextlib
import html
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import socketserver
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.config.experiment import load
from service.runs.session import views_of
from service.tracking import Tracker, compare_urls, default_uri, sync
from service.tracking.sender import NO_TELEMETRY
from service.tracking.spool import Spool
from service.tracking.tracker import check_store
from tests.service.tracking.conftest import thread_priorities  # noqa: F401 (a fixture for every test)
from tests.waiting import wait_until
from trainables.errors import ExperimentError
from trainables.rundir import RunDir

pytestmark = pytest.mark.integration
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """Below those that the system gives to whoever connects: none of them takes it before the server does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """A real `mlflow server` on loopback that can be killed and started again on its store."""

    def __init__(self, root: Path, artifacts: tuple[str, ...] | None = None):
        """`artifacts`: options that say where artifacts go."""
        self.root, self.port = root, free_port()
        self._artifacts = artifacts or ("--artifacts-destination", str(root / "artifacts"))
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once; `ready` waits."""
        options = [
            "--backend-store-uri",
            default_uri(self.root),
            *self._artifacts,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        environment = {**os.environ, **NO_TELEMETRY, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.root / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *options],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=self.root,
                start_new_session=True,
            )

    def ready(self) -> None:
        process = self._process
        assert process is not None
        wait_until(lambda: answers(f"{self.uri}/health") or process.poll() is not None)
        assert process.poll() is None, (self.root / "server.log").read_text()

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.root / "mlflow.db", timeout=20)) as store:
            return store.execute(sql, values).fetchall()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from service.tracking.mlflow_store import create_database

    server = Server(tmp_path_factory.mktemp("server"))
    create_database(server.root / "mlflow.db", (server.root / "artifacts").as_uri())
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def running(server: Server) -> Server:
    if not answers(f"{server.uri}/health"):
        server.kill()
        server.start()
        server.ready()
    return server


class Proxy(socketserver.ThreadingTCPServer):
    """Stands before a server: makes each answer late, loses the answers to some requests, or holds some requests back."""

    daemon_threads = True

    def __init__(self, upstream_port: int):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream_port = upstream_port
        self.delay_s = 0.0
        self.lose_answer_to: bytes | None = None
        self.hold: bytes | None = None
        self.release = threading.Event()
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        proxy: Proxy = self.server  # type: ignore[assignment]
        client: socket.socket = self.request
        lose, fresh, sources = False, False, [client]
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            upstream = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.upstream_port)))
            sources.append(upstream)
            while True:
                for source in select.select(sources, [], [])[0]:
                    data = source.recv(1 << 16)
                    if source is client:
                        if not data:
                            sources.remove(client)
                            continue
                        fresh = True
                        if proxy.lose_answer_to and proxy.lose_answer_to in data:
                            proxy.lose_answer_to, lose = None, True
                        if proxy.hold and proxy.hold in data:
                            proxy.hold = None
                            proxy.release.wait(60)
                            sources.remove(upstream)  # the server closes a connection that is idle for 5 s
                            upstream = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.upstream_port)))
                            sources.append(upstream)
                        upstream.sendall(data)
                        continue
                    if not data or lose or client not in sources:
                        return
                    if fresh:
                        time.sleep(proxy.delay_s)
                        fresh = False
                    client.sendall(data)


@pytest.fixture
def proxy(running: Server) -> Iterator[Proxy]:
    with Proxy(running.port) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.release.set()
        proxy.shutdown()


def write_steps(path: Path, steps: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        for step in steps:
            record = {
                "kind": "epoch",
                "stage": "student",
                "step": step,
                "epoch": 0.5,
                "time_ms": 1_700_000_000_000 + step,
                "metrics": {"epoch/train/loss": 1 / (step + 1), "epoch/images_per_s": 100.0 + step},
            }
            file.write(json.dumps(record) + "\n")


def steps_of(server: Server, run_name: str, metric: str) -> list[int]:
    """Steps in the order in which the store took them, over all runs of the name that are not deleted."""
    sql = """SELECT m.step FROM metrics m JOIN runs r USING (run_uuid)
        WHERE r.name = ? AND r.lifecycle_stage = 'active' AND m.key = ? ORDER BY m.rowid"""
    return [step for (step,) in server.query(sql, run_name, metric)]


def runs_named(server: Server, name: str) -> list[tuple[str, str]]:
    return server.query("SELECT status, lifecycle_stage FROM runs WHERE name = ? ORDER BY lifecycle_stage", name)


def test_a_server_that_is_away_and_then_killed_gets_every_record_once_in_order(server: Server, tmp_path: Path) -> None:
    num_steps = 8_000
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, server.uri, "killed", poll_s=0.05)
    server.kill()
    tracker.start()
    tracker.start_run("train", "killed", params={"seed": 1})
    tracker.follow("train", run_dir.stage("student").metrics, "")
    write_steps(run_dir.stage("student").metrics, range(num_steps))
    for step in range(300):
        tracker.metrics("train", step, {"driver": step})
    assert Spool(run_dir).num_pending(server.uri) == 302 + num_steps
    server.start()
    wait_until(lambda: bool(steps_of(server, "killed", "train/loss")))
    server.kill()
    assert 0 < len(steps_of(server, "killed", "train/loss")) < num_steps
    server.start()
    for step in range(300, 400):
        tracker.metrics("train", step, {"driver": step})
    tracker.end_run("train", "FINISHED")
    delivery = tracker.close(120)

    assert (delivery.num_sent, delivery.num_pending) == (403 + num_steps, 0)
    assert runs_named(server, "killed") == [("FINISHED", "active")]
    assert steps_of(server, "killed", "train/loss") == list(range(num_steps))
    assert steps_of(server, "killed", "images_per_s") == list(range(num_steps))
    assert steps_of(server, "killed", "driver") == list(range(400))


@pytest.mark.slow
def test_a_server_that_takes_ten_seconds_an_answer_slows_no_one(running: Server, proxy: Proxy, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, proxy.uri, "slow", poll_s=0.05)
    tracker.start_run("train", "slow")
    proxy.delay_s = 10.0
    tracker.start()
    times_s = []
    for step in range(400):
        began = time.perf_counter()
        tracker.metrics("train", step, {"loss": step})
        times_s.append(time.perf_counter() - began)
        time.sleep(0.01)
    assert statistics.median(times_s) < 0.02
    assert max(times_s) < 1.0
    began = time.perf_counter()
    assert tracker.close(0.5).num_pending == 401
    assert time.perf_counter() - began < 2.0
    proxy.delay_s = 0.0
    wait_until(lambda: sync(run_dir).num_pending == 0)
    assert runs_named(running, "slow") == [("RUNNING", "active")]
    assert steps_of(running, "slow", "loss") == list(range(400))


def test_a_run_whose_creation_was_never_answered_is_not_created_twice(running: Server, proxy: Proxy, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, proxy.uri, "lost", poll_s=0.05)
    tracker.start_run("train", "answer lost", params={"seed": 1})
    tracker.end_run("train", "FINISHED")
    proxy.lose_answer_to = b"/runs/create"
    tracker.start()
    assert tracker.close(60).num_pending == 0
    assert proxy.lose_answer_to is None
    assert runs_named(running, "answer lost") == [("FINISHED", "active")]


def test_the_first_metric_of_a_run_stays_the_first_where_the_request_behind_its_creation_fails(
    running: Server, proxy: Proxy, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, proxy.uri, "first", poll_s=0.05)
    tracker.start_run("train", "first", params={"seed": 1}, first_metric="top1_pct")
    tracker.metrics("train", 1, {"data_pct": 1.0})
    proxy.lose_answer_to = b"/runs/log-batch"
    tracker.start()
    assert tracker.close(60).num_pending == 0
    assert proxy.lose_answer_to is None
    [(run_id,)] = running.query("SELECT run_uuid FROM runs WHERE name = 'first'")
    assert list(MlflowClient(running.uri).get_run(run_id).data.metrics) == ["top1_pct", "data_pct"]


def test_a_server_that_has_nowhere_to_put_files_gets_every_metric(tmp_path: Path) -> None:
    from service.tracking.mlflow_store import create_database

    (tmp_path / "file").touch()
    nowhere = (tmp_path / "file" / "mlruns").as_uri()  # as /mlruns is for all but root
    create_database(tmp_path / "mlflow.db", nowhere)
    server = Server(tmp_path, ("--no-serve-artifacts", "--default-artifact-root", nowhere))
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, server.uri, "nowhere", poll_s=0.05)
    run_dir.experiment.write_text("name: digits\n")
    try:
        server.start()
        server.ready()
        tracker.start_run("train", "nowhere")
        tracker.artifact("train", run_dir.experiment)
        tracker.follow("train", run_dir.stage("student").metrics, "")
        write_steps(run_dir.stage("student").metrics, range(100))
        tracker.model("train", write_checkpoint(run_dir))
        tracker.end_run("train", "FINISHED")
        tracker.start()
        wait_until(lambda: runs_named(server, "nowhere") == [("FINISHED", "active")])
        delivery = tracker.close(5)
    finally:
        server.kill()
    assert steps_of(server, "nowhere", "train/loss") == list(range(100))
    assert delivery.num_pending == 2
    assert "metrics are sent" in delivery.message
    assert "2 artifacts wait: " in delivery.message


def test_a_creation_that_a_server_gets_to_only_after_its_repetition_leaves_one_run(
    running: Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, proxy.uri, "late", poll_s=0.05)
    tracker.start_run("train", "late")
    proxy.hold = b"/runs/create"
    tracker.start()
    wait_until(lambda: len(runs_named(running, "late")) == 1)
    proxy.release.set()
    wait_until(lambda: len(runs_named(running, "late")) >= 2)  # a slow machine's repetition may be late, too, and repeated
    tracker.metrics("train", 1, {"loss": 1.0})
    tracker.end_run("train", "FINISHED")
    assert tracker.close(60).num_pending == 0
    one, *twins = runs_named(running, "late")
    assert one == ("FINISHED", "active")
    assert set(twins) == {("RUNNING", "deleted")}
    assert steps_of(running, "late", "loss") == [1]


def test_numbers_that_are_not_finite_artifacts_and_a_model_arrive_over_http(running: Server, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, running.uri, "all", poll_s=0.05)
    run_dir.experiment.write_text("name: digits\n")
    tracker.start_run("train", "all", params={"p": "é" * 6001})
    tracker.metrics("train", 1, {"nan": float("nan"), "inf": float("inf"), "one": 1.0})
    tracker.artifact("train", run_dir.experiment)
    tracker.model("train", write_checkpoint(run_dir))
    tracker.end_run("train", "FINISHED")
    for _ in range(2):
        assert sync(run_dir).num_pending == 0
        (run_dir.spool / "sent.json").unlink()
    assert not (run_dir.spool / "refused.jsonl").exists()
    stored = running.query(
        "SELECT key, value, is_nan FROM metrics m JOIN runs r USING (run_uuid) WHERE r.name = 'all' ORDER BY key"
    )
    assert stored == [("inf", sys.float_info.max, 0), ("nan", 0.0, 1), ("one", 1.0, 0)]
    assert running.query("SELECT count(*), min(status) FROM logged_models") == [(1, 2)]
    assert [path.read_text() for path in running.root.rglob("experiment.yaml")] == ["name: digits\n"]
    assert len(list(running.root.rglob("student.safetensors"))) == 1


def text_of(url: str, profile: Path) -> str:
    """A page's text once its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=2000,1800"]
    command = [str(BROWSER), *options, "--virtual-time-budget=60000", "--dump-dom", url]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.S))))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_sweep_opens_in_a_browser_as_a_table_with_the_best_trial_first_and_as_charts(running: Server, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "sweep")
    tracker = Tracker(run_dir, running.uri, "digits")
    keys = ("sweep.metric=top1_pct", "sweep.space={scale.num_workers: [1, 2, 4], optim.lr: [0.1]}")
    tracker.start_run("sweep", "the sweep", tags={"raydistill.kind": "sweep"})
    tracker.views("sweep", views_of("sweep", load("digits", keys).experiment))
    for number, (speed, accuracy) in enumerate([(1001.5, 81.25), (2002.5, 94.08), (3003.5, 72.5)]):
        key, params = f"trial/{number}", {"scale.num_workers": 2**number, "optim.lr": 0.1, "seed": 1}
        tracker.start_run(key, f"{number:03d} workers", parent_key="sweep", params=params, tags={"raydistill.kind": "trial"})
        tracker.dataset(key, {"name": "digits", "digest": "cafe", "source_type": "local", "source": "{}", "profile": "{}"})
        tracker.metrics(
            key, 9, {"loader/batch_ms": 1.0, "images_per_s": speed, "top1_pct": accuracy, "epoch_s": 5.5, "data_pct": 7.7}
        )
        tracker.end_run(key, "FINISHED")
    tracker.end_run("sweep", "FINISHED")
    assert sync(run_dir).num_pending == 0
    table, charts = (text_of(url, tmp_path / "profile") for url in compare_urls(run_dir, running.uri))
    assert "Trials by workers, lr" in table
    for column in ("images_per_s", "top1_pct", "epoch_s", "data_pct", "scale.num_workers", "optim.lr", "Dataset"):
        assert column in table
    assert "the sweep" not in table
    assert table.index("001 workers") < table.index("000 workers") < table.index("002 workers")
    for value in ("2002.5", "94.08", "5.5", "7.7", "digits (cafe)"):
        assert value in table
    assert "Charts by workers, lr" in charts
    assert charts.index("Trials (4)") < charts.index("loader (1)")
    for value in ("1001.50", "2002.50", "3003.50", "81.25", "94.08", "72.50"):  # of bars
        assert value in charts
    assert "images_per_s vs. top1_pct" in charts
    assert charts.index("Parallel Coordinates") < charts.rindex("optim.lr") < charts.rindex("loader (1)")


def write_checkpoint(run_dir: RunDir) -> Path:
    from safetensors.torch import save_file

    from trainables.models.registry import build_model

    about = {
        "model": "resnet8",
        "num_classes": 3,
        "image_size": 8,
        "classes": ["a", "b", "c"],
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
    }
    state = build_model("resnet8", num_classes=3, image_size=8, seed=5).state_dict()
    path = run_dir.stage("student").best
    path.parent.mkdir(parents=True)
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, path, metadata={"raydistill": json.dumps(about)})
    return path


def test_the_check_before_a_run_changes_nothing_and_names_a_host_that_a_server_does_not_answer_to(running: Server) -> None:
    from mlflow import MlflowClient

    MlflowClient(running.uri).create_experiment("known")
    before = running.query("SELECT * FROM experiments ORDER BY experiment_id")
    for experiment in ("known", "unknown"):
        check_store(running.uri, experiment)
    assert running.query("SELECT * FROM experiments ORDER BY experiment_id") == before
    with pytest.raises(ExperimentError, match=f"start it with `mlflow server --allowed-hosts 127.1:{running.port}`"):
        check_store(f"http://127.1:{running.port}", "known")


@pytest.mark.slow
def test_a_logged_student_is_served_over_http(running: Server, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tracker = Tracker(run_dir, running.uri, "served")
    tracker.start_run("train", "served")
    tracker.model("train", write_checkpoint(run_dir))
    assert sync(run_dir).num_pending == 0
    sql = "SELECT m.model_id FROM logged_models m JOIN runs r ON r.run_uuid = m.source_run_id WHERE r.name = 'served'"
    [(model_id,)] = running.query(sql)
    port = free_port()
    command = [
        "models",
        "serve",
        "-m",
        f"models:/{model_id}",
        "--env-manager",
        "local",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # `mlflow models serve` finds uvicorn by PATH, as in an activated environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **NO_TELEMETRY, "MLFLOW_TRACKING_URI": running.uri, "PATH": path}
    process = subprocess.Popen([sys.executable, "-m", "mlflow", *command], env=environment, cwd=tmp_path, start_new_session=True)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/ping"))
        images_BCHW = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8))
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            json.dumps({"inputs": images_BCHW.tolist()}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            probabilities_BK = np.array(json.load(response)["predictions"])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert probabilities_BK.shape == (4, 3)
    np.testing.assert_allclose(probabilities_BK.sum(axis=1), 1, atol=1e-5)
