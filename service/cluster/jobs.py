"""Submits `distill` commands as Ray jobs, like `ray job submit`."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.cluster.connect import packages, warn_if_unauthenticated
from trainables.errors import ClusterError, first_line

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Job:
    """A `distill` command to submit."""

    name: str
    arguments: tuple[str, ...]
    metadata: Mapping[str, str]
    """Shown on Ray's dashboard."""
    env_vars: Mapping[str, str]


def dashboard_address() -> str:
    """Return where to submit jobs: RAY_API_SERVER_ADDRESS, an http RAY_ADDRESS, or else the local dashboard."""
    named = (os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
    return next((address for address in named if address.startswith("http")), "http://127.0.0.1:8265")


def submit(job: Job, working_dir: Path, follow: bool, echo: Callable[[str], None]) -> int:
    """Submit a job, and with `follow` stream its log until it ends.

    `working_dir` is copied to the cluster as the job's working directory. Returns the job's exit code, or 0 without `follow`.

    Raises ClusterError: no Ray dashboard answers, or it rejects the job.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    address, entrypoint = dashboard_address(), shlex.join(["python", "-m", "service", *job.arguments])
    try:
        client = JobSubmissionClient(address)
        client.submit_job(
            entrypoint=entrypoint,
            submission_id=job.name,
            runtime_env={"working_dir": str(working_dir), **packages(), "env_vars": dict(job.env_vars)},
            metadata=dict(job.metadata),
        )
    except AuthenticationError as error:
        raise ClusterError(
            f"{address} requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH=FILE if the cluster's token is not "
            "in ~/.ray/auth_token"
        ) from error
    except _failures() as error:
        raise ClusterError(
            f"cannot submit a job to {address}: {first_line(error)}; start Ray or set RAY_API_SERVER_ADDRESS"
        ) from error
    warn_if_unauthenticated(address)
    echo(f"submitted {job.name}: {entrypoint}")
    log = f"its log: ray job logs --follow {job.name} --address {address}"
    if not follow:
        echo(log)
        return 0
    try:
        details = _follow(client, job.name, lambda text: echo(text.rstrip("\n")), log)
    except KeyboardInterrupt:
        echo(f"{job.name} keeps running; to stop it: ray job stop {job.name} --address {address}")
        raise
    except _failures() as error:
        raise ClusterError(f"{address} no longer answers: {first_line(error)}; {job.name} keeps running, {log}") from error
    return 0 if details.status == "SUCCEEDED" else details.driver_exit_code or 1


def _follow(client: JobSubmissionClient, job: str, echo: Callable[[str], None], log: str) -> JobDetails:
    """Print the job's log and wait until the job ends, even if the log's connection is lost."""

    async def stream() -> None:
        async for text in client.tail_job_logs(job):
            echo(text)

    try:
        asyncio.run(stream())
    except _failures() as error:
        echo(f"lost the connection to the log ({first_line(error)}), but the job keeps running; {log}")
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_INTERVAL_S)
    return details


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that Ray's client and its HTTP libraries raise if a request fails."""
    import aiohttp

    return RuntimeError, OSError, aiohttp.ClientError
