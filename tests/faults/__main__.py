"""The doctor against real runs: `faults` alone (the default), `pairs` of them, `healthy` ones, or faults by name."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as in the tests
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from service.doctor.causes import findings
from tests.faults.runs import Bench
from tests.faults.trials import CAUSES, REPLAYED, Trials, Verdict, healthy
from trainables.distributed.rank_pool import RankPool
from trainables.worker.trainer import CPU_MALLOC

POINTS = 5.0
"""A gain is right within so many points of what mending brings."""


def main() -> None:
    os.environ |= CPU_MALLOC  # of the ranks' processes, as of a run's workers
    console, ranks, wanted = Console(width=160, highlight=False), RankPool(2), sys.argv[1:] or ["faults"]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(ranks, Path(folder))
        try:
            bench.run(1, 16), bench.run(2, 16)  # libraries are loaded, caches filled
            if wanted == ["healthy"]:
                show_healthy(console, bench)
            elif wanted[0] == "pairs":
                show(console, Trials(bench).pairs(wanted[1:] or tuple(CAUSES)))
            else:
                show(console, Trials(bench).singles((*CAUSES, REPLAYED) if wanted == ["faults"] else wanted))
        finally:
            ranks.close()


def show(console: Console, verdicts: Iterable[Verdict]) -> None:
    """A line each as it comes, and what came of all."""
    all_of_them = list[Verdict]()
    for one in verdicts:
        all_of_them.append(one)
        good = "ok" if one.named and one.off_points <= POINTS else "OFF" if one.named else "WRONG"
        measured = ", ".join(f"{' + '.join(sorted(causes))} {gain:.1f}" for causes, gain in one.gains_pct.items())
        console.print(
            f"{good:5} {' + '.join(one.faults)}: first {one.first}, predicted {one.predicted_pct:.1f}%, measured "
            f"{one.measured_pct:.1f}% (mended: {measured})",
            soft_wrap=True,
        )
    count, named = len(all_of_them), sum(one.named for one in all_of_them)
    near = sum(one.off_points <= POINTS for one in all_of_them)
    console.print(f"{count} runs: first cause right {named}, gain within {POINTS:g} points {near}")


def show_healthy(console: Console, bench: Bench) -> None:
    """What is found in runs in which nothing is wrong."""
    alarms = 0
    for name, case in healthy(bench):
        found = [f"{one.cause} {one.gain_pct:.0f}%: {one.sentence}" for one in findings(case.evidence)]
        alarms += bool(found)
        console.print(f"{name}: {'; '.join(found) or 'nothing'}", soft_wrap=True)
    console.print(f"{alarms} false alarms")


if __name__ == "__main__":
    main()
