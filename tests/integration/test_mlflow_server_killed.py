"""A real sweep whose MLflow server is killed again and again: the store has each number once in the end."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.runs.event_log import log_lines
from service.runs.events import parsed
from service.runs.mlflow_view import MlflowView
from service.runs.run_log import RunLog
from service.tracking.shown_metrics import of_summary
from service.tracking.sync import sync
from tests.integration.conftest import Distill
from tests.integration.test_mlflow_server import Proxy, Server, answers
from tests.waiting import wait_until
from trainables.rundir import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_KILLS, MOST_REQUESTS = 20, 8
"""A server is killed in one of its first `MOST_REQUESTS` requests: sometimes before the sync has come to what is new."""
BATCHES, RATES = [16, 32, 64], [0.1, 0.2, 0.3, 0.4]
KEYS = (
    "sweep.steps=1000",
    f"sweep.space={{data.global_batch_size: {BATCHES}, optim.lr: {RATES}}}",
    "tracking.enabled=true",
    "tracking.experiment=killed",
)


class MortalServer(Server):
    """A server that dies in the middle of a request, and is started again, `NUM_KILLS` times."""

    def __init__(self, root: Path, generator: random.Random) -> None:
        super().__init__(root)
        self.num_kills, self.num_requests = 0, 0
        self._generator, self._lock = generator, threading.Lock()
        self._left = generator.randint(1, MOST_REQUESTS)
        self._killed = threading.Event()
        self._is_over = False
        self._keeper = threading.Thread(target=self._start_again, daemon=True)
        self.start()
        self.ready()
        self._keeper.start()

    def request_passed(self) -> None:
        """Count a request that the server has just got, and kill it if its time has come."""
        with self._lock:
            self.num_requests += 1
            self._left -= 1
            if self._left or self.num_kills == NUM_KILLS:
                return
            self.num_kills += 1
        time.sleep(self._generator.uniform(0, 0.05))  # a request takes a few tens of milliseconds
        self.kill()
        self._killed.set()

    def _start_again(self) -> None:
        while self._killed.wait() and not self._is_over:
            self._killed.clear()
            self.start()
            self.ready()
            with self._lock:
                self._left = self._generator.randint(1, MOST_REQUESTS)

    def close(self) -> None:
        self._is_over = True
        self._killed.set()
        self._keeper.join()
        self.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MortalServer]:
    from service.tracking.sender import create_database

    root = tmp_path / "server"
    root.mkdir()
    create_database(root / "mlflow.db", (root / "artifacts").as_uri())
    server = MortalServer(root, random.Random(7))
    try:
        yield server
    finally:
        server.close()


def test_a_server_that_is_killed_20_times_during_a_sweep_has_each_number_of_each_trial_once(
    server: MortalServer, distill: Distill
) -> None:
    run_dir = RunDir(distill.runs / "sweep")
    with Proxy(server.port) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        proxy.when_passed = server.request_passed
        sets = [part for key in (*KEYS, f"tracking.uri={proxy.uri}") for part in ("--set", key)]
        command = distill.start("sweep", distill.experiment, "--out", run_dir.root, *sets)
        assert command.end(1200) == 0, command.output
        num_kills = server.num_kills
        while not sync(run_dir, proxy.uri, "killed", MlflowView, max_failures=1).is_complete:
            wait_until(lambda: answers(f"{server.uri}/health"))
        proxy.shutdown()
    print(f"{server.num_kills} kills in {server.num_requests} requests, {num_kills} of them before the sweep had ended")
    assert server.num_kills == NUM_KILLS
    trials = expected_numbers(run_dir)
    stored = server.query(
        """SELECT k.value, m.key, m.step, m.value, m.timestamp FROM metrics m
        JOIN tags k ON k.run_uuid = m.run_uuid AND k.key = 'raydistill.key' ORDER BY 1, 2"""
    )
    print(f"{len(stored)} numbers in {len(trials)} runs")
    assert [(key.partition("/")[2], *number) for key, *number in stored] == sorted(
        (key, *number) for key, numbers in trials.items() for number in numbers
    )
    runs = server.query("SELECT name, status, lifecycle_stage FROM runs ORDER BY name")
    names = [f"{number:03d} batch={batch} lr={lr}" for number, (batch, lr) in enumerate(itertools.product(BATCHES, RATES))]
    assert [run for run in runs if run[2] == "active"] == [(name, "FINISHED", "active") for name in (*names, "sweep")]
    # The others are creations whose answers the kills have cut off.
    assert {status for _, status, stage in runs if stage != "active"} <= {"RUNNING"}
    for table in ("params", "tags"):
        assert server.query(f"SELECT count(*) FROM {table} GROUP BY run_uuid, key HAVING count(*) > 1") == []
    assert len(list(server.root.rglob("experiment.yaml"))) == len(trials)


def expected_numbers(run_dir: RunDir) -> dict[str, list[tuple[str, int, float, int]]]:
    """What MLflow should have by the log: a run's key → name, step, value and unix time in ms of each of its metrics."""
    log = RunLog(run_dir.events)
    best = log.result.best
    assert best is not None
    expected = {}
    for event in (each for line in log_lines(run_dir.events) if (each := parsed(line, run_dir.events))):
        if event["kind"] == "trial_ended":
            metrics, step = event["outcome"]["metrics"], int(event["outcome"]["metrics"]["steps"])
            key, time_ms = f"trial/{event['trial']}", event["time_ms"]
        elif event["kind"] == "session_ended":
            metrics, step, key, time_ms = best.metrics, 0, "sweep", event["time_ms"]
        else:
            continue
        assert key not in expected
        expected[key] = [(name, step, value, time_ms) for name, value in of_summary(metrics).items()]
    return expected
