"""Connects to the Ray of RAY_ADDRESS, or starts a local one."""

import contextlib
import http.client
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from service.cluster import local_ray
from service.cluster.resources import MAX_OVERSUBSCRIPTION, Cluster, is_local, living_nodes
from trainables.errors import ClusterError, first_line
from trainables.metrics.telemetry import usable_cores
from trainables.notices import notice
from trainables.rundir import expand_home, unwritable_reason
from trainables.user_folder import user_folder

MAX_SOCKET = 103 if sys.platform == "darwin" else 107
"""Maximum length of a socket's path in bytes."""

# Ray binds its servers to loopback only where clusters are "not supported", which it assumes on macOS and Windows; it turns
# `_node_ip_address="127.0.0.1"` into the machine's external address. A local Ray is not a cluster on other systems either.
# Gloo and NCCL need the interface's name.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo"),
}

SHARED_RUNS = "give a shared folder with --runs"


@contextlib.contextmanager
def connect(
    logical_cpus: int,
    runs_root: Path,
    cache: Path | None = None,
    *,
    is_copy: bool = False,
    instead: str = f"{SHARED_RUNS}, or s3://BUCKET/PREFIX",
) -> Iterator[Cluster]:
    """Connect to the cluster of `RAY_ADDRESS`, or start a local Ray with `logical_cpus` CPUs (1 to 4 times the cores).

    `cache` is the folder of `teacher.cache` if it will be written. `is_copy` says that `runs_root` is a copy of an object store.
    `instead` is the remedy if nodes do not share `runs_root`.

    Raises ClusterError: no Ray answers or can start, or its nodes do not all share `runs_root` and `cache` with write access.
    """
    set_ray_environment()
    check_ray_address()
    from trainables.worker.ray_nodes import has_autoscaler

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _start_ray(logical_cpus)
    except SystemExit:  # from Ray's SIGTERM handler, which ray.init sets first
        raise KeyboardInterrupt from None
    except Exception as error:  # if a node takes too long to start, Ray raises a plain Exception
        raise ClusterError(_why_no_ray(error)) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        cluster = living_nodes(usable_cores()) if is_local() else replace(living_nodes(), autoscaled=has_autoscaler())
        if not is_copy:
            check_shared(runs_root, str(runs_root), instead)
        if cache is not None:
            name = f"teacher.cache: {cache}"
            full = cache.is_dir() and unwritable_reason(cache) is not None  # see `check_services`
            check_shared(cache, name, "name a folder that all nodes share and may write", read_only=full)
        yield cluster
    except KeyboardInterrupt:
        local_ray.interrupt()
        raise
    finally:
        local_ray.shut_down()


def check_shared(folder: Path, name: str, instead: str, *, read_only: bool = False) -> None:
    """Refuse a folder that some node does not share or cannot write to, where files would be lost.

    Messages call the folder `name` and end with the remedy `instead`. With `read_only` it only has to exist on all nodes.

    Raises ClusterError: names the node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def problem(path: str) -> str | None:
        if not os.path.exists(path):
            return "is not shared: {} does not see it"
        return None if read_only or os.access(os.path.dirname(path), os.W_OK | os.X_OK) else "cannot be written by {}"

    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != ray.get_runtime_context().get_node_id()]
    if not others:
        return
    if not read_only:
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if read_only else tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder) as probe:
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in others]
        task, path = ray.remote(problem), str(folder) if probe is None else probe.name
        answers = [task.options(num_cpus=0, scheduling_strategy=strategy).remote(path) for strategy in strategies]
        for node, answer in zip(others, answers, strict=True):
            where = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            try:
                found = ray.get(answer, timeout=60)
            except ray.exceptions.RayError as error:
                if node["NodeID"] not in {now.node_id for now in living_nodes().nodes}:
                    continue  # it has just died
                raise ClusterError(f"{where} does not answer: remove it from the cluster, or wait until Ray does") from error
            if found is not None:
                raise ClusterError(f"{name} {found.format(where)}; {instead}")


def set_ray_environment() -> None:
    """Set the environment variables that Ray reads at import or start."""
    # The controller notices a trial's end at its next poll: the default of 2 s is long for a short trial.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # By default any Ray call starts a Ray, such as one in a thread whose training Ctrl-C has just ended.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if is_local():
        os.environ.update(LOOPBACK)
        shorten_tmpdir()
        # By default Ray starts one worker per core at a time, and prints warnings if four times as many are waiting.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "32")
        # Ray starts workers at niceness 15: all other processes, such as our MLflow thread, would come before training.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # The watcher is a process per trainer that polls for preemption of cloud nodes; its start takes seconds of CPU time.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    else:
        # By default Ray polls every 5 s for announced node shutdowns, for which a cloud may leave only 30 s.
        os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "2")
        # By default Ray retries 20 times, once per second with a line on the terminal, even if its token was rejected.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")


def _start_ray(logical_cpus: int) -> None:
    import ray

    options = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True, "job_config": _job_config()}
    if is_local():
        cores = usable_cores()
        cpus = max(cores, min(logical_cpus, cores * MAX_OVERSUBSCRIPTION))
        # Ray makes session folders world-writable: anyone who can write there can run code as the workers' user.
        folder = user_folder(session_base()) / "ray"
        set_token()
        host, port = "127.0.0.1", free_port()
        # Ray Train asks for the state of its actors, by default the Ray of the last `ray start` on this machine: if that one was
        # killed, the end of each worker group waits 10 s for it.
        os.environ["RAY_API_SERVER_ADDRESS"] = f"http://{host}:{port}"
        ray.init(address="local", num_cpus=cpus, dashboard_host=host, dashboard_port=port, _temp_dir=str(folder), **options)
        local_ray.watch_servers()
    else:
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # the job has brought its own code
        context = ray.init(runtime_env=None if in_job else packages(), **options)
        if not in_job and context.dashboard_url:  # `submit` has warned for a job
            warn_if_unauthenticated(f"http://{context.dashboard_url}")


def free_port() -> int:
    """Return a free port for a dashboard. Commands that start at the same time get different ones."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _job_config() -> Any:
    """Let workers import from this package's checkout, if it is in one, and not from the user's directory.

    The user's directory may have another `service/`. Ray adds no driver directories if a job has a working directory.
    """
    from ray.job_config import JobConfig

    folder = Path(__file__).parents[2]
    config = JobConfig(_py_driver_sys_path=[str(folder)] if (folder / "pyproject.toml").exists() else [])
    config._runtime_env_has_working_dir = partial(bool, True)
    return config


def session_base() -> str:
    """Return the folder for Ray's sessions: RAY_TMPDIR, else TMPDIR, else /tmp if socket paths there would be too long."""
    if named := os.environ.get("RAY_TMPDIR"):
        return named
    base = tempfile.gettempdir()
    return base if excess_bytes(base) <= 0 else "/tmp"


def excess_bytes(base: str) -> int:
    """Return by how many bytes the longest socket path of a Ray session below `base` is too long."""
    session = f"raydistill-{os.getuid()}/ray/session_0000-00-00_00-00-00_000000_{os.getpid()}/sockets/dash_MetricsHead"
    return len(os.fsencode(expand_home(base) / session)) - MAX_SOCKET


def shorten_tmpdir() -> None:
    """Let the processes that Ray starts use /tmp if TMPDIR is too long for Python's sockets, such as that of the dashboard."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(f"{folder}/pymp-12345678/listener-12345678")) > MAX_SOCKET:
        os.environ["TMPDIR"] = "/tmp"
        notice(
            f"TMPDIR: {folder} is too long for sockets: the processes of Ray use /tmp, also for copies of remote data without "
            "data.stage"
        )


def set_token() -> None:
    """Give a local Ray a token of its own, which only this user's processes can read. Ray would write one to the home folder."""
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _why_no_ray(error: Exception) -> str:
    reason = first_line(error).split(". ")[0]
    if is_local():
        return f"Ray does not start on this machine: {reason}; fix that, or try again later if the machine is busy"
    return (
        f"no Ray at {os.environ['RAY_ADDRESS']}: {reason}; start one, or set its token "
        "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE), or unset RAY_ADDRESS to use this machine"
    )


def check_ray_address() -> None:
    """Raise ClusterError if no server listens at RAY_ADDRESS, which Ray would try for minutes, or if RAY_TMPDIR is too long."""
    if is_local():
        if (excess := excess_bytes(session_base())) > 0:
            raise ClusterError(
                f"RAY_TMPDIR is {session_base()}, which is {excess} bytes too long for the sockets that Ray creates below it: "
                "set a shorter folder, or unset it"
            )
        return
    address = os.environ["RAY_ADDRESS"]
    host, _, port = address.rpartition(":")
    if address == "auto":  # Ray on this machine, which ray.init finds at once or not at all
        return
    if address.startswith("http") or not port.isdecimal():
        raise ClusterError(
            f"RAY_ADDRESS is {address}: write HOST:PORT, such as 10.0.0.1:6379, or unset it to use this machine; "
            "an http address is for `distill submit`"
        )
    try:
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray at {address}: {error.strerror or error}; start one, or unset RAY_ADDRESS to use this machine"
        ) from error


def packages() -> dict[str, list[str]]:
    """Return the part of a runtime environment that copies both packages to a cluster's nodes."""
    here = Path(__file__).parents[1]
    return {"py_modules": [str(here), str(here.parent / "trainables")]}


def warn_if_unauthenticated(dashboard: str) -> None:
    """Raise a notice if the Ray with this `dashboard`, http://HOST:PORT, runs code from anyone who can connect.

    A dashboard that cannot be reached from here causes no notice.
    """
    try:
        with urllib.request.urlopen(f"{dashboard}/api/version", timeout=5) as answer:
            text = answer.read(10_000)
    except (OSError, http.client.HTTPException):  # including status 401
        return
    if b'"ray_version"' in text:  # not a login page
        notice(
            f"the Ray at {dashboard} requires no token: anyone who can reach this address can run code as its owner; "
            "start it with a token: `ray get-auth-token --generate` before `ray start`"
        )
