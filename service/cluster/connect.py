"""Connect to the Ray of RAY_ADDRESS, or start one on this machine."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from service.cluster import local_ray
from service.cluster.open_ray import warn_if_unauthenticated
from service.cluster.resources import MAX_OVERSUBSCRIPTION, Cluster, is_local, living_nodes
from service.cluster.shared_folders import check_shared
from trainables.errors import ClusterError, first_line
from trainables.metrics.telemetry import usable_cores
from trainables.rundir import expand_home, unwritable_reason
from trainables.user_folder import user_folder

MAX_SOCKET = 103 if sys.platform == "darwin" else 107
"""Bytes of a socket's path at most."""

# Ray takes loopback as a node's address, and binds each of its servers to it, where clusters are "not supported", which is
# its word for macOS and Windows; `_node_ip_address="127.0.0.1"` is turned into the machine's outer address. Elsewhere too
# a Ray of our own is no cluster. Gloo and NCCL go by the interface's name.
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
    """The cluster of `RAY_ADDRESS`, or a Ray of our own on loopback with `logical_cpus` CPUs (at least the cores, at most 4×).

    `cache`: the folder of `teacher.cache`, where it will be written. `is_copy`: what is in `runs_root` is in an object store.
    `instead`: what to do where nodes do not share `runs_root`.

    Raises ClusterError: no Ray at RAY_ADDRESS, or none can start here; or its nodes do not all see `runs_root` and `cache`, or
    may not write there.
    """
    set_ray_environment()
    check_ray_address()
    from trainables.worker.ray_nodes import has_autoscaler

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _start_ray(logical_cpus)
    except SystemExit:  # Ray's own handler of SIGTERM, which it sets first of all
        raise KeyboardInterrupt from None
    except Exception as error:  # all kinds: where a node takes too long to start, Ray raises just that
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
    finally:
        local_ray.shut_down()


def set_ray_environment() -> None:
    """What Ray reads from the environment when it is imported or started."""
    # A trial's end is noticed at the controller's next poll: two seconds are long for a short trial.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # By default any call of Ray's starts one: after Ctrl-C, in a thread whose training was just taken from it.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if is_local():
        os.environ.update(LOOPBACK)
        # By default Ray starts one worker per core at a time, and from four times as many on it warns on our output.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "32")
        # Ray starts workers at niceness 15: whatever else a machine does would go before the training, our sender to MLflow too.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A process for each trainer that asks whether a cloud is about to take a node away: seconds of a core to start.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    else:
        # By default Ray looks every 5 s whether the end of a node was announced, of which a cloud may leave 30 s.
        os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "2")
        # Ray asks twenty times, a second apart and with a line on the terminal each, also where it was refused for its token.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")


def _start_ray(logical_cpus: int) -> None:
    import ray

    options = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True, "job_config": _job_config()}
    if is_local():
        cores = usable_cores()
        cpus = max(cores, min(logical_cpus, cores * MAX_OVERSUBSCRIPTION))
        # Ray makes the folders of a session world-writable: who writes there runs code as the user of its workers.
        folder = user_folder(session_base()) / "ray"
        make_token()
        ray.init(address="local", num_cpus=cpus, dashboard_host="127.0.0.1", _temp_dir=str(folder), **options)
        local_ray.watch_servers()
    else:
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # which has brought its own code
        context = ray.init(runtime_env=None if in_job else packages(), **options)
        if not in_job and context.dashboard_url:  # a job was submitted through it
            warn_if_unauthenticated(f"http://{context.dashboard_url}")


def _job_config() -> Any:
    """Workers import from this package's checkout, where it is in one, and not from the user's directory.

    There may be a `service/` of theirs. Ray adds none of a driver's directories where its job has a working directory.
    """
    from ray.job_config import JobConfig

    folder = Path(__file__).parents[2]
    config = JobConfig(_py_driver_sys_path=[str(folder)] if (folder / "pyproject.toml").exists() else [])
    config._runtime_env_has_working_dir = partial(bool, True)
    return config


def session_base() -> str:
    """Below which Ray's sessions lie: RAY_TMPDIR, else TMPDIR, unless sockets there would have paths that are too long."""
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return base if "RAY_TMPDIR" in os.environ or excess_bytes(base) <= 0 else "/tmp"


def excess_bytes(base: str) -> int:
    """By how much the longest path of a socket of Ray's sessions below `base` is too long."""
    session = f"raydistill-{os.getuid()}/ray/session_0000-00-00_00-00-00_000000_{os.getpid()}/sockets/dash_MetricsHead"
    return len(os.fsencode(expand_home(base) / session)) - MAX_SOCKET


def make_token() -> None:
    """Make Ray's token private: where there is none Ray writes one, readable as the umask says."""
    token = Path("~/.ray/auth_token").expanduser()
    named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    with contextlib.suppress(OSError):  # without a home Ray has no token there either
        token.parent.mkdir(mode=0o700, exist_ok=True)
        if not token.exists() and not named and os.environ.get("RAY_AUTH_MODE", "token") == "token":
            with open(token, "x", opener=partial(os.open, mode=0o600)) as file:
                file.write(secrets.token_hex(32))
        token.chmod(0o600)


def _why_no_ray(error: Exception) -> str:
    reason = first_line(error).split(". ")[0]
    if is_local():
        return f"Ray does not start on this machine: {reason}; fix that, or try again later if the machine was too busy"
    return (
        f"no Ray at {os.environ['RAY_ADDRESS']}: {reason}; start one, or give its token "
        "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE), or unset RAY_ADDRESS to use this machine"
    )


def check_ray_address() -> None:
    """Refuse a RAY_ADDRESS where no server listens: Ray itself would try for minutes; without one, a RAY_TMPDIR that is too long.

    Raises ClusterError.
    """
    if is_local():
        if (excess := excess_bytes(session_base())) > 0:
            raise ClusterError(
                f"RAY_TMPDIR is {session_base()}, which is {excess} bytes too long for the sockets that Ray makes below it: "
                "name a shorter folder, or unset it"
            )
        return
    address = os.environ["RAY_ADDRESS"]
    host, _, port = address.rpartition(":")
    if address == "auto":  # the Ray of this machine, which Ray finds or not at once
        return
    if address.startswith("http"):
        raise ClusterError(
            f"RAY_ADDRESS is {address}, where jobs are submitted: use `distill submit`, or give Ray's own address, HOST:6379"
        )
    if not port.isdecimal():
        raise ClusterError(f"RAY_ADDRESS is {address}: write HOST:PORT, such as 10.0.0.1:6379, or unset it to use this machine")
    try:
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray at {address}: {error.strerror or error}; start one, or unset RAY_ADDRESS to use this machine"
        ) from error


def packages() -> dict[str, list[str]]:
    """Both packages, as a runtime environment brings them to a cluster's nodes."""
    here = Path(__file__).parents[1]
    return {"py_modules": [str(here), str(here.parent / "trainables")]}
