"""The rows of a sweep's `result.json` as points: which of them a search may choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.search.points import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, Point


def point_of(row: Mapping[str, Any]) -> Point:
    """A row's point, the three axes as they were carried out (`auto` resolved)."""
    return {**row["params"], **{key: row["scale"][key] for key in (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)}}


def searched(rows: Sequence[Mapping[str, Any]]) -> dict[str, Point]:
    """The points that a search may choose from, by the id of their trial."""
    return {row["id"]: point_of(row) for row in probes(rows) if row["status"] != "infeasible"}


def measurements(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Each measurement of a row's point, in order, as a row has the only one; none where it has not ended."""
    if row["status"] in ("pending", "untested"):
        return []
    return list(row.get("measurements") or [row])


def probes(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the points themselves, without the trainings to a target that followed some of them."""
    return [row for row in rows if "probe" not in row]
