"""A command on its way to the cluster, and its log on the way back."""

import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

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
        self.failures = 0
        """So many requests for jobs will be answered with 500."""
        self.takes_failing = False
        """A job is taken though its request is answered with 500."""
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
        elif self.path.startswith("/api/jobs") and self.server.failures:
            self.server.failures -= 1
            self._answer(500, "the agent is busy\nand says so at length")
        elif job in self.server.jobs:
            self._answer(
                200,
                {
                    "type": "SUBMISSION",
                    "status": "SUCCEEDED",
                    "entrypoint": "",
                    "submission_id": job,
                    "metadata": self.server.jobs[job],
                },
            )
        else:
            self._answer(404, f"Job {job} does not exist")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        if not self.server.failures or self.server.takes_failing:
            assert body["submission_id"] not in self.server.jobs
            self.server.jobs[body["submission_id"]] = body["metadata"]
            self.server.variables.append(body["runtime_env"].get("env_vars", {}))
        if self.server.failures:
            self.server.failures -= 1
            self._answer(500, "the agent is busy\nand says so at length")
        else:
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
    monkeypatch.setattr(jobs, "PAUSE_S", 0.05)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def submitted(tmp_path: Path) -> list[str]:
    lines: list[str] = []
    assert submit(job_of(["train", "digits"], "digits", None), tmp_path, follow=False, echo=lines.append) == 0
    return lines


def test_the_clusters_own_runs_root_counts_unless_another_is_given(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_RUNS", "/of/this/machine")
    for root in (None, "/shared/runs"):
        submit(job_of(["methods"], None, root), tmp_path, follow=False, echo=lambda _: None)
    assert dashboard.variables == [{}, {"RAYDISTILL_RUNS": "/shared/runs"}]


def test_a_dashboard_that_is_busy_is_requested_again_and_runs_the_job_once(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.failures = 3
    (first, _) = submitted(tmp_path)
    assert len(dashboard.jobs) == 1
    assert first.startswith(f"submitted {next(iter(dashboard.jobs))}: python -m service train digits")


def test_a_job_that_was_taken_though_the_answer_was_an_error_is_not_submitted_twice(dashboard: Dashboard, tmp_path: Path) -> None:
    dashboard.failures, dashboard.takes_failing = 2, True
    assert submitted(tmp_path)[0].startswith(f"submitted {next(iter(dashboard.jobs))}")
    assert len(dashboard.jobs) == 1


def test_a_job_of_another_that_has_the_same_name_is_not_taken_for_ones_own(dashboard: Dashboard, tmp_path: Path) -> None:
    job = job_of(["train", "digits"], "digits", None)
    dashboard.jobs[job.name] = {"submission": "another"}
    with pytest.raises(ClusterError, match=rf"has another job named {job.name}: submit again"):
        submit(job, tmp_path, follow=True, echo=lambda _: None)
    assert list(dashboard.jobs) == [job.name]


def test_a_dashboard_that_stays_busy_is_given_up_in_one_line(
    dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.3)
    dashboard.failures = 10**6
    with pytest.raises(ClusterError) as refused:
        submitted(tmp_path)
    assert str(refused.value) == (
        f"no job could be submitted to {dashboard.address}: Request failed with status code 500: the agent is busy; "
        "start Ray or set RAY_API_SERVER_ADDRESS"
    )
    assert not dashboard.jobs


def test_the_clusters_token_is_sent_where_it_is_required_and_only_there(dashboard: Dashboard, tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret\n")
    notices: list[str] = []
    with notices_to(notices.append):
        submitted(tmp_path)
        assert set(dashboard.sent) == {None}
        (line,) = notices
        assert line.startswith(f"the Ray at {dashboard.address} asks for no token: ")
        dashboard.token = "secret"
        submitted(tmp_path)
        assert notices == [line]
    assert len(dashboard.jobs) == 2
    dashboard.token = "another"
    with pytest.raises(ClusterError) as refused:
        submitted(tmp_path)
    assert str(refused.value).startswith(
        f"{dashboard.address} refuses the token of {tmp_path}/.ray/auth_token: give the cluster's"
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "asks for a token, and none was found: give the cluster's with RAY_AUTH_TOKEN_PATH=FILE"),
        ({"RAY_AUTH_TOKEN": "wrong"}, "refuses the token of RAY_AUTH_TOKEN: give the cluster's"),
        ({"RAY_AUTH_TOKEN_PATH": "/none"}, "asks for a token, and there is none in RAY_AUTH_TOKEN_PATH=/none"),
        ({"RAY_AUTH_MODE": "disabled"}, "asks for a token, and with RAY_AUTH_MODE=disabled none is sent: unset it"),
    ],
)
def test_a_token_that_was_not_sent_is_not_reported_as_refused(
    environment: dict[str, str], words: str, dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.token = "secret"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError) as refused:
        submitted(tmp_path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


# A log that is followed


class Clock:
    """Time that passes where somebody sleeps."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Log:
    """A client whose connections to the log, and requests for the job, go as its lists have it."""

    def __init__(self, *connections: list[str | Exception]):
        self.connections = list(connections)

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for each in self.connections.pop(0):
            if isinstance(each, Exception):
                raise each
            jobs.time.sleep(0.02)
            yield each

    def get_job_info(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(status="SUCCEEDED")


def followed(*connections: list[str | Exception]) -> list[str]:
    lines: list[str] = []
    assert jobs._follow(cast(Any, Log(*connections)), "job", lines.append).status == "SUCCEEDED"
    return lines


BUSY = RuntimeError("Request failed with status code 500: busy.")
CUT = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "time", Clock())
    monkeypatch.setattr(jobs, "PAUSE_S", 0.01)
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_log_that_is_cut_off_is_taken_up_where_it_was() -> None:
    assert followed(["one\n", CUT], ["one\ntw", RuntimeError("WebSocket error for job job: gone")], ["one\ntwo\n"]) == [
        "one",
        "tw",
        "o",
    ]


@pytest.mark.usefixtures("impatient")
def test_the_patience_with_a_busy_dashboard_begins_anew_with_each_piece_of_text() -> None:
    long = [f"{number}\n" for number in range(5)]  # each takes longer than a pause, all of them longer than the patience
    assert followed([*long, BUSY], [BUSY], [*long, "5\n", BUSY], [BUSY], [*long, "5\n", "6\n"]) == list("0123456")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("failure", [BUSY, CUT])
def test_a_log_without_a_word_is_given_up(failure: Exception) -> None:
    failing: list[str | Exception] = [failure]
    with pytest.raises(RuntimeError, match=str(failure)):
        followed(["one\n", failure], *[failing] * 1000)
