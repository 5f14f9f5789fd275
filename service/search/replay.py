"""A planner that knows what a sweep's records know: told every row again, in the order in which they ended.

So a search goes on after a kill, and a finished one can be asked what it believes, from `result.json` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.search.guided import METRICS, Guided
from service.search.points import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, Hardware, Observation, Point, identity
from trainables.phases import PHASES

TOLD = ("ok", "oom", "failed")
"""Statuses that tell something of a point. What the cluster can never hold is no point of the search."""


def point_of(row: Mapping[str, Any]) -> Point:
    """A row's point, the three axes as they were carried out (`auto` resolved)."""
    return {**row["params"], **{key: row["scale"][key] for key in (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)}}


def searched(rows: Sequence[Mapping[str, Any]]) -> dict[str, Point]:
    """The points that a search may choose from, by the id of their trial."""
    return {row["id"]: point_of(row) for row in rows if row["status"] != "infeasible"}


def observation(row: Mapping[str, Any]) -> Observation:
    """What a row, or a trial's own result, says of its point.

    Of a trial without the times of its steps its mean counts as one step: little is known of how far that is off.
    """
    m = row["metrics"]
    if row["status"] != "ok" or "step_s" not in m:
        return Observation(row["status"] if row["status"] in TOLD else "failed", start_s=row.get("start_s"))
    return Observation(
        "ok",
        steps_s=row.get("steps_s") or [m["step_s"]],
        phases_s={phase: m[f"phase/{phase}_ms"] / 1e3 for phase in PHASES if f"phase/{phase}_ms" in m},
        peak_memory_mib=m.get("peak_memory_mib"),
        gpu_memory_mib=m.get("gpu_memory_mib"),
        start_s=row.get("start_s"),
    )


def replay(result: Mapping[str, Any]) -> Guided:
    """The planner of a sweep as its `result.json` tells it, guided or not.

    Raises:
        ValueError: no point could be searched, or the records lack the cluster's `hardware` (an older sweep's do).
    """
    if "hardware" not in result:
        raise ValueError(f"the records of {result['name']} do not say what cluster it ran on")
    hardware = result["hardware"]
    points = searched(result["trials"])
    planner = Guided(
        list(points.values()),
        Hardware(hardware["nodes"], hardware["slots_per_node"], hardware["cpus_per_node"]),
        metric=result["metric"] if result["metric"] in METRICS else "images_per_s",
        tolerance=result.get("tolerance", 0.03),
        max_steps=result.get("timing_steps") or 60,
    )
    for row in sorted(result["trials"], key=lambda row: row.get("ended_s", 0.0)):
        if row["status"] in TOLD:
            planner.tell(points[row["id"]], observation(row))
    return planner


def conclusion(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a guided search says at its end, for `result.json`: the best point in the light of all probes, and why it ended.

    `search.front` are the ids of the trials that no other one beats in speed and cost, the fewest workers first.
    """
    rows = [{**row, "status": "untested"} if row["status"] == "pending" else row for row in result["trials"]]
    ran = [row for row in rows if row["status"] == "ok"]
    if not ran:
        return {"trials": rows}
    planner = replay(result)
    planner.ask()
    rows_at = {identity(point_of(row)): row for row in reversed(ran)}
    search = {
        "why": planner.why(),
        "bound_pct": 100 * planner.bound(),
        "spent_gpu_s": spent_gpu_s(rows),
        "front": [rows_at[identity(point)]["id"] for point in planner.front()],
    }
    best = planner.best()
    return {"trials": rows, "best": rows_at[identity(best)] if best else None, "search": search}


def spent_gpu_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """GPU-seconds (where there is no GPU: seconds of a worker's place) of all trials, starts included."""
    return float(sum(row["scale"][NUM_WORKERS] * row["seconds"] for row in rows))
