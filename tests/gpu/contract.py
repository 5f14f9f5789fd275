"""A check: pieces that are measured one after the other, each below ten minutes, and what was expected of their figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Figure = float | int | str
Measured = dict[str, Figure]


@dataclass(frozen=True)
class Settings:
    """Where and how large a piece is measured."""

    device: str
    """`cuda`; or `cpu`: the twin of a few seconds, which tests the check itself."""
    folder: Path
    """What pieces make for themselves and for each other, such as photos and packed sets."""

    @property
    def small(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Expected:
    """What was expected of one figure of a piece."""

    figure: str
    text: str
    low: float | None = None
    high: float | None = None
    estimate: bool = False
    """Made by reading and counting: a figure outside is something found out, no failure."""
    on_cpu: bool = False
    """Holds for the twin too."""

    def verdict(self, measured: Mapping[str, Figure], device: str) -> str:
        """`ok`, `MISSED`, `finding` (an estimate is off), `recorded` (nothing to judge by) or `not judged on a CPU`."""
        value = measured.get(self.figure)
        if device == "cpu" and not self.on_cpu:
            return "not judged on a CPU"
        if value is None:
            return "MISSED"
        if isinstance(value, str) or (self.low is None and self.high is None):
            return "recorded"
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return "ok" if inside else "finding" if self.estimate else "MISSED"


def nothing_missing(settings: Settings) -> str | None:
    """A piece that runs on any machine."""
    return None


@dataclass(frozen=True)
class Piece:
    """One measurement, in a process of its own."""

    name: str
    measure: Callable[[Settings], Measured]
    expected: tuple[Expected, ...]
    minutes: float
    """That it may take on a GPU; one that takes longer has failed."""
    lacks: Callable[[Settings], str | None] = nothing_missing
    """Why it cannot be measured on this machine; None: it can."""


@dataclass(frozen=True)
class Check:
    """A number of the plan, and its pieces."""

    number: int
    title: str
    pieces: tuple[Piece, ...]
