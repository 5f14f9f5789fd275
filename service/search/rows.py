"""The rows of a sweep's `result.json` as points: which of them a search may choose from."""

from collections.abc import Sequence

from service.runs.outcome import Outcome
from service.runs.result import TrialRow
from service.search.points import Point


def point_of(row: TrialRow) -> Point:
    """A row's point, the three axes as they were carried out (`auto` resolved)."""
    return {**row.params, **row.scale.by_key}


def searched(rows: Sequence[TrialRow]) -> dict[str, Point]:
    """The points that a search may choose from, by the id of their trial."""
    return {row.id: point_of(row) for row in probes(rows) if row.status != "infeasible"}


def measurements(row: TrialRow) -> list[Outcome]:
    """Each measurement of a row's point, in order; none where it has not ended."""
    return [] if row.status in ("pending", "untested") else row.each_measurement


def probes(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The rows of the points themselves, without the trainings to a target that followed some of them."""
    return [row for row in rows if row.speed_trial is None]
