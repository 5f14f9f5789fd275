"""How time and memory grow with samples, trials, records and run folders: the slopes of docs/scale.md. No Ray is started.

    python -m tests.benchmarks.scale [NAME …] [--largest SHARE] [--json FILE]

Every size is measured in a process of its own, whose peak memory is that of the size alone. `--largest 0.1` measures a tenth of
each size. Seconds are those of one process that nobody disturbs.
"""

import argparse
import hashlib
import json
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.process import answer_of, peak_rss_mib

Figures = dict[str, float]
SHARD_SAMPLES = 2400
"""Photos of 110 KB in a shard of 256 MiB."""


@dataclass(frozen=True)
class Subject:
    """Something that grows: `measure` of a size and an empty folder gives the figures of that size."""

    measure: Callable[[int, Path], Figures]
    sizes: tuple[int, ...]


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def order(size: int, folder: Path) -> Figures:
    """The order of an epoch of `size` samples: a batch of 1024 somewhere in it, shuffled as a whole or in windows."""
    from trainables.data.order import Order

    sizes = [SHARD_SAMPLES] * (size // SHARD_SAMPLES)
    num_samples, figures = sum(sizes), Figures()
    for shuffle in ("full", "window(1000000)"):
        began = time.perf_counter()
        made = Order("train", shuffle, seed=1, num_samples=num_samples, shard_sizes=sizes)
        figures[f"{shuffle} begin_s"] = time.perf_counter() - began
        batches = [np.arange(first, first + 1024) for first in range(num_samples // 2, num_samples // 2 + 10 * 1024, 1024)]
        figures[f"{shuffle} us_per_sample"] = 1e6 / 1024 * min(timed(partial(made.at, 0, batch)) for batch in batches)
    return figures


def index(size: int, folder: Path) -> Figures:
    """Opening a packed set of `size` samples, whose shards are not there: what each process that loads has in memory."""
    from trainables.data.index import File, SplitIndex
    from trainables.data.pack.shard import write_batch
    from trainables.data.sources.records import RecordsSource

    path = folder / "train.rows.arrow"
    if not path.exists():  # in a process of its own, whose memory is not measured
        if os.fork() == 0:
            _write_rows(path, size, write_batch)
            os._exit(0)
        assert os.wait()[1] == 0
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    rows = File(file=path.name, rows=size, bytes=path.stat().st_size, sha256=sha256)
    num_shards = -(-size // SHARD_SAMPLES)
    counts = [min(SHARD_SAMPLES, size - first * SHARD_SAMPLES) for first in range(num_shards)]
    shards = tuple(File(file=f"s{n}.arrow", rows=rows_n, bytes=2**28, sha256="0" * 64) for n, rows_n in enumerate(counts))
    splits = {"train": SplitIndex(rows=rows, shards=shards)}
    listing = type("Listing", (), {"splits": splits, "image": "file", "classes": ("a",) * 1000})
    before, opened = peak_rss_mib(), list[RecordsSource]()
    open_s = timed(lambda: opened.append(RecordsSource(folder, listing, "train", None)))  # type: ignore[arg-type]
    return {"open_s": open_s, "resident_mib": _rss_mib() - before, "peak_mib": peak_rss_mib() - before}


def _write_rows(path: Path, size: int, write_batch: Callable[..., Any]) -> None:
    import pyarrow as pa

    columns: Mapping[str, Any] = {
        "label": np.arange(size, dtype=np.int64) % 1000,
        "offset": np.arange(size, dtype=np.int64) % SHARD_SAMPLES * 110_000,
        "size": np.full(size, 100_000, dtype=np.int64),
        "width": np.full(size, 500, dtype=np.int32),
        "height": np.full(size, 375, dtype=np.int32),
    }
    write_batch(path, pa.record_batch([pa.array(column) for column in columns.values()], names=list(columns)))


def _rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def space_of(size: int) -> dict[str, list[int]]:
    """A grid of about `size` points."""
    return {
        "scale.num_workers": [1, 2, 4, 8],
        "data.global_batch_size": [64, 128, 256, 512, 1024],
        "data.loader_workers": list(range(1, 1 + max(1, size // 20))),
    }


def sweep(size: int, folder: Path) -> Figures:
    """What the driver of a sweep does for `size` trials: once, and again and again while they run."""
    import cloudpickle

    from service.cluster.resources import Cluster, Node
    from service.config.experiment import load
    from service.runs.display import Display
    from service.runs.events import event
    from service.runs.run_log import read_log
    from service.sweeps.preflight import mark_unbuildable, mark_unschedulable
    from service.sweeps.run_trials import TeacherSource, TrialWatch, assign, save_rows
    from service.sweeps.trial_functions import run_trial
    from service.sweeps.trials import Trial, load_outcomes, plan_trials
    from tests.run_log import session_of
    from tests.service.report.runs import timed as row_of
    from trainables.rundir import RunDir
    from trainables.worker.recorder import RunRecorder

    space = space_of(size)
    resolved, run_dir = load("digits", [f"sweep.space={json.dumps(space)}"]), RunDir(folder / "sweep")
    cluster = Cluster(tuple(Node(str(number), 4096, 8) for number in range(64)))
    trials: list[Trial] = []
    figures: Figures = {}

    def plan() -> None:
        trials.extend(plan_trials(resolved))
        mark_unschedulable(trials, cluster)
        mark_unbuildable(trials)

    figures["plan_s"] = timed(plan)
    assert all(trial.outcome is None for trial in trials)
    with Display() as display:
        session = session_of(resolved, run_dir, display)
        assignments: dict[str, Any] = {}
        teacher = TeacherSource("/teacher", ())
        figures["assign_s"] = timed(lambda: assignments.update(assign(session, trials, cluster, teacher)))
        save_rows(session, trials)
        sent = {id: each.recorded_by(RunRecorder(None, str(run_dir.root))) for id, each in assignments.items()}
        pickled = cloudpickle.dumps(partial(run_trial, assignments=sent))
        figures["function_mib"] = len(pickled) / 2**20
        figures["function_load_s"] = timed(lambda: pickle.loads(pickled))
        display._readers.append(TrialWatch(session, trials, max_concurrent=1).take)
        figures["look_s"] = timed(display.tick)
        display.print = lambda text: None  # type: ignore[method-assign]
        rng = np.random.default_rng(0)

        def begin_and_end(trial: Trial) -> None:
            stage, row = f"trials/{trial.id}/student", row_of(trial.id, trial.params, True, 1.0, rng)
            outcome = {"status": "ok", "metrics": row["metrics"], "steps_s": row["steps_s"]}
            session.log.record("stage_begun", stage, trial=trial.id, model="mlp_small")
            session.log.recorder.record([event("trial_ended", trial=trial.id, outcome=outcome)])

        figures["begin_and_end_s"] = timed(lambda: [*map(begin_and_end, trials), display.tick()])
        figures["load_s"] = timed(lambda: load_outcomes(trials, read_log(run_dir).fold))
        figures["save_s"] = timed(lambda: save_rows(session, trials))
    figures["result_mib"] = run_dir.result.stat().st_size / 2**20
    figures["log_kib_per_trial"] = run_dir.events.stat().st_size / 1024 / len(trials)
    return figures


def report(size: int, folder: Path) -> Figures:
    """`distill report` and `compare` of sweeps of `size` trials, with 3 epochs each."""
    from rich.console import Console

    from service.report.compare import compare, comparison_lines
    from service.report.page import write_page
    from service.report.records import Records, records_of_run
    from service.report.terminal import report_of
    from tests.service.report.runs import sweep_dir

    run_dir = sweep_dir(folder / "a", space_of(size), epochs=3)
    figures: Figures = {}
    opened: list[Records] = []
    figures["open_s"] = timed(lambda: opened.append(records_of_run(run_dir.root)))
    (records,) = opened
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, width=160)
        figures["tables_s"] = timed(lambda: [console.print(part) for part in report_of(records)])
        figures["page_s"] = timed(lambda: write_page(records))
        figures["page_mib"] = run_dir.report.stat().st_size / 2**20
        other = sweep_dir(folder / "b", space_of(size), slow=1.1)

        def both() -> None:
            for part in comparison_lines(compare(records_of_run(run_dir.root), records_of_run(other.root))):
                console.print(part)

        figures["compare_s"] = timed(both)
    return figures


def clean(size: int, folder: Path) -> Figures:
    """`distill clean --dry-run` over `size` run folders."""
    import shutil

    from service.runs.clean import Cleaner
    from service.runs.clean import clean as run_clean
    from tests.service.report.runs import train_dir

    first = train_dir(folder / "runs" / "run-0").root
    for number in range(1, size):
        shutil.copytree(first, first.with_name(f"run-{number}"))
    cleaner = Cleaner(time.time() + 1, True, lambda line: None)
    return {"clean_s": timed(lambda: run_clean(first.parent, cleaner, unfinished=False, checkpoints_only=False))}


def planner(size: int, folder: Path) -> Figures:
    """The guided search over a grid of `size` points: what it takes to choose the 5th, 10th and 20th."""
    from service.runs.result import ClusterHardware
    from service.search.planner import Planner
    from service.search.points import Observation
    from tests.service.report.runs import timed as row_of

    space, rng, figures = space_of(size), np.random.default_rng(0), Figures()
    points = [
        dict(zip(space, values, strict=True))
        for values in np.stack(np.meshgrid(*space.values()), -1).reshape(-1, len(space)).tolist()
    ]
    search = Planner(points, ClusterHardware(nodes=64, slots_per_node=8, cpus_per_node=128), seed=0)
    for number in range(1, 21):
        candidates: list[Any] = []
        ask_s = timed(lambda candidates=candidates: candidates.append(search.ask()))  # type: ignore[misc]
        if candidates[0] is None:
            break
        if number in (5, 10, 20):
            figures[f"ask_{number}_s"] = ask_s
        row = row_of("0", candidates[0], True, 1.0, rng)
        phases_s = {phase: row["metrics"][f"phase/{phase}_ms"] / 1e3 for phase in ("data", "teacher", "student", "backward")}
        search.tell(candidates[0], Observation("ok", row["steps_s"], phases_s, start_s=20.0, seconds=60.0))
    return {**figures, "peak_mib": peak_rss_mib()}


def mlflow(size: int, folder: Path) -> Figures:
    """The records of `size` timing trials sent to an MLflow server on SQLite: each has 11 final numbers."""
    from service.runs.events import event
    from tests.integration.test_mlflow_server import Server
    from tests.service.tracking.store import Run, row
    from trainables.rundir import RunDir

    server = Server(folder)
    server.start()
    try:
        server.ready()
        run = Run(RunDir(folder / "run"), server.uri, "sweep")
        names = [f"{number:04d}" for number in range(size)]
        run.change(trials=[row(name, kind="timing") for name in names])
        phases = ("data", "h2d", "augment", "teacher", "student", "backward", "optimizer", "step")
        metrics = {"images_per_s": 100.0, "steps": 30.0, "epoch_s": 1.0} | {f"phase/{name}_ms": 1.0 for name in phases}
        for name in names:
            begun = event("stage_begun", f"trials/{name}/student", trial=name, model="resnet8")
            run.add(begun, event("trial_ended", trial=name, outcome={"status": "ok", "metrics": metrics}))
        run.end()
        database = folder / "mlflow.db"
        before = database.stat().st_size
        seconds = timed(run.sync)
        return {
            "seconds": seconds,
            "rows_per_s": size * len(metrics) / seconds,
            "s_per_trial": seconds / size,
            "database_kib_per_trial": (database.stat().st_size - before) / size / 1024,
        }
    finally:
        server.kill()


SUBJECTS = {
    "order": Subject(order, (10**6, 10**7, 10**8, 10**9)),
    "index": Subject(index, (10**6, 10**7, 3 * 10**7)),
    "sweep": Subject(sweep, (100, 500, 2000)),
    "report": Subject(report, (100, 500, 2000)),
    "clean": Subject(clean, (100, 500, 2000)),
    "planner": Subject(planner, (100, 500, 2000)),
    "mlflow": Subject(mlflow, (25, 100, 400)),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description="How time and memory grow.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--largest", type=float, default=1.0, metavar="SHARE", help="of each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(SUBJECTS):
        parser.error(f"nothing grows by the name of {', '.join(sorted(unknown))}: choose from {', '.join(SUBJECTS)}")
    if args.size is not None:  # in a process of its own
        with tempfile.TemporaryDirectory(prefix="rd-scale-") as folder:
            print(json.dumps(SUBJECTS[args.names[0]].measure(args.size, Path(folder))))
        return 0
    found: dict[str, dict[int, Figures]] = {}
    for name in args.names or SUBJECTS:
        found[name] = {}
        for size in (max(1, round(size * args.largest)) for size in SUBJECTS[name].sizes):
            figures = answer_of(["-m", "tests.benchmarks.scale", name, "--size", str(size)])
            found[name][size] = figures
            print(f"{name} {size:,}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
