"""A guided sweep beside the whole grid, measured on the same machine: what was missed, and what it cost.

    distill sweep EXPERIMENT --set sweep.policy=grid --set sweep.steps=40 --out GRID
    distill sweep EXPERIMENT --set sweep.policy=guided --out GUIDED
    python -m tests.benchmarks.grid GRID GUIDED [GUIDED …]

Regret is judged by the grid's own figures. The step-time model is judged by leaving each point of the grid out in turn.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.runs.result import RunResult, TrialRow
from service.runs.run_directory import reopen
from service.search.points import Hardware, Observation, Point, identity
from service.search.replay import hardware_of, observation, spent_gpu_s
from service.search.rows import point_of
from service.search.step_time import fit_step_times
from tests.benchmarks.rounds import Bar

REGRET, COST, ERROR = Bar("≤", 0.03), Bar("≤", 0.15), Bar("≤", 0.08)


def measured(result: RunResult) -> dict[Any, TrialRow]:
    """Rows that have figures, by point."""
    return {identity(point_of(row)): row for row in result.rows if row.status == "ok"}


def regret(grid: RunResult, guided: RunResult) -> float:
    """By how much the grid's best point is faster than the one that the guided sweep chose, relative to the latter."""
    rows = measured(grid)
    best = max(row.metrics["images_per_s"] for row in rows.values())
    assert guided.best is not None
    return float(best / rows[identity(point_of(guided.best))].metrics["images_per_s"] - 1)


def left_out(points: Sequence[Point], seen: Sequence[Observation], hardware: Hardware, means_s: Sequence[float]) -> list[float]:
    """Relative error of each point's predicted step time, the model being fitted to all others."""
    errors = []
    for place, point in enumerate(points):
        others = [n for n in range(len(points)) if n != place]
        model = fit_step_times([points[n] for n in others], [seen[n] for n in others], hardware)
        errors.append(float(model.predict([point]).step_s[0] / means_s[place] - 1))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.grid", description="Guided sweeps beside the whole grid.")
    parser.add_argument("grid", type=Path, metavar="GRID")
    parser.add_argument("guided", type=Path, nargs="*", metavar="GUIDED")
    args = parser.parse_args()
    _, _, grid = reopen(args.grid)
    rows = list(measured(grid).values())
    whole_s = spent_gpu_s(rows)
    print(f"grid: {len(rows)} of {len(grid.rows)} points ran, {whole_s:,.0f} worker-seconds")
    for path in args.guided:
        _, _, guided = reopen(path)
        assert guided.search is not None
        tried, cost = len(measured(guided)), guided.search.spent_gpu_s / whole_s
        lost = regret(grid, guided)
        print(f"{path.name}: {tried} points, {guided.search.spent_gpu_s:,.0f} worker-seconds")
        print(f"  regret {100 * lost:.2f} %, bar {REGRET}: {verdict(REGRET, lost)}")
        print(f"  cost ÷ grid {cost:.3f}, bar {COST}: {verdict(COST, cost)}")
        print(f"  {guided.search.why}")
    assert grid.hardware is not None
    hardware = hardware_of(grid.hardware)
    means_s = [row.metrics["step_s"] for row in rows]
    errors = left_out([point_of(row) for row in rows], [observation(row) for row in rows], hardware, means_s)
    for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: -abs(pair[1]))[:5]:
        print(f"  {100 * error:+6.1f} %  {point_of(row)}")
    median = float(np.median(np.abs(errors)))
    print(f"leave-one-out: median error {100 * median:.1f} %, bar {ERROR}: {verdict(ERROR, median)}")


def verdict(bar: Bar, figure: float) -> str:
    """Whether it holds, in a word."""
    return "PASS" if bar.holds(figure) else "FAIL"


if __name__ == "__main__":
    main()
