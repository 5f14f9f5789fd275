"""`distill ui` on a machine with several users: a port of loopback is open to all of them."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from service.commands.tracking import check_address
from service.tracking.run_view import SyncState
from service.tracking.sender import add_views
from service.tracking.stores import default_uri
from tests.integration.test_mlflow_server import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@contextmanager
def open_ui(runs_root: Path, *options: str, ended_by: signal.Signals = signal.SIGTERM) -> Iterator[str]:
    """A running `distill ui`: the address that it prints, without what follows the `#`; in the end its port must be free."""
    port = free_port()
    command = [sys.executable, "-u", "-m", "service", "ui", "--runs", str(runs_root), "--port", str(port), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+(?=#)", process.stdout.readline())
            assert found is not None
            wait_until(lambda: process.poll() is not None or status(f"http://127.0.0.1:{port}/") != 0)
            assert process.poll() is None
            yield found.group()
        finally:
            server = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(ended_by)
            _, left = psutil.wait_procs(server, timeout=20)
            for each in left:
                each.kill()
    assert left == []
    assert process.returncode == {signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}[ended_by]
    check_address("127.0.0.1", port)


def status(url: str, *, body: object = None, method: str | None = None, token: str = "") -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def a_run(runs_root: Path) -> tuple[str, str]:
    """The ids of an experiment and of a run in it."""
    client = MlflowClient(default_uri(runs_root))
    experiment = client.create_experiment("e")
    return experiment, client.create_run(experiment).info.run_id


def test_records_are_shown_to_who_has_the_token_and_changed_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, run = a_run(tmp_path)
    with open_ui(tmp_path, ended_by=signal.SIGKILL) as address:
        base, _, token = address.partition("/?token=")
        search = {"experiment_ids": [experiment]}
        for given in ("", "guess", token[:-1]):
            assert status(base, token=given) == 401
            assert status(f"{base}/api/2.0/mlflow/runs/get?run_id={run}", token=given) == 401
            assert status(f"{base}/api/2.0/mlflow/runs/search", body=search, token=given) == 401
            assert status(f"{base}/ajax-api/2.0/mlflow/runs/delete", body={"run_id": run}, token=given) == 401
        assert status(f"{base}/?token=guess") == 401
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with browser.open(address, timeout=10) as page:
            assert "token" not in page.url
            assert b"<html" in page.read()
        with browser.open(f"{base}/api/2.0/mlflow/runs/get?run_id={run}", timeout=10) as found:
            assert json.load(found)["run"]["info"]["run_id"] == run
        assert status(f"{base}/ajax-api/2.0/mlflow/runs/search", body=search, token=token) == 200
        assert status(f"{base}/ajax-api/2.0/mlflow/runs/delete", body={"run_id": run}, token=token) == 403
        assert (
            status(f"{base}/ajax-api/2.0/mlflow/runs/set-tag", body={"run_id": run, "key": "a", "value": "b"}, token=token) == 403
        )
        for name in ("x", "metrics", "search", "graphql"):
            for method in ("PUT", "DELETE"):
                assert status(f"{base}/api/2.0/mlflow-artifacts/artifacts/{name}", body="x", method=method, token=token) == 403
        assert status(f"{base}/api/2.0/mlflow-artifacts/mpu/create/x/search", body={"path": "x"}, token=token) == 403
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
        state = SyncState(uri=base, experiment="e", experiment_id=experiment)
        assert "can only be read" in add_views(MlflowClient(base), state, {"key": "{}"})  # which is no reason to try again
    assert MlflowClient(default_uri(tmp_path)).get_run(run).info.lifecycle_stage == "active"


@pytest.mark.slow
def test_records_are_changed_where_that_was_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = a_run(tmp_path)
    monkeypatch.setenv("RAYDISTILL_UI_TOKEN", "one-of-our-own")
    with open_ui(tmp_path, "--allow-changes") as address:
        base = address.partition("/?")[0]
        tag = {"run_id": run, "key": "a", "value": "b"}
        assert status(f"{base}/api/2.0/mlflow/runs/set-tag", body=tag, token="no") == 401
        assert status(f"{base}/api/2.0/mlflow/runs/set-tag", body=tag, token="one-of-our-own") == 200
    assert MlflowClient(default_uri(tmp_path)).get_run(run).data.tags["a"] == "b"
