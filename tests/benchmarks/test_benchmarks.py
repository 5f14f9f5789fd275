"""The benchmarks run: one short round of each, whose figures nobody judges."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.process import ROOT, environment
from tests.benchmarks.rounds import Bar, Comparison, Sides, in_turn, run, table

ROW = re.compile(r"^ +(warm-up|\d+) +[\d.e+]+ +[\d.e+]+ +[\d.]+ +[\d.]+$")
VERDICT = re.compile(r"^  \w+ [\d.]+ \([\d.]+–[\d.]+\), (bar [≤≥] [\d.]+: (PASS|FAIL)|no bar)$")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_prints_a_row_a_round_and_a_verdict_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.benchmarks", name, "--rounds", "1", "--short", "--json", str(figures)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    results = json.loads(figures.read_text())["benchmarks"][name]
    assert len([line for line in lines if ROW.match(line)]) == len(results)
    assert len([line for line in lines if VERDICT.match(line)]) == len(results)
    assert done.returncode == (0 if all(result["passed"] for result in results) else 1)
    for result in results:
        assert result["lowest"] <= result["median"] <= result["highest"]
        assert all(row["ours"] > 0 and row["peer"] > 0 for row in result["rounds"])


def test_the_sides_take_turns_in_going_first_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def ours() -> float:
        order.append("ours")
        return 1000.0 if len(order) < 3 else 3.0

    def peer() -> float:
        order.append("peer")
        return 2.0

    result = run(Comparison("title", "s", in_turn(ours, peer), Bar("≤", 1.2)), 3, lambda _: None)
    assert order == ["peer", "ours", "ours", "peer", "peer", "ours", "ours", "peer"]
    assert [row["figure"] for row in result.rounds] == [1.5, 1.5, 1.5]
    assert (result.median, result.passed) == (1.5, False)


def test_lines_that_have_a_place_end_in_a_table() -> None:
    def line(cell: tuple[str, str] | None, ours: float) -> Comparison:
        return Comparison("title", "s", lambda _: (ours, 2.0), None, cell=cell)

    lines = [line(("at", "time"), 3.0), line(("sp", "time"), 4.0), line(("sp", "memory"), 5.0), line(None, 6.0)]
    results = [run(each, 1, lambda _: None) for each in lines]
    drawn = table(results)
    assert drawn is not None
    assert [(column.header, list(column.cells)) for column in drawn.columns] == [
        ("", ["at", "sp"]),
        ("time", ["1.50", "2.00"]),
        ("memory", ["", "2.50"]),
    ]
    assert table(results[-1:]) is None


def test_sides_are_measured_once_a_round_each_first_in_its_turn() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> Callable[[], dict[str, float]]:
        def measure() -> dict[str, float]:
            order.append(name)
            return {"s": value}

        return measure

    sides = Sides({"a": side("a", 1.0), "b": side("b", 2.0), "c": side("c", 4.0)})
    lines = [Comparison("title", "s", sides.pair(ours, "c", "s"), None) for ours in ("a", "b")]
    assert [run(line, 2, lambda _: None).median for line in lines] == [0.25, 0.5]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


@pytest.mark.parametrize(
    ("sense", "figure", "holds"), [("≥", 0.97, True), ("≥", 0.96, False), ("≤", 1.2, True), ("≤", 1.21, False)]
)
def test_a_bar_is_reached_at_its_own_value(sense: str, figure: float, holds: bool) -> None:
    assert Bar(sense, 0.97 if sense == "≥" else 1.2).holds(figure) is holds
