"""`python -m tests.benchmarks [NAME …] [--rounds N] [--json FILE]`: exit code 1 where a bar is missed."""

import argparse
import importlib
import json
import os
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

NAMES = (
    "loop",
    "startup",
    "overhead",
    "memory",
    "checkpoint",
    "cli",
    "input",
    "pack",
    "feeding",
    "launches",
    "noise",
    "search",
    "taps",
    "methods",
    "sharded_teacher",
    "teacher_cache",
    "teacher_service",
)
ROUNDS = {
    "loop": 5,
    "startup": 5,
    "overhead": 7,
    "memory": 3,
    "checkpoint": 7,
    "cli": 5,
    "input": 3,
    "pack": 5,
    "feeding": 3,
    "launches": 3,
    "noise": 5,
    "search": 1,
    "taps": 5,
    "methods": 3,
    "sharded_teacher": 3,
    "teacher_cache": 3,
    "teacher_service": 3,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Speed and memory beside a peer.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--rounds", type=int, help="rounds that count, after the warm-up (default: a number for each)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--short", action="store_true", help="too short to judge by: only to see that everything runs")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the lines whose title holds it")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="input: JPEG files to load (default: made up)")
    parser.add_argument("--dali-python", metavar="PATH", help="input: a Python that has nvidia.dali")
    parser.add_argument("--ffcv-python", metavar="PATH", help="input: a Python that has ffcv")
    parser.add_argument("--cifar", type=Path, metavar="FOLDER", help="feeding: train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--records", type=Path, metavar="FOLDER", help="teacher_cache: packed CIFAR-10 (default: noise)")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    # Here and in everything started from here. By default Ray's workers give way to all other processes, a plain script's do not.
    os.environ.update({"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"})

    from rich.console import Console

    from tests.benchmarks.rounds import Result, run, table

    results: dict[str, list[Result]] = {}
    for name in args.names or NAMES:
        options: dict[str, Any] = {
            "input": {"images": args.images, "dali_python": args.dali_python, "ffcv_python": args.ffcv_python},
            "feeding": {"cifar": args.cifar},
            "teacher_cache": {"records": args.records},
        }.get(name, {})
        with importlib.import_module(f"tests.benchmarks.{name}").comparisons(args.short, **options) as lines:
            rounds = args.rounds or ROUNDS[name]
            echo, warm_up = partial(print, flush=True), not args.short
            results[name] = [run(line, rounds, echo, warm_up) for line in lines if args.only in line.title]
        if (drawn := table(results[name])) is not None:
            Console().print(drawn)
    missed = [line.title for lines in results.values() for line in lines if not line.passed]
    print("missed: " + "; ".join(missed) if missed else "every bar is reached")
    if args.json:
        machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
        figures = {name: [line.as_dict() for line in lines] for name, lines in results.items()}
        args.json.write_text(json.dumps({"machine": machine, "benchmarks": figures}, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
