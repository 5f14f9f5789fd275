"""A sweep of many of the shortest trials: memory, open files and threads of its driver and of Ray's servers over time.

    python -m tests.benchmarks.long_sweep [--trials N] [--minutes M] [--concurrent N] [--json FILE]

Samples go to FILE as JSON lines while the sweep runs. It is ended after so many minutes. At the end a line for each process
has what it held at the beginning and at the end, and its slope: a least-squares line over the samples from the tenth trial to the
last; the size of the log; and the number of processes that the sweep has left behind.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import psutil

from service.runs.events import EventTail
from tests.benchmarks.process import ROOT, environment
from trainables.rundir import RunDir

EVERY_S = 5.0
LEFT_AFTER_S = 20.0
SETTLED = 10
"""Trials after which slopes are taken: until then modules are imported and pools are filled."""
SERVERS = {
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "dashboard/agent.py": "dashboard agent",
    "runtime_env/agent": "runtime env agent",
    "log_monitor.py": "log monitor",
    "monitor.py": "monitor",
}
"""What is in a server's command line → its name."""


def experiment(folder: Path, num_trials: int, concurrent: int) -> Path:
    """A grid of timing trials of a tiny model on images that are made up, without a teacher."""
    path = folder / "many.yaml"
    tree = {
        "base": "digits",
        "name": "many",
        "teacher": None,
        "student": {"model": "mlp_small"},
        "data": {"path": "synthetic", "loader_workers": 1},
        "train": {"warmup_steps": 1},
        "sweep": {
            "steps": 2,
            "space": {"optim.lr": [round(0.1 + 1e-4 * number, 6) for number in range(num_trials)]},
            "max_concurrent": concurrent,
        },
    }
    path.write_text(json.dumps(tree))
    return path


def name_of(process: psutil.Process, driver: psutil.Process) -> str:
    """What a process of the sweep is called; those that trials bring and take away have one name."""
    if process.pid == driver.pid:
        return "driver"
    line = " ".join(process.cmdline())
    return next((name for part, name in SERVERS.items() if part in line), "trials and idle workers")


def sample(driver: psutil.Process, processes: Iterable[psutil.Process]) -> dict[str, dict[str, float]]:
    """Process → MiB resident, open files, threads; of several with one name their sums, and their number."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for process in processes:
        try:
            with process.oneshot():
                of = found[name_of(process, driver)]
                of["mib"] += process.memory_info().rss / 2**20
                of["files"] += process.num_fds()
                of["threads"] += process.num_threads()
                of["processes"] += 1
        except psutil.Error:  # it has just ended
            continue
    return {name: dict(of) for name, of in found.items()}


def slopes(samples: Sequence[dict[str, dict[str, float]]], ended: Sequence[int]) -> list[str]:
    """A line for each process."""
    lines = []
    settled = [index for index, number in enumerate(ended) if number >= SETTLED]
    for name in dict.fromkeys(name for one in samples for name in one):
        having = [index for index in settled if name in samples[index]]
        if len(having) < 3:
            continue
        parts = []
        for figure, unit in (("mib", "MiB"), ("files", "files"), ("threads", "threads")):
            values = [samples[index][name][figure] for index in having]
            slope = np.polyfit([ended[index] for index in having], values, 1)[0]
            parts.append(f"{values[0]:.0f} → {values[-1]:.0f} {unit} ({1000 * slope:+.1f} per 1000 trials)")
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def left_behind(processes: Collection[psutil.Process]) -> str:
    """The processes that still run a while after the sweep has ended."""
    until_s = time.monotonic() + LEFT_AFTER_S
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < until_s:
        time.sleep(1)
    mib = sum(found.get("mib", 0.0) for found in sample(psutil.Process(), left).values())
    return f"left behind: {len(left)} processes, {mib:.0f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.long_sweep", description="A sweep of many short trials.")
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rd-") as name:
        folder = Path(name)
        run, log = folder / "runs" / "many", folder / "log"
        command = ["-m", "service", "sweep", str(experiment(folder, args.trials, args.concurrent))]
        command += ["--runs", str(run.parent), "--out", str(run)]
        events, num_ended = EventTail(RunDir(run).events), 0
        samples, ended, seconds = list[dict[str, dict[str, float]]](), list[int](), list[float]()
        children = set[psutil.Process]()
        with open(log, "wb") as file:
            began = time.monotonic()
            sweep = subprocess.Popen([sys.executable, *command], env=environment(), cwd=ROOT, stdout=file, stderr=file)
            driver = psutil.Process(sweep.pid)
            while sweep.poll() is None:
                try:
                    sweep.wait(EVERY_S)
                except subprocess.TimeoutExpired:
                    seconds.append(time.monotonic() - began)
                    now = driver.children(recursive=True)
                    children.update(now)
                    samples.append(sample(driver, [driver, *now]))
                    num_ended += sum(event["kind"] == "trial_ended" for event in events.new())
                    ended.append(num_ended)
                    if args.json:
                        line = {"seconds": seconds[-1], "ended": ended[-1], "processes": samples[-1]}
                        with open(args.json, "a") as figures:
                            figures.write(json.dumps(line) + "\n")
                    if seconds[-1] > 60 * args.minutes:
                        sweep.terminate()  # not SIGINT, which a job in the background ignores
                        sweep.wait(300)
        print("\n".join(log.read_text(errors="replace").splitlines()[-12:]))
        if num_ended:
            print(f"{num_ended} of {args.trials} trials in {seconds[-1]:.0f} s, exit code {sweep.returncode}")
            in_trials = ended.index(num_ended)  # what follows the last trial, such as the page, grows with no trial
            print("\n".join(slopes(samples[:in_trials], ended[:in_trials])))
            print(f"the log: {RunDir(run).events.stat().st_size / num_ended:.0f} bytes per trial")
        print(left_behind(children))
    return 0


if __name__ == "__main__":
    sys.exit(main())
