"""A command on its way to the cluster, and its log on the way back."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.job_submission import JobStatus

from service.cluster import jobs
from service.cluster.jobs import submit
from service.commands.submit import job_of
from trainables.errors import ClusterError
from trainables.notices import notices_to

# A dashboard that does not do as it is asked at once


class Dashboard(http.server.ThreadingHTTPServer):
    """Answers as Ray's dashboard does, at its addresses: what it is about to answer next stands in its lists."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TeacherInterface)
        self.token: str | None = None
        self.fails = False
        """Requests for jobs are answered with 500."""
        self.jobs: dict[str, dict[str, str]] = {}
        """The metadata of each, by its name."""
        self.variables: list[dict[str, str]] = []
        """The environment of each job."""
        self.sent: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class TeacherInterface(http.server.BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        if self._refused():
            return
        job = self.path.rpartition("/")[2]
        if self.path == "/api/version":
            self._answer(200, {"ray_version": "2.60.0", "ray_commit": "", "version": "4", "session_name": ""})
        elif self.path.startswith("/api/packages"):
            self._answer(200, {})
        elif self.path.startswith("/api/jobs") and self.server.fails:
            self._answer(500, "the agent is busy\nand says so at length")
        else:
            self._answer(404, f"Job {job} does not exist")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        if self.server.fails:
            self._answer(500, "the agent is busy\nand says so at length")
        else:
            self.server.jobs[body["submission_id"]] = body["metadata"]
            self.server.variables.append(body["runtime_env"].get("env_vars", {}))
            self._answer(200, {"job_id": None, "submission_id": body["submission_id"]})

    def _refused(self) -> bool:
        sent = self.headers.get("Authorization")
        self.server.sent.append(sent)
        if self.server.token is None or sent == f"Bearer {self.server.token}":
            return False
        self._answer(403 if sent else 401, "no")
        return True

    def _answer(self, status: int, body: object) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Dashboard]:
    server = Dashboard()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.address)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def submitted(tmp_path: Path) -> list[str]:
    lines: list[str] = []
    assert submit(job_of(["train", "digits"], "digits"), tmp_path, follow=False, echo=lines.append) == 0
    return lines


def test_a_runs_root_of_this_machine_is_not_that_of_the_job(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_RUNS", "/of/this/machine")
    submit(job_of(["methods"], None), tmp_path, follow=False, echo=lambda _: None)
    assert dashboard.variables == [{}]


def test_a_job_is_submitted_and_its_log_named(dashboard: Dashboard, tmp_path: Path) -> None:
    first, second = submitted(tmp_path)
    (job,) = dashboard.jobs
    assert first.startswith(f"submitted {job}: python -m service train digits")
    assert second == f"its log: ray job logs --follow {job} --address {dashboard.address}"


def test_a_dashboard_that_answers_with_an_error_is_one_line(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.fails = True
    with pytest.raises(ClusterError) as refused:
        submitted(tmp_path)
    assert str(refused.value) == (
        f"cannot submit a job to {dashboard.address}: Request failed with status code 500: the agent is busy; "
        "start Ray or set RAY_API_SERVER_ADDRESS"
    )
    assert not dashboard.jobs


def test_a_ray_without_a_token_is_a_notice(dashboard: Dashboard, tmp_path: Path) -> None:
    notices: list[str] = []
    with notices_to(notices.append):
        submitted(tmp_path)
    assert set(dashboard.sent) == {None}
    (line,) = notices
    assert line.startswith(f"the Ray at {dashboard.address} requires no token: ")


SUBMIT = """
import pathlib, sys
from service.cluster.jobs import submit
from service.commands.submit import job_of
from trainables.errors import ClusterError
try:
    submit(job_of(["methods"], None), pathlib.Path(sys.argv[1]), follow=False, echo=lambda _: None)
except ClusterError as error:
    print(error)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [
        ({}, True),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}, True),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"}, True),
        ({"RAY_AUTH_MODE": "disabled"}, True),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}, False),
    ],
)
def test_a_ray_with_a_token_takes_jobs_with_it_alone(
    environment: dict[str, str], is_refused: bool, dashboard: Dashboard, tmp_path: Path
) -> None:
    dashboard.token = "secret"
    # In a process of its own: Ray reads the mode once.
    words = [sys.executable, "-c", SUBMIT, str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    refusal = f"{dashboard.address} requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE"
    assert done.stdout.startswith(refusal) if is_refused else done.stdout == "", done.stderr
    assert done.stdout.count("\n") == is_refused
    assert len(dashboard.jobs) == (not is_refused)


# A log that is followed


class Log:
    """A client whose log ends so, and whose job ends at the second request."""

    def __init__(self, *log: str | Exception) -> None:
        self.log, self.statuses = log, [JobStatus.RUNNING, JobStatus.SUCCEEDED]

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for each in self.log:
            if isinstance(each, Exception):
                raise each
            yield each

    def get_job_info(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(status=self.statuses.pop(0))


def followed(*log: str | Exception) -> list[str]:
    lines: list[str] = []
    assert jobs._follow(cast(Any, Log(*log)), "job", lines.append, "its log: ray job logs").status == "SUCCEEDED"
    return lines


def test_a_log_is_followed_to_the_jobs_end() -> None:
    assert followed("one\n", "two\n") == ["one\n", "two\n"]


def test_a_job_whose_log_is_cut_off_is_followed_to_its_end_all_the_same() -> None:
    shown = followed("one\n", RuntimeError("WebSocket connection closed unexpectedly with close code 1006"))
    assert shown[0] == "one\n"
    assert shown[1].startswith("lost the connection to the log (WebSocket connection closed unexpectedly")
    assert shown[1].endswith("the job keeps running; its log: ray job logs")
