"""`distill train digits` from the command to its first training step, beside a bare no-op `TorchTrainer.fit` with its `ray.init`.

Both from the start of a fresh process. The bar's peer is the whole of the bare process up to the return of `fit`; a second
line, without a bar, takes the moment at which its train function is entered, before the workers are put away again.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.process import ROOT, answer_of, environment
from tests.benchmarks.rounds import Bar, Comparison
from tests.run_log import events_of
from trainables.rundir import RunDir

PATIENCE_S = 300.0


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    yield [line for num_workers in ((1,) if short else (1, 2)) for line in compare(num_workers)]


def compare(num_workers: int) -> list[Comparison]:
    """One world size; the second line tells of the rounds that the first has measured."""
    entries: dict[int, tuple[float, float]] = {}
    title = f"startup, {num_workers} worker{'s' if num_workers > 1 else ''}"

    def measure(number: int) -> tuple[float, float]:
        began = time.time()
        if number % 2:
            ours = first_step_s(num_workers)
            began = time.time()
            bare = answer_of(["-m", "tests.benchmarks.bare", str(num_workers)])
        else:
            bare = answer_of(["-m", "tests.benchmarks.bare", str(num_workers)])
            ours = first_step_s(num_workers)
        entries[number] = ours, bare["entered"] - began
        return ours, bare["ended"] - began

    return [
        Comparison(f"{title}: first step / bare fit", "s", measure, Bar("≤", 1.2)),
        Comparison(f"{title}: first step / entry of bare fit's function", "s", entries.__getitem__, None),
    ]


def first_step_s(num_workers: int) -> float:
    """Seconds from the command to the end of the teacher's first step, in which the run is then interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder) / "run")
        command = [
            "train",
            "digits",
            "--out",
            str(run_dir.root),
            "--runs",
            folder,
            "--set",
            "train.log_every=1",
            "--set",
            f"scale.num_workers={num_workers}",
            "--set",
            "data.loader_workers=1",
        ]
        began = time.time()
        with subprocess.Popen(
            [sys.executable, "-m", "service", *command],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                while process.poll() is None and time.time() < began + PATIENCE_S:
                    if steps := events_of(run_dir.stage("teacher").root, "step"):
                        return float(steps[0]["time_ms"]) / 1e3 - began
                    time.sleep(0.05)
                raise RuntimeError(f"distill train made no step in {time.time() - began:.0f} s")
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate()
