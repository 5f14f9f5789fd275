"""The tier with a real Ray: `distill` commands whose workers, drivers, raylets, GCS, teacher actors and nodes are struck.

Where a fault ends the command it is given again with `--continue`, as a scheduler does. What it leaves is held against what the
same command leaves when nothing strikes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.storm.oracle import TRACEBACK, lock_losses
from tests.faults.storm.table import Fault, Trial
from tests.integration.conftest import Command, Distill, RayCluster, family, is_worker, kill, name_of, title

MAX_FAULTS = 8
"""Of one trial."""
RESUME = "resume"
"""The workload of whatever goes on after a fault that ended its command."""
RUN = "RUN"
"""In a scenario's words and settings: its run's folder."""
PATIENCE_S = 480.0
"""For one more line of a command's output, or its end."""
GONE_S = 60.0
"""For what a killed command leaves behind; Ray's two agents a node take a minute to go, and hold nothing."""


@dataclass(frozen=True)
class Scenario:
    """A command and the faults that it has to stand."""

    workload: str
    words: tuple[str | Path, ...]
    """The command and its experiment."""
    settings: dict[str, str]
    kinds: tuple[str, ...]
    losses: Callable[[Path, Path], Iterator[str]]
    """From the run folders of an undisturbed command and of one that was struck."""
    has_out: bool = True
    """Whether it takes `--out` and `--continue`; else the same command again goes on."""
    on_cluster: bool = False


WORKER_KILLED, WORKER_STOPPED, WORKER_HUNG = "kill -9 of a worker", "SIGSTOP, SIGCONT of a worker", "SIGSTOP of a worker for good"
DRIVER_KILLED, DRIVER_STOPPED, INTERRUPTED = "kill -9 of the driver", "SIGSTOP, SIGCONT of the driver", "SIGTERM to the driver"
RAYLET_KILLED, RAYLET_STOPPED = "kill -9 of a raylet", "SIGSTOP, SIGCONT of a raylet"
GCS_KILLED, GCS_STOPPED = "kill -9 of the GCS", "SIGSTOP, SIGCONT of the GCS"
GCS_RESTARTED, STORE_FULL = "kill -9 of a GCS that comes back", "object stores full"
ACTOR_KILLED, NODE_KILLED, NODE_ENDED = "kill -9 of a teacher actor", "kill -9 of a node", "SIGTERM to a node"
JOB_KILLED = "kill -9 of a job's driver"
OF_RUNS = (WORKER_KILLED, WORKER_STOPPED, WORKER_HUNG, DRIVER_KILLED, DRIVER_STOPPED, INTERRUPTED)
OF_CLUSTERS = (NODE_KILLED, NODE_ENDED, RAYLET_STOPPED, GCS_RESTARTED, GCS_STOPPED, STORE_FULL)
OF_LOCAL_RAY = (RAYLET_KILLED, RAYLET_STOPPED, GCS_KILLED, GCS_STOPPED)
ENDS = {DRIVER_KILLED: -signal.SIGKILL, INTERRUPTED: 130, RAYLET_KILLED: 2, GCS_KILLED: 2, JOB_KILLED: 1}
"""Kinds that end the command, and its exit code."""
LAST_LINES = {INTERRUPTED: "interrupted", RAYLET_KILLED: "error: ", GCS_KILLED: "error: "}
"""What stands in a line at its end."""


@dataclass
class RayTier:
    """Trials of scenarios; use as a context."""

    folder: Path
    rng: random.Random
    cluster: RayCluster | None = None
    _whole: dict[str, tuple[Path, float]] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=itertools.count)
    _others: list[psutil.Process] = field(default_factory=list)
    """What has to go when the command ends."""

    def __enter__(self) -> RayTier:
        self.folder.mkdir()
        self.distill = Distill(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.distill.close()

    def trial(self, scenario: Scenario, kinds: tuple[str, ...] | None = None) -> Trial:
        """Strike a command several times, carry it on, and look what is lost."""
        try:
            whole, seconds = self._undisturbed(scenario)
        except AssertionError as error:
            return Trial(scenario.workload, (), (f"without any fault it {error}",))
        run = self.distill.runs / f"{next(self._serial)}-{scenario.workload.replace(' ', '-')}"
        faults, losses = list[Fault](), list[str]()
        command = self._start(scenario, run)
        for number in range(self.rng.randint(3, MAX_FAULTS)):
            kind = self.rng.choice(kinds or scenario.kinds)
            # The first at any time, the others soon after it: most of a command's seconds are those of its start.
            if not self._wait(command, kind, seconds * (0.1 if number else 0.9)):
                break
            has_begun = (run / "result.json").exists() and bool(command.output)
            if not self._strike(kind, command):
                continue
            faults.append(Fault(kind, RESUME if any(fault.kind in ENDS for fault in faults) else scenario.workload))
            if kind in ENDS:
                losses += self._ending_losses(kind, command, has_begun)
                command = self._start(scenario, run)
        code = self._end(command)
        if code != 0:
            losses.append(f"ended with {code}: {command.output.strip()[-300:]}")
        losses += [f"{TRACEBACK} in the output"] if TRACEBACK in command.output else []
        if code == 0:
            losses += [*scenario.losses(whole, run), *(lock_losses(run) if run.exists() else [])]
        return Trial(scenario.workload, tuple(faults), tuple(losses))

    def _undisturbed(self, scenario: Scenario) -> tuple[Path, float]:
        key = str((scenario.words[-2:], scenario.settings))  # the same command on a cluster and as a job, too
        if key not in self._whole:
            run, began_s = self.distill.runs / f"whole-{len(self._whole)}", time.monotonic()
            command = self._start(scenario, run)
            code = self._end(command)
            assert code == 0, f"ended with {code}: {command.output.strip()[-300:]}"
            self._whole[key] = run, time.monotonic() - began_s
        return self._whole[key]

    def _start(self, scenario: Scenario, run: Path) -> Command:
        settings = [word for key, value in scenario.settings.items() for word in ("--set", f"{key}={value}")]
        words = [str(word).replace(RUN, str(run)) for word in (*scenario.words, *settings)]
        out = ["--out", str(run), "--continue"] if scenario.has_out else []
        # Of what else this machine does, a job's memory is not to blame.
        env = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20", "RAY_memory_monitor_refresh_ms": "0"}
        if scenario.on_cluster:
            assert self.cluster is not None
            env |= self.cluster.env
        return self.distill.start(*words, *out, env=env)

    def _wait(self, command: Command, kind: str, most_s: float) -> bool:
        """For a random time, from when there is what the fault strikes. Whether the command still runs."""
        if kind in (WORKER_KILLED, WORKER_STOPPED, WORKER_HUNG, ACTOR_KILLED, JOB_KILLED):
            while command.process.poll() is None and not self._targets(kind, command):
                time.sleep(0.1)
            most_s = min(most_s, 20)  # workers come late and do not stay long
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(self.rng.uniform(0, most_s))
        return command.process.poll() is None

    def _end(self, command: Command) -> int | str:
        shown = None
        while shown != (shown := command.output):
            with contextlib.suppress(AssertionError):
                return command.end(PATIENCE_S)
        kill(command.family())
        return "a hang"

    def _targets(self, kind: str, command: Command) -> list[psutil.Process]:
        """Processes that a kind of fault may strike: of the command, and where there is one of the cluster's nodes."""
        if kind in (DRIVER_KILLED, DRIVER_STOPPED, INTERRUPTED):
            return command.family()[:1]
        of_nodes = [process for node in (self.cluster.nodes if self.cluster else []) for process in family(node.process)]
        return [process for process in (*command.family(), *of_nodes) if IS_TARGET[kind](process)]

    def _strike(self, kind: str, command: Command) -> bool:
        """Do it, if there is what it strikes."""
        if kind in (NODE_KILLED, NODE_ENDED):
            return self._end_node(kind)
        if kind == STORE_FULL:
            return self._fill_object_stores(command)
        targets = self._targets(kind, command)
        if not targets:
            return False
        target = self.rng.choice(targets)
        of_nodes = self.cluster.nodes if self.cluster else []
        self._others = command.family()[1:] + [process for node in of_nodes for process in node.workers()]
        with contextlib.suppress(psutil.NoSuchProcess):
            if kind in STOPPED:
                target.suspend()
                time.sleep(self.rng.uniform(0.5, 3))
                target.resume()
            else:
                target.send_signal({INTERRUPTED: signal.SIGTERM, WORKER_HUNG: signal.SIGSTOP}.get(kind, signal.SIGKILL))
            return True
        return False

    def _end_node(self, kind: str) -> bool:
        """A node that is not the head goes, and another comes a few seconds later."""
        assert self.cluster is not None
        node = self.cluster.nodes[-1]
        (self.cluster.kill if kind == NODE_KILLED else self.cluster.announce_end)(node)
        time.sleep(self.rng.uniform(0, 8))
        self.cluster.add()
        return True

    def _fill_object_stores(self, command: Command) -> bool:
        """For some seconds, of all nodes. Whether the command still ran when they were full."""
        assert self.cluster is not None
        words = [sys.executable, "-m", "tests.faults.storm.object_store", f"{self.rng.uniform(1, 10):.1f}"]
        with subprocess.Popen(words, env=os.environ | self.cluster.env, stdout=subprocess.PIPE, text=True) as filler:
            assert filler.stdout is not None
            return filler.stdout.readline() == "full\n" and command.process.poll() is None

    def _ending_losses(self, kind: str, command: Command, has_begun: bool) -> Iterator[str]:
        """What is wrong with the end of a command that was to end by a fault, and with what it leaves running.

        `has_begun`: whether the command had opened its run by then; before that SIGTERM may end an interpreter that is still
        starting, or a command that has nothing to say of a run.
        """
        code, lines = self._end(command), command.output.strip().splitlines()
        early = -signal.SIGTERM if kind == INTERRUPTED and not has_begun else 0
        if code not in (0, early, ENDS[kind]):  # 0: it had just come to its end
            yield f"{kind}: ended with {code}: {lines[-3:]}"
        elif has_begun and code and kind in LAST_LINES and not any(LAST_LINES[kind] in line for line in lines[-2:]):
            yield f"{kind}: its last line is {lines[-1:]}"
        if TRACEBACK in command.output:
            yield f"{kind}: a stack trace in the output"
        _, left = psutil.wait_procs([process for process in self._others if "Agent" not in title(process)], timeout=GONE_S)
        left = [process for process in left if "Agent" not in title(process)]  # one that had just started had no title yet
        if left:
            yield f"{kind}: {len(left)} processes still run, such as {title(left[0])[:80]}"
            kill(left)


STOPPED = {WORKER_STOPPED, DRIVER_STOPPED, RAYLET_STOPPED, GCS_STOPPED}
IS_TARGET: dict[str, Callable[[psutil.Process], bool]] = {
    **dict.fromkeys((WORKER_KILLED, WORKER_STOPPED, WORKER_HUNG), is_worker),
    **dict.fromkeys((RAYLET_KILLED, RAYLET_STOPPED), lambda process: name_of(process) == "raylet"),
    **dict.fromkeys((GCS_KILLED, GCS_STOPPED, GCS_RESTARTED), lambda process: name_of(process) == "gcs_server"),
    ACTOR_KILLED: lambda process: "ray::TeacherActor" in title(process),
    JOB_KILLED: lambda process: "-m service train" in title(process) and "submit" not in title(process),
}
