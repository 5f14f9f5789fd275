"""The tier without Ray: jobs in processes of ranks, struck at a random write or moment, then carried on to their end."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.storm import jobs
from tests.faults.storm.children import Ended, Job
from tests.faults.storm.fault_points import FILLER, Action, FaultPoint
from tests.faults.storm.oracle import cache_losses, delivery_losses, lock_losses, sent_numbers, stage_losses
from tests.faults.storm.table import Fault, Trial
from tests.run_log import events_of
from tests.trainables.jobs import config, write_teacher
from trainables.rundir import RunDir, StageDir

DISK_MIB = 64
KILL_AT_WRITE, KILL_AT_ANY_TIME = "kill -9 at a write", "kill -9 at any time"
STOP_AT_WRITE, STOP_AT_ANY_TIME = "SIGSTOP at a write", "SIGSTOP at any time"
DISK_FULL, CLOCK_JUMPS = "disk full at a write", "clock jumps at a write"
ACTIONS: dict[str, Action] = {KILL_AT_WRITE: "kill", STOP_AT_WRITE: "stop", DISK_FULL: "fill", CLOCK_JUMPS: "jump"}
KINDS = (*ACTIONS, KILL_AT_ANY_TIME, STOP_AT_ANY_TIME)
MAX_FAULTS = 5


@dataclass(frozen=True)
class Workload:
    """A kind of job."""

    name: str
    world_size: int
    start: Callable[[Path, list[FaultPoint | None]], Job]
    """From its folder and each rank's fault point."""
    is_done: Callable[[Path], bool]
    losses: Callable[[Path, Path], Iterable[str]]
    """From the folders of an undisturbed job and of one that was struck."""


@dataclass
class Reference:
    """An undisturbed job: its folder, each rank's writes by kind of file, and its seconds."""

    folder: Path
    writes: list[Counter[str]]
    seconds: float


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = DISK_MIB) -> Iterator[bool]:
    """Mount a file system of so many MiB at `folder`; False, and nothing is mounted, where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


@dataclass
class ProcessTier:
    """Trials of workloads below one folder, in which `can_fill` says whether its disk may be filled."""

    disk: Path
    rng: random.Random
    can_fill: bool
    max_faults: int = MAX_FAULTS
    """Of one trial."""
    _references: dict[str, Reference] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    @property
    def kinds(self) -> list[str]:
        """Kinds of faults that are possible here."""
        return [kind for kind in KINDS if kind != DISK_FULL or self.can_fill]

    def trial(self, workload: Workload, kinds: Iterable[str] | None = None) -> Trial:
        """Strike a job up to `max_faults` times, let it end, and look what is lost."""
        reference = self._reference(workload)
        folder = self._new_folder(workload)
        faults, losses = list[Fault](), list[str]()
        for _ in range(self.rng.randint(1, self.max_faults)):
            kind = self.rng.choice(list(kinds or self.kinds))
            struck, wrong = self._strike(workload, folder, reference, kind)
            faults += [Fault(kind, workload.name)] * struck
            losses += [f"{kind}: {each}" for each in wrong]
            if workload.is_done(folder):
                break
        if not losses and not workload.is_done(folder):
            with workload.start(folder, [None] * workload.world_size) as job:
                losses += [f"afterwards: {each}" for ended in job.end() for each in unless_ended_well(ended)]
        if not losses:
            losses += workload.losses(reference.folder, folder)
            losses += lock_losses(folder)
        if not losses:  # one with a loss stays, to look at
            shutil.rmtree(folder)
        return Trial(workload.name, tuple(faults), tuple(losses))

    def _reference(self, workload: Workload) -> Reference:
        if workload.name not in self._references:
            folder, began_s = self._new_folder(workload), time.monotonic()
            with workload.start(folder, [None] * workload.world_size) as job:
                ended = job.end()
            assert all(each.code == 0 for each in ended), ended
            reference = Reference(folder, [each.value for each in ended], time.monotonic() - began_s)
            self._references[workload.name] = reference
        return self._references[workload.name]

    def _new_folder(self, workload: Workload) -> Path:
        folder = self.disk / f"{next(self._serial)}-{workload.name.replace(' ', '-')}"
        folder.mkdir()
        return folder

    def _strike(self, workload: Workload, folder: Path, reference: Reference, kind: str) -> tuple[bool, list[str]]:
        """Run the job with one fault. Returns whether it struck, and what was wrong with how the job ended."""
        marker = self.disk.parent / f"{self.disk.name}-struck"
        marker.unlink(missing_ok=True)
        points: list[FaultPoint | None] = [None] * workload.world_size
        if kind in ACTIONS:
            rank = self.rng.choice([rank for rank, writes in enumerate(reference.writes) if writes])
            points[rank] = self._point(kind, reference.writes[rank], marker)
        else:
            rank = self.rng.randrange(workload.world_size)
        after_s, pause_s = self.rng.uniform(0, reference.seconds), self.rng.uniform(0.05, 0.5)
        with workload.start(folder, points) as job:
            if kind in (KILL_AT_ANY_TIME, STOP_AT_ANY_TIME):
                _wait(job, lambda: False, after_s)
                number = signal.SIGKILL if kind == KILL_AT_ANY_TIME else signal.SIGSTOP
                struck = job.signal(rank, number)
            else:
                _wait(job, marker.exists)
                struck = marker.exists()
            if kind in (STOP_AT_WRITE, STOP_AT_ANY_TIME) and struck:
                time.sleep(pause_s)
                job.signal(rank, signal.SIGCONT)
            ended = job.end()
        (self.disk / FILLER).unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
        return struck, [each for number, one in enumerate(ended) for each in _wrong(kind, struck and number == rank, one, struck)]

    def _point(self, kind: str, writes: Counter[str], marker: Path) -> FaultPoint:
        written = self.rng.choice(sorted(writes))  # each kind of file as often as any other, however often it is written
        number, free_bytes = self.rng.randint(1, writes[written]), self.rng.choice((0, 4096, 16384))
        jump_s = self.rng.choice((-1, 1)) * self.rng.uniform(1, 7200)
        return FaultPoint(ACTIONS[kind], written, number, marker, disk=self.disk, free_bytes=free_bytes, jump_s=jump_s)


def _wait(job: Job, event: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Until the event, the end of the job, or so many seconds."""
    deadline = time.monotonic() + timeout_s
    while not event() and job.is_running() and time.monotonic() < deadline:
        time.sleep(0.002)


def _wrong(kind: str, is_struck: bool, ended: Ended, struck: bool) -> Iterator[str]:
    """What is wrong with how a rank ended, `is_struck` the one that the fault was in."""
    kills, fills = kind in (KILL_AT_WRITE, KILL_AT_ANY_TIME) and struck, kind == DISK_FULL and struck
    if kills and is_struck and ended.code == -signal.SIGKILL:
        return
    if kills and (ended.is_orphan or (ended.failure is not None and ended.failure.kind == "lost_peer")):
        return
    if fills and ended.failure is not None:
        in_one_line = "\n" not in str(ended.failure)
        if in_one_line and (ended.refused or ended.failure.kind in ("disk", "lost_peer")):
            return
    yield from unless_ended_well(ended)


def unless_ended_well(ended: Ended) -> Iterator[str]:
    """What is wrong with how a rank ended that no fault was in."""
    if ended.code != 0:
        yield f"ended with {'a hang' if ended.code is None else ended.code}: {ended.failure}"


def training(name: str, shared: Path, world_size: int, *, cached: bool = False, **sections: Any) -> Workload:
    """Train a small student. `cached`: its teacher's logits are written and read below its folder."""
    weights = write_teacher(shared / f"{name}.safetensors")

    def start(folder: Path, points: list[FaultPoint | None]) -> Job:
        teacher = {"weights": weights, **({"cache": str(folder / "cache")} if cached else {})}
        optim, train = {"epochs": 2, "lr": 0.05}, {"checkpoint_every": 4, "log_every": 2}
        settings = config(folder / "student", teacher=teacher, optim=optim, train=train, **sections)
        return Job(world_size, jobs.train, folder, settings, points)

    def losses(whole: Path, struck: Path) -> Iterator[str]:
        yield from stage_losses(StageDir(whole / "student"), StageDir(struck / "student"))

    return Workload(name, world_size, start, lambda folder: bool(events_of(folder / "student", "summary")), losses)


def filling(name: str, shared: Path, world_size: int) -> Workload:
    """Fill a teacher's cache."""
    weights = write_teacher(shared / f"{name}.safetensors")

    def start(folder: Path, points: list[FaultPoint | None]) -> Job:
        teacher = {"weights": weights, "cache": str(folder / "cache"), "cache_epochs": 2}
        settings = config(folder / "cache-stage", teacher=teacher, optim={"epochs": 2}, data={"augment": "pad_crop_flip"})
        return Job(world_size, jobs.fill_cache, folder, settings, points)

    def losses(whole: Path, struck: Path) -> Iterator[str]:
        yield from cache_losses(whole / "cache", struck / "cache")

    return Workload(name, world_size, start, lambda folder: bool(events_of(folder / "cache-stage", "summary")), losses)


def delivering(name: str, database: Path) -> Workload:
    """Record a run and send its records to an MLflow store on SQLite."""
    run = "run"

    def start(folder: Path, points: list[FaultPoint | None]) -> Job:
        return Job(1, jobs.deliver, folder, f"sqlite:///{database}", run, points)

    def losses(whole: Path, struck: Path) -> Iterator[str]:
        run_dir = RunDir(struck / run)
        expected = sent_numbers(run_dir)
        if len(expected) != 2 * jobs.NUM_STEPS + 2:
            yield f"{len(expected)} numbers are on record"
        yield from delivery_losses(database, run_dir, jobs.KEY, expected)

    return Workload(name, 1, start, lambda folder: False, losses)


def workloads(shared: Path) -> list[Workload]:
    """All of this tier. `shared`: a folder for teachers and the MLflow store, on another disk."""
    from service.tracking.sender import create_database

    create_database(shared / "mlflow.db", (shared / "mlartifacts").as_uri())
    augmented = {"image_size": 8, "augment": "pad_crop_flip", "device_augment": {"random_erasing": 0.5}}
    return [
        training("train", shared, 1, model="convnet_small", precision="fp32", data=augmented),
        training("train, 2 ranks", shared, 2, data=augmented),
        training("train, cached logits", shared, 1, cached=True, data=augmented),
        filling("cache", shared, 1),
        filling("cache, 2 ranks", shared, 2),
        delivering("MLflow on SQLite", shared / "mlflow.db"),
    ]
