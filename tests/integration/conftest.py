"""The `distill` command as a process, and a real Ray cluster whose nodes are processes on loopback."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.runs.outcome import Outcome
from service.runs.run_log import RunLog
from tests.run_log import events_of
from trainables.rundir import RunDir

PROJECT = Path(__file__).resolve().parents[2]
PATIENCE_S = 200.0
"""For one command on a machine that does other things too."""

EXPERIMENT = """\
base: digits
name: tiny
teacher: null
data: {loader_workers: 1}
optim: {epochs: 2}
tracking: {enabled: false}
"""


@dataclass
class Command:
    """A `distill` command that runs."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended; its descendants are then gone too."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants; none once it has ended."""
        return family(self.process)

    def workers(self) -> list[psutil.Process]:
        """Its Ray Train workers, where Ray is its own."""
        return [process for process in self.family() if is_worker(process)]


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all its descendants; none once it has ended, since its number may be another's by then."""
    if process.poll() is not None:
        return []
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a Ray Train worker (Ray writes what a process is in its title)."""
    return "ray::RayTrainWorker" in title(process)


def title(process: psutil.Process) -> str:
    """Its command line; nothing where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def name_of(process: psutil.Process) -> str:
    """The name of its program; nothing where it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def wait_until(condition: Callable[[], Any], what: str, command: Command | None = None, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails early where `command` has ended instead."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if command is not None and command.process.poll() is not None and not (found := condition()):
            raise AssertionError(f"ended with {command.process.returncode} before {what}:\n{command.output}")
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} in {timeout_s:g} s:\n{command.output if command else ''}")
        time.sleep(0.05)
    return found


class Distill:
    """Starts `distill` commands; whatever is left of them at the end of the test is killed."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        self.experiment = folder / "tiny.yaml"
        self.experiment.write_text(EXPERIMENT)
        for package in ("service", "trainables"):  # the user's own of the same names, which nothing may import
            (folder / package).mkdir()
            (folder / package / "__init__.py").write_text("raise ImportError('of another project')")
        self._started: list[Command] = []

    def start(self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Command:
        """Begin a command; Ray's own variables of this process do not reach it, `env` does."""
        log = self.folder / f"command-{len(self._started)}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYDISTILL_"))}
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "service", *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd or self.folder,
                start_new_session=True,
                env={**clean, "PYTHONPATH": str(PROJECT), "RAYDISTILL_RUNS": str(self.runs), "COLUMNS": "200", **(env or {})},
            )
        self._started.append(Command(process, log))
        return self._started[-1]

    def run(self, *arguments: str | Path, code: int = 0, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a command and return its output."""
        command = self.start(*arguments, env=env, cwd=cwd)
        assert command.end() == code, command.output
        return command.output

    def close(self) -> None:
        for command in self._started:
            kill(command.family())
            command.process.wait()


def result(run_dir: Path) -> dict[str, Any]:
    """What a run or sweep has recorded of itself."""
    return dict(json.loads(RunDir(run_dir).result.read_text()))


def outcomes(run_dir: Path) -> dict[str, Outcome]:
    """How each trial of a sweep that has ended did."""
    if not RunDir(run_dir).events.exists():
        return {}
    log = RunLog(RunDir(run_dir).events)
    trials = sorted({Path(stage).parts[1] for stage in log.stages if stage.startswith("trials/")} | log.fold.rows.keys())
    return {trial: outcome for trial in trials if (outcome := log.fold.outcome_of(trial)) is not None}


def records(run_dir: Path, kind: str, stage: str = "student") -> list[dict[str, Any]]:
    """A stage's events of one kind; `run_dir` may be a trial's."""
    return events_of(RunDir(run_dir).stage(stage).root, kind)


@pytest.fixture
def distill(tmp_path: Path) -> Iterator[Distill]:
    commands = Distill(tmp_path)
    yield commands
    commands.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@dataclass
class RayNode:
    """`ray start --block` and everything under it."""

    address: str
    process: subprocess.Popen[bytes]

    def workers(self) -> list[psutil.Process]:
        """The Ray Train workers on this node."""
        return [process for process in family(self.process) if is_worker(process)]


@dataclass
class RayCluster:
    """A head and its nodes, each with an address of its own in 127.0.0.0/8, token authentication on."""

    folder: Path
    cpus: int
    port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)
    nodes: list[RayNode] = field(default_factory=list)
    """The head first."""
    head_options: tuple[str, ...] = ()
    head_env: dict[str, str] = field(default_factory=dict)
    """Further ones of `ray start --head`."""
    _serial: int = 1
    _ending: list[RayNode] = field(default_factory=list)

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def env(self) -> dict[str, str]:
        """What a driver on this cluster needs."""
        return {
            "RAY_ADDRESS": f"127.0.0.2:{self.port}",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
        }

    def add(self, wrapper: Sequence[str] = ()) -> RayNode:
        """Start a node, the head first. `wrapper`: a command that runs the command after it."""
        self._serial += 1
        address = f"127.0.0.{self._serial}"
        options = [f"--address=127.0.0.2:{self.port}"]
        if not self.nodes:
            self.token_file.write_text(secrets.token_hex(32))
            options = [
                "--head",
                f"--port={self.port}",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={self.dashboard_port}",
                f"--ray-client-server-port={free_port()}",
                *self.head_options,
            ]
        log = self.folder / f"node-{self._serial}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [
                    *wrapper,
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    *options,
                    f"--node-ip-address={address}",
                    f"--temp-dir={self.folder}/{self._serial}",
                    f"--num-cpus={self.cpus}",
                    "--min-worker-port=0",
                    f"--dashboard-agent-listen-port={free_port()}",
                    "--max-worker-port=0",
                    "--object-store-memory=100000000",
                    "--disable-usage-stats",
                    "--block",
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
                env={
                    **clean,
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN_PATH": str(self.token_file),
                    "HOME": str(self.folder),
                    **({} if self.nodes else self.head_env),
                    "RAY_health_check_period_ms": "1000",  # by default the head asks a dead node five times in 15 s
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                },
            )
        node = RayNode(address, process)
        self.nodes.append(node)
        started = Command(process, log)
        wait_until(lambda: "Ray runtime started" in started.output, "start of a Ray node", started)
        return node

    def kill(self, node: RayNode) -> None:
        """The node is gone, as when its power is."""
        self.nodes.remove(node)
        kill(family(node.process))
        node.process.wait()

    def announce_end(self, node: RayNode) -> None:
        """The node is asked to end, as by a cloud or by Kubernetes: Ray announces that, and ends it within 30 s."""
        self.nodes.remove(node)
        node.process.send_signal(signal.SIGTERM)
        self._ending.append(node)

    def remove(self, node: RayNode) -> None:
        """Stop a node in order: it takes its leave from the head."""
        for process in family(node.process):
            with contextlib.suppress(psutil.Error):
                if process.name() == "raylet":  # its name, since each agent's command line holds the word
                    process.send_signal(signal.SIGTERM)
                    process.wait(30)
        self.kill(node)

    def close(self) -> None:
        for node in reversed([*self.nodes, *self._ending]):
            kill(family(node.process))
            node.process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the cluster come last: a third of a core is what its idle processes take from all others."""
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()) and "tests/integration/" in item.nodeid)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """Two nodes of three CPUs each. Not under pytest's folder: a socket's path may have 107 characters."""
    if sys.platform != "linux":
        pytest.skip("several Ray nodes on one machine need Linux's 127.0.0.0/8")
    folder = Path(tempfile.mkdtemp(prefix="rd-"))
    nodes = RayCluster(folder, cpus=3)
    try:
        nodes.add()
        nodes.add()
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
