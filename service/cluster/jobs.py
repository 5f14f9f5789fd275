"""Commands of ours as Ray jobs, the same as `ray job submit` would run them."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from service.cluster.connect import packages
from service.cluster.open_ray import warn_if_unauthenticated
from trainables.errors import ClusterError, first_line

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

T = TypeVar("T")
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
PATIENCE_S, PAUSE_S = 60.0, 2.0
"""How long a dashboard may answer with errors of its own, as its job agent does under load, and how often it is asked again."""
_STATUS = re.compile(r"status code (\d{3})")
SUBMISSION = "submission"
"""In a job's metadata: a number that no other submission has."""


@dataclass(frozen=True)
class Job:
    """A `distill` command to be submitted."""

    name: str
    arguments: tuple[str, ...]
    metadata: Mapping[str, str]
    """What Ray's dashboard shows of the job and its run."""
    env_vars: Mapping[str, str]


def dashboard_address() -> str:
    """Where jobs are submitted to: RAY_API_SERVER_ADDRESS, an http RAY_ADDRESS, else the local dashboard."""
    named = (os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
    return next((address for address in named if address.startswith("http")), "http://127.0.0.1:8265")


def submit(job: Job, working_dir: Path, follow: bool, echo: Callable[[str], None]) -> int:
    """Run a job; with `follow` stream its log until it ends.

    `working_dir` is copied to the cluster: the job begins there. Returns the job's exit code (0 where it is not followed).

    Raises ClusterError: no Ray dashboard answers, or it refuses.
    """
    address = dashboard_address()
    entrypoint = shlex.join(["python", "-m", "service", *job.arguments])
    request = {
        "entrypoint": entrypoint,
        "submission_id": job.name,
        "runtime_env": {"working_dir": str(working_dir), **packages(), "env_vars": dict(job.env_vars)},
        "metadata": {**job.metadata, SUBMISSION: secrets.token_hex(8)},
    }
    client = _submit(address, request)
    warn_if_unauthenticated(address)
    echo(f"submitted {job.name}: {entrypoint}")
    log = f"its log: ray job logs --follow {job.name} --address {address}"
    if not follow:
        echo(log)
        return 0
    try:
        details = _follow(client, job.name, echo)
    except KeyboardInterrupt:
        echo(f"{job.name} keeps running; to stop it: ray job stop {job.name} --address {address}")
        raise
    except _failures() as error:
        raise ClusterError(f"{address} no longer answers: {first_line(error)}; {job.name} keeps running, {log}") from error
    if details.status == "SUCCEEDED":
        return 0
    return details.driver_exit_code or 1


def _submit(address: str, request: dict[str, Any]) -> JobSubmissionClient:
    """A connection to the dashboard, which has taken the job. `request`: of `submit_job`. Raises ClusterError."""
    from ray.exceptions import AuthenticationError

    mode, token = os.environ.get("RAY_AUTH_MODE"), _token()
    try:
        try:
            client = _patiently(lambda: _take(address, {}, request))
        except AuthenticationError:
            if mode is not None or token is None:
                raise
            headers = {"Authorization": f"Bearer {token[0]}"}  # Ray itself sends one only with RAY_AUTH_MODE=token
            client = _patiently(lambda: _take(address, headers, request))
    except AuthenticationError as error:
        instead = "give the cluster's with RAY_AUTH_TOKEN_PATH=FILE"
        if mode not in (None, "token"):
            problem = f"asks for a token, and with RAY_AUTH_MODE={mode} none is sent: unset it"
        elif token is not None:
            problem = f"refuses the token of {token[1]}: {instead}"
        elif path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
            problem = f"asks for a token, and there is none in RAY_AUTH_TOKEN_PATH={path}: {instead}"
        else:
            problem = f"asks for a token, and none was found: {instead}"
        raise ClusterError(f"{address} {problem}") from error
    except _failures() as error:
        raise ClusterError(
            f"no job could be submitted to {address}: {first_line(error)}; start Ray or set RAY_API_SERVER_ADDRESS"
        ) from error
    return client


def _take(address: str, headers: dict[str, str], request: dict[str, Any]) -> JobSubmissionClient:
    """Submit, unless the dashboard has this very job: what it answered with an error it may have taken.

    Raises ClusterError: it has another one of this name.
    """
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address, headers=headers)
    try:
        taken = client.get_job_info(request["submission_id"])
    except RuntimeError as error:
        if "status code 404" not in str(error):
            raise
        client.submit_job(**request)
    else:
        if (taken.metadata or {}).get(SUBMISSION) != request["metadata"][SUBMISSION]:
            raise ClusterError(f"{address} has another job named {taken.submission_id}: submit again, for another name")
    return client


def _token() -> tuple[str, str] | None:
    """The token that Ray would send with RAY_AUTH_MODE=token, and where it lies."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token, "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return (token, f"RAY_AUTH_TOKEN_PATH={named}" if named else str(path)) if token else None


def _follow(client: JobSubmissionClient, job: str, echo: Callable[[str], None]) -> JobDetails:
    """Say what the job prints until it has ended. A log that is cut off is taken up where it was."""
    shown = pieces = 0

    async def stream() -> None:
        nonlocal shown, pieces
        position = 0  # a log begins anew with each connection
        async for text in client.tail_job_logs(job):
            pieces += 1
            new, position = text[max(0, shown - position) :], position + len(text)
            if new:
                shown = position
                echo(new.rstrip("\n"))

    _patiently(lambda: asyncio.run(stream()), lambda: pieces)
    while (details := _patiently(lambda: client.get_job_info(job))).status not in ENDED:
        time.sleep(0.5)
    return details


def _patiently(call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """What a call returns once the dashboard, or the job agent behind it, is not too busy to answer; see `PATIENCE_S`.

    `progress`: a number that grows while an attempt succeeds: the patience begins anew with the first failure after that.
    """
    before, deadline = -1, 0.0
    while True:
        try:
            return call()
        except _failures() as error:
            if progress() != before:
                before, deadline = progress(), time.monotonic() + PATIENCE_S
            if not _may_pass(error) or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)


def _failures() -> tuple[type[Exception], ...]:
    """What Ray's client, and the libraries that it asks the dashboard with, raise where a request fails."""
    import aiohttp

    return RuntimeError, OSError, aiohttp.ClientError


def _may_pass(error: Exception) -> bool:
    """Whether a failed request may succeed a little later: a 5xx, or a log's connection that was cut.

    Ray says a status in words alone, and so that the connection was lost: `WebSocket connection closed unexpectedly …`.
    """
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    found = _STATUS.search(str(error))
    return str(error).startswith("WebSocket ") or int(found[1] if found else status or 0) >= 500
