"""The doctor against real runs: `faults` alone (the default), `pairs` of them, `healthy` ones, or faults by name.

`storm`: faults at random moments of all commands, counted; see `tests.faults.storm`.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in the tests
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from tests.faults.runs import Bench, Training
from tests.faults.trials import CAUSES, HEALTHY, REPLAYED, Trials, Verdict, healthy
from tests.faults.turns import ERROR_POINTS
from trainables.worker.trainer import CPU_MALLOC

POINTS = 5.0
"""A gain is right within so many points of what fixing brings."""
BAR_PCT, ALARMS_BAR_PCT = 95.0, 5.0
"""Shares of the runs: at least of right ones, at most of ones with a false alarm."""


def main() -> None:
    if sys.argv[1:2] == ["storm"]:
        from tests.faults.storm import cli  # with Ray and MLflow, which the doctor's runs do without

        sys.exit(cli.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    names = ("faults", "healthy", "pairs", *CAUSES, REPLAYED)
    parser.add_argument("names", nargs="*", default=["faults"], metavar="NAME", help=f"one of: {', '.join(names)}")
    arguments = parser.parse_args().names
    if unknown := sorted({*arguments} - {*names}):
        parser.error(f"no such fault: {', '.join(unknown)}")
    os.environ |= CPU_MALLOC  # of the ranks' processes, as of a run's workers
    console, began_s = Console(width=160, highlight=False), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        for workers in (1, 2):
            bench.run(Training(workers, 16))  # libraries are loaded, caches filled
        if arguments == ["healthy"]:
            show_healthy(console, bench)
        elif arguments[0] == "pairs":
            show(console, Trials(bench).pairs(arguments[1:] or tuple(CAUSES)))
        else:
            show(console, Trials(bench).singles((*CAUSES, REPLAYED) if arguments == ["faults"] else arguments))
    console.print(f"{(time.monotonic() - began_s) / 60:.1f} minutes")


def show(console: Console, verdicts: Iterable[Verdict]) -> None:
    """A line each as it comes, and the shares of all with their bars."""
    all_of_them = list[Verdict]()
    for one in verdicts:
        all_of_them.append(one)
        good = "ok" if one.named and one.off_points <= POINTS else "OFF" if one.named else "WRONG"
        fixed = ", ".join(
            f"{' + '.join(sorted(causes))} {gain.pct:.1f} ± {gain.error_points:.1f}" for causes, gain in one.gains.items()
        )
        if (by_means_pct := one.measured.by_means_pct) is not None:
            fixed += f"; by means {by_means_pct:.1f}"
        more = [f"also found: {', '.join(one.others)}"] if one.others else []
        more += [one.remark] if one.remark else []
        console.print(
            f"{good:5} {' + '.join(one.faults)}: first {one.first} (most: {one.most[0]}), predicted {one.predicted_pct:.1f}%, "
            f"measured {one.measured.pct:.1f} ± {one.measured.error_points:.1f}%; {'; '.join([f'fixed: {fixed}', *more])}",
            soft_wrap=True,
        )
    count = len(all_of_them)
    share(console, "first cause right", sum(one.named for one in all_of_them), count)
    share(console, f"gain within {POINTS:g} points", sum(one.off_points <= POINTS for one in all_of_them), count)
    unsure = sum(any(gain.error_points > ERROR_POINTS for gain in one.gains.values()) for one in all_of_them)
    console.print(f"measured gains with a standard error above {ERROR_POINTS:g} points: in {unsure} of {count} runs")


def share(console: Console, what: str, number: int, count: int, at_most: bool = False) -> None:
    """A line on so many of all, and whether that is within the bar."""
    pct, bar_pct = 100 * number / count, ALARMS_BAR_PCT if at_most else BAR_PCT
    met = pct <= bar_pct if at_most else pct >= bar_pct
    bar = f"{'at most' if at_most else 'at least'} {bar_pct:g}%"
    console.print(f"{what}: {number} of {count}, {pct:.0f}% (bar: {bar}): {'met' if met else 'MISSED'}")


def show_healthy(console: Console, bench: Bench) -> None:
    """What is found in runs in which nothing is wrong."""
    num_alarms = 0
    for name, found, is_false in healthy(bench):
        num_alarms += is_false
        console.print(f"{'ALARM' if is_false else 'ok':5} {name}: {'; '.join(found) or 'nothing'}", soft_wrap=True)
    share(console, "runs with a false alarm", num_alarms, len(HEALTHY), at_most=True)


if __name__ == "__main__":
    main()
