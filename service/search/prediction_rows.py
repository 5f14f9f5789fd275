"""What is believed of each point, as rows for tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.search.formulas import Times
from service.search.points import Array, Flags, Point


@dataclass(frozen=True)
class Forecast:
    """Of one point, in seconds of a step; the parts as the model has them, before its residuals."""

    point: Point
    step_s: float
    sd: float  # of the step, relative
    measured: bool
    supply_s: float  # what the loader alone would take
    work_s: float  # everything but the wait for data
    forward_s: float
    local_s: float  # one worker's own work, nobody waited for
    exposed_s: float  # all-reduce that the backward does not hide


def forecasts(points: Sequence[Point], step_s_M: Array, sd_M: Array, measured_M: Flags, parts: Times) -> list[Forecast]:
    """A row for each of M points."""
    columns = (step_s_M, sd_M, measured_M, parts.supply, parts.work, parts.forward, parts.local, parts.exposed)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Forecast(point, *row) for point, row in zip(points, rows, strict=True)]
