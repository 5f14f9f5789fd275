"""Two sides measured in turn, and the verdict: the machine's own ups and downs meet both, so that only ratios are compared."""

import operator
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Bar:
    """What a figure must reach: at least, or at most, `value`."""

    sense: str
    value: float

    def holds(self, figure: float) -> bool:
        return figure >= self.value if self.sense == "≥" else figure <= self.value

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}"


@dataclass(frozen=True)
class Comparison:
    """One line of the result: `measure` gives both sides of a round, `figure` what the bar is about."""

    title: str
    unit: str
    measure: Callable[[int], tuple[float, float]]
    """The round's number (0: the warm-up) → ours, the peer's."""
    bar: Bar | None
    """None: told, not judged."""
    figure: Callable[[float, float], float] = operator.truediv
    figure_name: str = "ratio"
    cell: tuple[str, str] | None = None
    """Row and column of its median in the table that ends a benchmark of many lines."""


@dataclass
class Result:
    """The rounds of a comparison, without the warm-up."""

    title: str
    unit: str
    figure_name: str
    bar: str
    cell: tuple[str, str] | None = None
    passed: bool = True
    median: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    rounds: list[dict[str, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_turn(ours: Callable[[], float], peer: Callable[[], float]) -> Callable[[int], tuple[float, float]]:
    """A `measure` that runs the two sides one after the other, each first in every other round."""

    def measure(number: int) -> tuple[float, float]:
        if number % 2:
            first = ours()
            return first, peer()
        second = peer()
        return ours(), second

    return measure


class Sides:
    """Several sides, all measured once in a round, each first in its turn; any two of them can be compared."""

    def __init__(self, sides: Mapping[str, Callable[[], dict[str, float]]]) -> None:
        self._sides = dict(sides)
        self._rounds: dict[int, dict[str, dict[str, float]]] = {}

    def pair(self, ours: str, peer: str, figure: str) -> Callable[[int], tuple[float, float]]:
        """A `measure`: a figure of two sides. The first of a round that is asked for runs all of them."""

        def measure(number: int) -> tuple[float, float]:
            if number not in self._rounds:
                names = list(self._sides)
                first = number % len(names)
                self._rounds[number] = {name: self._sides[name]() for name in names[first:] + names[:first]}
            found = self._rounds[number]
            return found[ours][figure], found[peer][figure]

        return measure


def run(comparison: Comparison, num_rounds: int, echo: Echo, warm_up: bool = True) -> Result:
    """A warm-up round that does not count, then `num_rounds` that do; says a row for each and the verdict."""
    bar = comparison.bar
    result = Result(comparison.title, comparison.unit, comparison.figure_name, str(bar) if bar else "", comparison.cell)
    echo(f"{comparison.title} [{comparison.unit}]")
    echo(f"  {'round':>7} {'ours':>10} {'peer':>10} {comparison.figure_name:>8}   load")
    for number in range(0 if warm_up else 1, num_rounds + 1):
        ours, peer = comparison.measure(number)
        figure, load = comparison.figure(ours, peer), os.getloadavg()[0]
        echo(f"  {number or 'warm-up':>7} {ours:10.4g} {peer:10.4g} {figure:8.3f}  {load:5.1f}")
        if number:
            result.rounds.append({"ours": ours, "peer": peer, "figure": figure, "load": load})
    figures = [row["figure"] for row in result.rounds]
    result.median, result.lowest, result.highest = statistics.median(figures), min(figures), max(figures)
    result.passed = bar is None or bar.holds(result.median)
    verdict = f"bar {bar}: {'PASS' if result.passed else 'FAIL'}" if bar else "no bar"
    echo(f"  {comparison.figure_name} {result.median:.3f} ({result.lowest:.3f}–{result.highest:.3f}), {verdict}\n")
    return result


def table(results: Sequence[Result]) -> Table | None:
    """The medians of those results that have a place in a table; None: no result has."""
    placed = {result.cell: result for result in results if result.cell}
    if not placed:
        return None
    columns = list(dict.fromkeys(column for _, column in placed))
    drawn = Table("", *columns, box=box.SIMPLE_HEAD)
    for row in dict.fromkeys(row for row, _ in placed):
        found = [placed.get((row, column)) for column in columns]
        drawn.add_row(row, *("" if result is None else f"{result.median:.2f}" for result in found))
    return drawn
