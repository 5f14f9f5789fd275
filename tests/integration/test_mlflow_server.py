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
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.runs.events import event
from service.runs.mlflow_view import MlflowView
from service.tracking.run_view import state_path
from service.tracking.stores import NO_TELEMETRY, check_store, compare_urls, default_uri
from service.tracking.sync import sync
from tests.service.tracking.conftest import thread_priorities  # noqa: F401 (a fixture for every test)
from tests.service.tracking.store import Run, epoch, row
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
    from service.tracking.sender import create_database

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
    """Stands before a server: counts requests, makes each answer late, loses the answers to some, or holds some back."""

    daemon_threads = True

    def __init__(self, upstream_port: int):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream_port = upstream_port
        self.delay_s = 0.0
        self.lose_answer_to: bytes | None = None
        self.hold: bytes | None = None
        self.release = threading.Event()
        self.when_passed: Callable[[], None] = lambda: None
        """Called in a connection's thread each time that the server has got (a part of) a request."""
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
                        proxy.when_passed()
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


def steps_of(server: Server, run_name: str, metric: str) -> list[int]:
    """Steps in the order in which the store took them, over all runs of the name that are not deleted."""
    sql = """SELECT m.step FROM metrics m JOIN runs r USING (run_uuid)
        WHERE r.name = ? AND r.lifecycle_stage = 'active' AND m.key = ? ORDER BY m.rowid"""
    return [step for (step,) in server.query(sql, run_name, metric)]


def runs_named(server: Server, name: str) -> list[tuple[str, str]]:
    return server.query("SELECT status, lifecycle_stage FROM runs WHERE name = ? ORDER BY lifecycle_stage", name)


def run_at(uri: str, folder: Path, kind: str = "train", *changes: str) -> Run:
    """A run whose MLflow is at `uri`, with one of its experiments to itself."""
    return Run(RunDir(folder), uri, kind, changes)  # type: ignore[arg-type]


def test_a_server_that_is_away_and_then_killed_gets_every_epoch_once_in_order(server: Server, tmp_path: Path) -> None:
    num_steps = 8_000
    run = run_at(server.uri, tmp_path / "killed")
    server.kill()
    syncing = run.syncing()
    syncing.start()
    run.add_epochs(range(num_steps))
    server.start()
    wait_until(lambda: bool(steps_of(server, "killed", "train/loss")))
    time.sleep(random.uniform(0, 0.3))
    server.kill()
    assert 0 < len(steps_of(server, "killed", "train/loss")) < num_steps
    server.start()
    run.add_epochs(range(num_steps, num_steps + 100))
    run.end()
    assert syncing.close(200).is_complete
    assert runs_named(server, "killed") == [("FINISHED", "active")]
    assert steps_of(server, "killed", "train/loss") == list(range(num_steps + 100))
    assert steps_of(server, "killed", "images_per_s") == list(range(num_steps + 100))


@pytest.mark.slow
def test_a_server_that_takes_ten_seconds_an_answer_slows_no_one(running: Server, proxy: Proxy, tmp_path: Path) -> None:
    run = run_at(proxy.uri, tmp_path / "slow")
    syncing = run.syncing()
    proxy.delay_s = 10.0
    syncing.start()
    run.add_epochs(range(400))
    began = time.perf_counter()
    assert not syncing.close(0.5).is_complete
    assert time.perf_counter() - began < 2.0
    proxy.delay_s = 0.0
    wait_until(lambda: run.sync().is_complete)
    assert runs_named(running, "slow") == [("RUNNING", "active")]
    assert steps_of(running, "slow", "train/loss") == list(range(400))


@pytest.mark.slow
def test_a_server_that_answers_slowly_is_waited_for_up_to_a_limit(running: Server, proxy: Proxy, tmp_path: Path) -> None:
    ended = [run_at(proxy.uri, tmp_path / name) for name in ("waited", "limited")]
    for run in ended:
        run.add_epochs(range(5))
        run.end()
    proxy.delay_s = 2.0
    began = time.perf_counter()
    assert ended[0].syncing().close(20, 150).is_complete
    assert time.perf_counter() - began > 20
    assert runs_named(running, "waited") == [("FINISHED", "active")]
    assert not ended[1].syncing().close(5, 6).is_complete


@pytest.mark.parametrize("request_", ["runs/create", "runs/log-batch", "runs/update", "runs/log-inputs"])
def test_a_request_whose_answer_is_lost_leaves_everything_once(
    request_: str, running: Server, proxy: Proxy, tmp_path: Path
) -> None:
    name = f"lost {request_.replace('/', ' ')}"
    run = run_at(proxy.uri, tmp_path / name)
    run.add_epochs(range(5))
    data = {"num_images": 3, "labels": "a", "order": "b", "contents": "c"}
    run.change(data={"classes": ["a"], "train": data, "val": data})
    run.end()
    proxy.lose_answer_to = f"/{request_}".encode()
    assert run.syncing().close(60).is_complete
    if request_ != "runs/log-inputs":
        assert proxy.lose_answer_to is None
    assert runs_named(running, name) == [("FINISHED", "active")]
    assert steps_of(running, name, "train/loss") == list(range(5))


def test_the_first_metric_of_a_trial_stays_the_first_where_the_request_behind_its_creation_fails(
    running: Server, proxy: Proxy, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    run = run_at(proxy.uri, tmp_path / "first", "sweep", "sweep.metric=top1_pct")
    run.change(trials=[row("000")])
    run.add(event("stage_begun", "trials/000/student", trial="000", model="resnet8"))
    run.add_epochs(range(1), "trials/000/student")
    assert run.sync().is_complete
    proxy.lose_answer_to = b"/runs/log-batch"
    outcome = {"status": "ok", "metrics": {"data_pct": 1.0, "top1_pct": 50.0}}
    run.add(event("trial_ended", trial="000", outcome=outcome))
    assert run.syncing().close(60).is_complete
    assert proxy.lose_answer_to is None
    [(run_id,)] = running.query("SELECT run_uuid FROM runs WHERE name = '000'")
    metrics = MlflowClient(running.uri).get_run(run_id).data.metrics
    assert next(iter(metrics)) == "top1_pct"
    assert metrics["top1_pct"] == 50.0


@pytest.mark.slow
def test_a_server_that_has_nowhere_to_put_files_gets_every_metric(tmp_path: Path) -> None:
    from service.tracking.sender import create_database

    (tmp_path / "file").touch()
    nowhere = (tmp_path / "file" / "mlruns").as_uri()  # as /mlruns is for all but root
    create_database(tmp_path / "mlflow.db", nowhere)
    server = Server(tmp_path, ("--no-serve-artifacts", "--default-artifact-root", nowhere))
    run = run_at(server.uri, tmp_path / "nowhere")
    syncing = run.syncing()
    try:
        server.start()
        server.ready()
        run.add_epochs(range(100))
        add_student(run)
        run.end()
        syncing.start()
        wait_until(lambda: runs_named(server, "nowhere") == [("FINISHED", "active")])
        delivery = syncing.close(5)
    finally:
        server.kill()
    assert steps_of(server, "nowhere", "train/loss") == list(range(100))
    assert not delivery.is_complete
    assert "has the metrics but lacks" in delivery.message
    assert " artifacts: " in delivery.message


def test_a_creation_that_a_server_gets_to_only_after_its_repetition_leaves_one_run(
    running: Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    run = run_at(proxy.uri, tmp_path / "late")
    syncing = run.syncing()
    proxy.hold = b"/runs/create"
    syncing.start()
    wait_until(lambda: len(runs_named(running, "late")) == 1)
    proxy.release.set()
    wait_until(lambda: len(runs_named(running, "late")) >= 2)  # a slow machine's repetition may be late, too, and repeated
    run.add_epochs(range(1, 2))
    run.end()
    assert syncing.close(60).is_complete
    one, *twins = runs_named(running, "late")
    assert one == ("FINISHED", "active")
    assert set(twins) == {("RUNNING", "deleted")}
    assert steps_of(running, "late", "train/loss") == [1]


def test_numbers_that_are_not_finite_artifacts_and_a_model_arrive_over_http(running: Server, tmp_path: Path) -> None:
    run = run_at(running.uri, tmp_path / "all")
    run.add(epoch(1, metrics={"train/loss": float("nan"), "val_loss": float("inf"), "cka": 1.0}))
    add_student(run)
    run.run_dir.result.write_text("{}\n")
    run.run_dir.report.write_text("page")
    run.end()
    for _ in range(2):
        assert run.sync().message == f"MLflow has every event ({running.uri})"
        state_path(run.run_dir).unlink()
        run.add(event("session_begun"))
        run.end()
    stored = running.query(
        "SELECT key, value, is_nan FROM metrics m JOIN runs r USING (run_uuid) WHERE r.name = 'all' ORDER BY key"
    )
    assert stored == [("cka", 1.0, 0), ("train/loss", 0.0, 1), ("val_loss", sys.float_info.max, 0)]
    assert running.query("SELECT count(*), min(status) FROM logged_models") == [(1, 2)]
    assert [path.read_text() for path in running.root.rglob("report.html")] == ["page"]
    assert len(list(running.root.rglob("student.safetensors"))) == 1


def text_of(url: str, profile: Path) -> str:
    """A page's text once its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=2000,1800"]
    command = [str(BROWSER), *options, "--virtual-time-budget=60000", "--dump-dom", url]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.S))))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_sweep_opens_in_a_browser_as_a_table_with_the_best_trial_first_and_as_charts(running: Server, tmp_path: Path) -> None:
    keys = ("sweep.metric=top1_pct", "sweep.space={scale.num_workers: [1, 2, 4], optim.lr: [0.1]}")
    run = run_at(running.uri, tmp_path / "the sweep", "sweep", *keys)
    identity = {"num_images": 3, "labels": "a", "order": "b", "contents": "c"}
    run.change(data={"classes": ["a"], "train": identity, "val": identity})
    for number, (speed, accuracy) in enumerate([(1001.5, 81.25), (2002.5, 94.08), (3003.5, 72.5)]):
        trial, values = f"{number:03d}", {"loader/batch_ms": 1.0, "images_per_s": speed, "top1_pct": accuracy}
        run.change(trials=[row(trial, **{"scale.num_workers": 2**number, "optim.lr": 0.1})])
        outcome = {"status": "ok", "metrics": {**values, "epoch_s": 5.5, "data_pct": 7.7, "steps": 9.0}}
        run.add(event("trial_ended", trial=trial, outcome=outcome))
    run.end()
    assert sync(run.run_dir, running.uri, "digits", MlflowView).is_complete
    table, charts = (text_of(url, tmp_path / "profile") for url in compare_urls(run.run_dir, running.uri))
    assert "Trials by workers, lr" in table
    for column in ("images_per_s", "top1_pct", "epoch_s", "data_pct", "scale.num_workers", "optim.lr", "Dataset"):
        assert column in table
    assert "the sweep" not in table
    assert table.index("001 workers") < table.index("000 workers") < table.index("002 workers")
    for value in ("2002.5", "94.08", "5.5", "7.7", "digits ("):
        assert value in table
    assert "Charts by workers, lr" in charts
    assert "Trials (4)" in charts
    for value in ("1001.50", "2002.50", "3003.50", "81.25", "94.08", "72.50"):  # of bars
        assert value in charts
    assert "images_per_s vs. top1_pct" in charts
    assert charts.index("Parallel Coordinates") < charts.rindex("optim.lr")


def add_student(run: Run) -> None:
    """A student that has ended, with its best checkpoint."""
    names = [write_checkpoint(run.run_dir).name]
    wrote = event("checkpoint", "student", step=1, epoch=1.0, names=names)
    run.add(wrote, event("stage_ended", "student", outcome={"status": "ok"}))


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
    run = run_at(running.uri, tmp_path / "served")
    add_student(run)
    assert run.sync().is_complete
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
