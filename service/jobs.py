"""`distill submit`: any command of ours as a Ray job, the same as `ray job submit` would run it."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.experiment import load, recipes
from service.plan import absolute, located
from trainables.errors import ClusterError, ExperimentError

SUBMITTABLE = ("train", "sweep", "resume", "cache", "evaluate", "report", "sync", "pack", "data")
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}


def dashboard_address() -> str:
    """Where jobs are submitted to: RAY_API_SERVER_ADDRESS, an http RAY_ADDRESS, else the local dashboard."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        if os.environ.get(name, "").startswith("http"):
            return os.environ[name]
    return "http://127.0.0.1:8265"


def package(command: Sequence[str], folder: Path) -> list[str]:
    """Put what the command needs into `folder`, the job's working directory, and return the command as it runs there.

    An experiment file travels resolved, bases and all; recipes and directories are named as they are.

    Raises:
        ExperimentError: not a command that can be submitted.
    """
    if not command or command[0] not in SUBMITTABLE:
        raise ExperimentError(
            f"submit: give one of {', '.join(SUBMITTABLE)} and its arguments, such as `distill submit -- train digits`"
        )
    # A job runs elsewhere: what exists here by a relative path is named by its absolute one.
    arguments = [absolute(argument) for argument in command]
    if command[0] in ("pack", "data"):  # every argument that is no option and no number is a path, which need not exist yet
        arguments = [each if each.startswith("-") or each.isdecimal() else _from_here(each) for each in command]
    arguments[0] = command[0]
    for place, argument in enumerate(command[:-1], start=1):
        if argument in ("--out", "--runs"):
            arguments[place] = os.path.abspath(command[place])
    if command[0] in ("train", "sweep", "cache"):
        if len(command) < 2 or command[1].startswith("-"):
            raise ExperimentError(
                f"submit {command[0]}: a recipe or file comes first, such as `distill submit -- {command[0]} digits`"
            )
        resolved = load(command[1])  # refuses a wrong experiment here, not minutes later in a log
        if command[1] not in recipes():
            name = f"{resolved.experiment.name}.yaml"
            teacher = resolved.experiment.teacher
            if teacher is not None and teacher.cache is not None:
                resolved = resolved.override({"teacher.cache": _from_here(teacher.cache)}, command[1])
            if teacher is not None and teacher.others:
                others = [other.model_copy(update={"weights": absolute(other.weights)}).model_dump() for other in teacher.others]
                resolved = resolved.override({"teacher.others": others}, command[1])
            if methods := [located(method) for method in resolved.experiment.distill.method]:  # none names no file
                resolved = resolved.override({"distill.method": methods}, command[1])
            paths = {"data.path": resolved.experiment.data.path, "teacher.weights": teacher.weights if teacher else None}
            resolved = resolved.override({key: absolute(path) for key, path in paths.items() if path}, command[1])
            (folder / name).write_text(resolved.to_yaml())
            arguments[1] = name
        else:
            arguments[1] = command[1]
    return arguments


def _from_here(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def submit(command: Sequence[str], runs_root: Path, follow: bool, say: Callable[[str], None]) -> int:
    """Submit; with `follow` stream the job's log until it ends. Returns the job's exit code (0 where it is not followed).

    Raises:
        ClusterError: no Ray dashboard answers, or it refuses.
        ExperimentError: see `package`.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    address = dashboard_address()
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        arguments = package(command, Path(folder))
        entrypoint = shlex.join(["python", "-m", "service", *arguments])
        try:
            client = JobSubmissionClient(address)
            job = client.submit_job(
                entrypoint=entrypoint,
                runtime_env={
                    "working_dir": folder,
                    "py_modules": [str(here), str(here.parent / "trainables")],
                    "env_vars": {"RAYDISTILL_RUNS": str(runs_root.absolute())},
                },
            )
        except AuthenticationError as error:
            raise ClusterError(
                f"{address} refuses this token: give the cluster's with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE"
            ) from error
        except (ConnectionError, RuntimeError) as error:
            raise ClusterError(
                f"no job could be submitted to {address}: {str(error).splitlines()[0]}; start Ray or set RAY_API_SERVER_ADDRESS"
            ) from error
    say(f"submitted {job}: {entrypoint}")
    if not follow:
        say(f"its log: ray job logs --follow {job} --address {address}")
        return 0

    async def stream() -> None:
        async for lines in client.tail_job_logs(job):
            say(lines.rstrip("\n"))

    try:
        asyncio.run(stream())
        while (details := client.get_job_info(job)).status not in ENDED:
            time.sleep(0.5)
    except KeyboardInterrupt:
        say(f"{job} goes on without a follower; to end it: ray job stop {job} --address {address}")
        raise
    if details.status == "SUCCEEDED":
        return 0
    return details.driver_exit_code or 1
