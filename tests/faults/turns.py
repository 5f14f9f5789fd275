"""Trainings side by side that take turns: one runs a block of steps while the others wait and use no core.

Blocks of all of them alternate within seconds, so that a machine whose speed changes changes it for all: what one training takes
less than another is the median over rounds, each of which compares blocks that ran next to each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from statistics import fmean, median
from typing import Any

import psutil

from service.doctor.read_run import Recording
from tests.faults.runs import WARMUP_STEPS, Bench, Training, file_report, injected, write_summary
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.engine.job import Job
from trainables.engine.records import summarize
from trainables.engine.train import build, run_job
from trainables.metrics.telemetry import usable_cores

BLOCK_S = 0.4
FEWEST_STEPS, MOST_STEPS = 4, 200
"""Of a block, which is as near to `BLOCK_S` as these allow."""
FEWEST_ROUNDS, MOST_ROUNDS = 6, 16
ERROR_POINTS = 1.5
"""Rounds are enough once no gain has a larger standard error."""
MANY_IMAGES = "data.path={many_images}"
"""Unless a training has data of its own: no epoch ends between its steps."""
ENDLESS = ("train.max_steps=100000", "train.log_every=100000")
"""Steps follow each other without a log line between them."""


class TurnsOverError(Exception):
    """The training's last turn is over."""


class TurnTelemetry:
    """The node's load in one training's turns."""

    def __init__(self) -> None:
        self._cpu_pct: list[float] = []

    def begin(self) -> None:
        """Of a turn."""
        psutil.cpu_percent()

    def end(self) -> None:
        """Of a turn."""
        self._cpu_pct.append(psutil.cpu_percent())

    def __call__(self, whole: bool = False) -> dict[str, float]:
        return {"node0/cpu_pct": fmean(self._cpu_pct), "node0/cpu_cores": float(usable_cores())}


class Turns:
    """One rank's: before each step that begins a block it waits for its turn, and so do its loader's threads.

    The waits lie outside all that the job measures. A thread that has begun a part of a batch finishes it while others have their
    turn; it begins the next one so much later.
    """

    def __init__(self, job: Job, pipe: Connection, telemetry: TurnTelemetry) -> None:
        self._pipe, self._telemetry = pipe, telemetry
        self._steps_left, self._began_s, self._ended_s = 0, 0.0, 0.0
        self._running, self._thread = threading.Event(), threading.local()
        start_step, reader = job.metrics.start_step, job.train_loader._reader._samples
        fill = reader.fill

        def start_in_turn(step: int) -> None:
            self._wait_for_turn()
            start_step(step)

        def fill_in_turn(*arguments: Any) -> Any:
            self._running.wait()
            time.sleep(getattr(self._thread, "ahead_s", 0.0))
            result = fill(*arguments)
            self._thread.ahead_s = 0.0 if self._running.is_set() else time.perf_counter() - self._ended_s
            return result

        job.metrics.start_step = start_in_turn  # type: ignore[method-assign]
        reader.fill = fill_in_turn  # type: ignore[method-assign]

    def _wait_for_turn(self) -> None:
        if not self._steps_left:
            self._ended_s = time.perf_counter()
            self._running.clear()
            if self._began_s:
                self._telemetry.end()
            self._pipe.send(self._ended_s - self._began_s)
            self._steps_left = self._pipe.recv()
            self._running.set()
            if not self._steps_left:
                raise TurnsOverError
            self._telemetry.begin()
            self._began_s = time.perf_counter()
        self._steps_left -= 1


def train_in_turns(group: Group, config: TrainConfig, faults: Mapping[str, float], address: str, number: int) -> None:
    """A timing run whose steps are those that its controller asks for; the first training's records are complete."""
    telemetry = TurnTelemetry()
    with Client(address) as pipe:
        pipe.send((number, group.rank))
        with (
            contextlib.closing(build(config, group, file_report(config, group), telemetry)) as job,
            injected(job, faults),
        ):
            Turns(job, pipe, telemetry)
            with contextlib.suppress(TurnsOverError):
                run_job(job)
            if number == 0:
                write_summary(job, summarize(job))


@dataclass(frozen=True)
class Gain:
    """How much less time an image takes, and the standard error of that."""

    pct: float
    error_points: float = 0.0
    by_means_pct: float | None = None
    """The same from the sums of all rounds, as the doctor reads means: far from `pct` where bursts disturbed some rounds."""

    @classmethod
    def of(cls, pct_by_round: Sequence[float]) -> Gain:
        """The median of rounds; its error by the median absolute deviation, which single disturbed rounds change little."""
        middle = median(pct_by_round)
        deviation = 1.4826 * median(abs(pct - middle) for pct in pct_by_round)
        return cls(middle, 1.2533 * deviation / len(pct_by_round) ** 0.5)


@dataclass
class Contender:
    """The controller's end of a training that takes turns."""

    training: Training
    pipes: list[Connection]
    block_steps: int = WARMUP_STEPS
    ms_per_image: list[float] = field(default_factory=list)
    """By round."""

    def block(self, steps: int) -> float:
        """Seconds of so many steps. No steps: the last turn is over."""
        for pipe in self.pipes:
            pipe.send(steps)
        return max(pipe.recv() for pipe in self.pipes)

    def warm_up(self) -> None:
        """Wait until it is built, make its first steps, and time a few to find the length of its blocks."""
        for pipe in self.pipes:
            pipe.recv()
        self.block(WARMUP_STEPS)
        steps = round(FEWEST_STEPS * BLOCK_S / self.block(FEWEST_STEPS))
        self.block_steps = min(MOST_STEPS, max(FEWEST_STEPS, steps))

    def measure(self) -> None:
        """One block."""
        images = self.block_steps * self.training.batch * self.training.num_workers
        self.ms_per_image.append(1e3 * self.block(self.block_steps) / images)

    def end(self) -> None:
        """Without waiting for it."""
        for pipe in self.pipes:
            pipe.send(0)


def compare(bench: Bench, ill: Training, fixed: Sequence[Training]) -> tuple[Recording, list[Gain]]:
    """The records of `ill`, and what an image takes less in each of the others, which take turns with it."""
    trainings = [ill, *fixed]
    ranks = [(number, rank) for number, t in enumerate(trainings) for rank in range(t.num_workers)]
    prepared = [bench.prepare(Training(t.num_workers, t.batch, t.faults, (MANY_IMAGES, *t.sets, *ENDLESS))) for t in trainings]
    gains = list[Gain]()
    with ThreadPoolExecutor(len(trainings)) as callers, contextlib.ExitStack() as stack:
        with Listener(None, "AF_UNIX") as listener:
            runs = [
                callers.submit(
                    bench.pool(number).run, t.num_workers, train_in_turns, config, dict(t.faults), listener.address, number
                )
                for number, (t, (_, config)) in enumerate(zip(trainings, prepared, strict=True))
            ]
            for run in runs:
                run.add_done_callback(partial(report_end, listener.address))
            pipes = accept_ranks(listener, len(ranks))
        for pipe in pipes.values():
            stack.callback(pipe.close)  # a rank that waits for its turn reads the end of its pipe
        if len(pipes) == len(ranks):
            contenders = [Contender(t, [pipes[key] for key in ranks if key[0] == number]) for number, t in enumerate(trainings)]
            with contextlib.suppress(EOFError):  # a training has failed, see below
                gains = take_turns(contenders)
                for one, run in reversed(list(zip(contenders, runs, strict=True))):  # the ill one last: it times passes alone
                    one.end()
                    run.result()
    errors = [error for run in runs if (error := run.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, EOFError | ConnectionError | FileNotFoundError)):
        raise error
    return bench.read(*prepared[0]), gains


def accept_ranks(listener: Listener, num_ranks: int) -> dict[tuple[int, int], Connection]:
    """The pipes of all ranks, by training and rank; not of all where a training ends before its ranks are there."""
    pipes = dict[tuple[int, int], Connection]()
    while len(pipes) < num_ranks:
        pipe = listener.accept()
        with contextlib.suppress(EOFError):  # of a rank that died just then, which ends its training
            key = pipe.recv()
            if key is None:
                break
            pipes[key] = pipe
    return pipes


def report_end(address: str, _run: Future[Any]) -> None:
    """Wake `accept_ranks`, which would wait for the ranks of a training that has ended."""
    with contextlib.suppress(OSError), Client(address) as pipe:  # all ranks were there: nobody listens any more
        pipe.send(None)


def take_turns(contenders: Sequence[Contender]) -> list[Gain]:
    """Blocks of all, forwards and backwards in turn, until the gains are sure or `MOST_ROUNDS` were made."""
    for one in contenders:
        one.warm_up()
    ill, *fixed = contenders
    gains = list[Gain]()
    for number in range(1, MOST_ROUNDS + 1):
        for one in contenders if number % 2 else reversed(contenders):
            one.measure()
        gains = [
            replace(
                Gain.of([100 * (1 - ms / ill_ms) for ms, ill_ms in zip(one.ms_per_image, ill.ms_per_image, strict=True)]),
                by_means_pct=100 * (1 - sum(one.ms_per_image) / sum(ill.ms_per_image)),
            )
            for one in fixed
        ]
        if number >= FEWEST_ROUNDS and all(gain.error_points <= ERROR_POINTS for gain in gains):
            break
    return gains
