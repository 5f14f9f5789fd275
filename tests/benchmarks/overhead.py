"""What watching costs: phase times, telemetry, records and tracking on, beside all of them off; images per second.

One job in one process goes on through stretches of ten seconds, watched and unwatched in turn, so that whatever else the
machine does meets both. As in a run, a process of its own sends the records to an SQLite store; while the job is unwatched
that process stands still. It looks for records every five seconds, and at once when it may go on: shorter stretches would count
that too often. What the recorder does in a process of its own, a thread of the job's does here.
"""

import contextlib
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from service.config.experiment import load
from service.runs.events import event
from service.runs.mlflow_view import MlflowView
from service.runs.run_directory import begin_run
from service.tracking.stores import default_uri
from service.tracking.sync import Syncing
from tests.benchmarks.pairs import Pair, train_on
from tests.benchmarks.process import ROOT, environment
from tests.benchmarks.rounds import Bar, Comparison
from tests.run_log import LocalRecorder
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group
from trainables.engine.job import Job
from trainables.engine.train import build
from trainables.metrics.phase_timer import PhaseTimer
from trainables.rundir import RunDir
from trainables.worker.entry_points import start_logging
from trainables.worker.node_telemetry import node_telemetry
from trainables.worker.reporter import Reporter

STAGE = "student"
PATIENCE_S = 120.0


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    """Two jobs: one whose steps take a fifth of a second, and the digits recipe's, whose steps take a hundredth."""
    torch.set_num_threads(1)
    resnets = Pair("resnet20", "resnet8", 32, 64, warmup_steps=0, steps=4 if short else 60)
    convnets = Pair("convnet_large", "convnet_small", 8, 64, warmup_steps=0, steps=50 if short else 1000)
    with in_stretches(resnets, 20) as of_resnets, in_stretches(convnets, 5) as of_convnets:
        yield [
            Comparison(f"overhead, {pair.teacher} → {pair.student}: watched / unwatched", "images/s", measure, Bar("≥", 0.99))
            for pair, measure in ((resnets, of_resnets), (convnets, of_convnets))
        ]


@contextlib.contextmanager
def in_stretches(pair: Pair, log_every: int, num_stretches: int = 4) -> Iterator[Callable[[int], tuple[float, float]]]:
    """A job that lives through all rounds; a round trains it on by `num_stretches` of `pair.steps` steps each."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = RunDir(Path(name) / "run")
        config = pair.config(Path(name), num_workers=1)
        config = config.model_copy(
            update={
                "output_dir": str(run_dir.stage(STAGE).root),
                "train": config.train.model_copy(update={"log_every": log_every}),
            }
        )
        job = build(config, Group(), ignore, no_telemetry)
        with recording(run_dir) as recorder, tracking(run_dir) as tracker:

            def measure(number: int) -> tuple[float, float]:
                seconds = dict.fromkeys((watched, unwatched), 0.0)
                for stretch in range(num_stretches):
                    # ABBA, and BAAB in the next round: what drifts meets both sides alike.
                    watch = (watched, unwatched)[(stretch + stretch // 2 + number) % 2]
                    with watch(job, recorder, tracker):
                        began = time.perf_counter()
                        train_on(job, pair.steps)
                        seconds[watch] += time.perf_counter() - began
                images = pair.steps * pair.global_batch_size * num_stretches / 2
                return images / seconds[watched], images / seconds[unwatched]

            yield measure
        job.close()


@contextlib.contextmanager
def watched(job: Job, recorder: LocalRecorder, tracker: subprocess.Popen[str]) -> Iterator[None]:
    """All that a worker and its driver do beside training."""
    start_logging(job.config, job.group, recorder)
    with DiskWriter() as disk, node_telemetry(job.config.train.telemetry_every_s, job.group) as telemetry:
        reporter = Reporter(job.config, recorder, job.group, disk)
        job.metrics.timer, job.report, job.telemetry = PhaseTimer(job.group.device), reporter.report, telemetry
        tracker.send_signal(signal.SIGCONT)
        yield
        tracker.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def unwatched(job: Job, recorder: LocalRecorder, tracker: subprocess.Popen[str]) -> Iterator[None]:
    """None of it; the loop still reads its sums at each log step, to stop at a loss that is not finite."""
    logging.getLogger("raydistill").setLevel(logging.WARNING)
    job.metrics.timer, job.report, job.telemetry = NoTimer(job.group.device), ignore, no_telemetry
    yield


def ignore(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
    """A report that goes nowhere."""


def no_telemetry(whole: bool = False) -> dict[str, float]:
    """Nothing was looked at."""
    return {}


class NoTimer(PhaseTimer):
    """Times nothing."""

    def start(self) -> None: ...

    def mark(self, phase: str) -> None: ...

    def begin_micro_batch(self) -> None: ...

    def stop(self) -> None: ...


@contextlib.contextmanager
def recording(run_dir: RunDir) -> Iterator[LocalRecorder]:
    """A run that goes on meanwhile, and what writes its log."""
    begin_run(load("digits"), "train", run_dir, run_dir.root.parent)
    recorder = LocalRecorder(run_dir.root)
    with contextlib.closing(recorder.actor):
        recorder.record([event("session_begun")])
        yield recorder


@contextlib.contextmanager
def tracking(run_dir: RunDir) -> Iterator[subprocess.Popen[str]]:
    """A process that sends the stage's records as a driver does; stopped until it is told to go on.

    Raises:
        RuntimeError: it did not begin, or the store did not take every record.
    """
    command = [sys.executable, "-m", "tests.benchmarks.overhead", str(run_dir.root)]
    with subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        until = time.monotonic() + PATIENCE_S
        while not (run_dir.root / "mlflow.db").exists():  # MLflow's import and the making of its tables are the driver's start
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise RuntimeError(f"no tracking: {process.communicate()[0]}")
            time.sleep(0.2)
        time.sleep(3.0)
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate("done\n")
        if process.returncode:
            raise RuntimeError(f"tracking failed: {said}")


def main(run_dir: RunDir) -> int:
    """The driver's part: exit code 1 where records are left over."""
    syncing = Syncing(run_dir, default_uri(run_dir.root), "benchmarks", MlflowView)
    syncing.start()
    sys.stdin.readline()
    delivery = syncing.close(PATIENCE_S)
    print(delivery.message)
    return int(not delivery.is_complete)


if __name__ == "__main__":
    sys.exit(main(RunDir(Path(sys.argv[1]))))
