"""A planner that knows what a sweep's records know: every measurement is replayed, in the order in which they ended.

So a search goes on after a kill, and a finished one has its posterior, from `result.json` alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from service.config.space import GLOBAL_BATCH
from service.config.sweep import TIME
from service.runs.outcome import Outcome
from service.runs.result import RunResult, SearchSummary, TrialRow
from service.search.planner import METRICS, Planner
from service.search.points import Observation, identity
from service.search.rows import measurements, point_of, probes, searched
from service.search.time_to_accuracy import BatchScaling, TimeToAccuracySearch
from trainables.metrics.phases import ALL_PHASES, BUBBLE

OBSERVED_STATUSES = ("ok", "oom", "failed")
"""Statuses that tell something of a point. What the cluster can never hold is no point of the search."""


def observation(outcome: Outcome) -> Observation:
    """What a measurement says of its point.

    Of a trial without the times of its steps its mean counts as one step: little is known of how far that is off.
    """
    m, start_s, seconds = outcome.metrics, outcome.start_s, outcome.seconds or None
    if outcome.status == "oom" and outcome.failure != "node_out_of_memory":  # which has more users than a batch
        return Observation("oom", start_s=start_s, seconds=seconds)
    if outcome.failure == "unschedulable":
        return Observation("infeasible")
    if outcome.status != "ok" or "step_s" not in m:
        return Observation("failed", start_s=start_s, seconds=seconds)
    return Observation(
        "ok",
        steps_s=outcome.steps_s or [m["step_s"]],
        phases_s=phase_seconds(m),
        peak_memory_mib=m.get("peak_memory_mib"),
        gpu_memory_mib=m.get("gpu_memory_mib"),
        start_s=start_s,
        seconds=seconds,
    )


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean seconds of each phase. Of pipeline stages only the first, with rank 0, waits for its loader; others wait for it."""
    phases_s = {phase: metrics[f"phase/{phase}_ms"] / 1e3 for phase in ALL_PHASES if f"phase/{phase}_ms" in metrics}
    if BUBBLE in phases_s and "rank0/data_ms" in metrics:
        loader_s = metrics["rank0/data_ms"] / 1e3
        phases_s |= {"data": loader_s, BUBBLE: phases_s[BUBBLE] + phases_s["data"] - loader_s}
    return phases_s


def replay(result: RunResult) -> Planner:
    """The planner of a sweep as its `result.json` tells it, guided or not. One of its points could run on a cluster."""
    assert result.hardware is not None
    points = searched(result.rows)
    planner = Planner(
        list(points.values()),
        result.hardware,
        metric=result.metric if result.metric in METRICS else "images_per_s",
        tolerance=result.tolerance,
        budget_grid_share=result.budget_grid_share,
        budget_gpu_s=None if result.budget_gpu_h is None else 3600 * result.budget_gpu_h,
        max_steps=result.timing_steps or 60,
        warmup_steps=result.warmup_steps,
        factor=BatchScaling.of(result.noise_scales).factor if result.metric == TIME else lambda point: 1.0,
    )
    ended = [(points[row.id], one) for row in probes(result.rows) if row.id in points for one in measurements(row)]
    for point, one in sorted(ended, key=lambda pair: pair[1].ended_s):
        if one.status in OBSERVED_STATUSES:
            planner.tell(point, observation(one))
    return planner


def conclusion(result: RunResult) -> dict[str, Any]:
    """What a guided search says at its end, for `result.json`: the best point in the light of all probes, and why it ended.

    `search.front` are the ids of the trials that no other one beats in speed and cost, the fewest workers first.
    """
    rows = [row.model_copy(update={"status": "untested"}) if row.status == "pending" else row for row in result.rows]
    ran = [row for row in probes(rows) if row.status == "ok"]
    if not ran:
        return {"trials": rows}
    planner = replay(result)
    if result.metric == TIME:
        return {"trials": rows, "search": summary_of_time_to_accuracy(result, planner)}
    planner.ask()
    rows_at = {identity(point_of(row)): row for row in reversed(ran)}
    bound = planner.bound()
    search = SearchSummary(
        why=planner.why(),
        bound_pct=100 * bound if math.isfinite(bound) else None,
        spent_gpu_s=spent_gpu_s(rows),
        grid_share=planner.spent_gpu_s / planner.grid_gpu_s,
        front=[rows_at[identity(point)].id for point in planner.front()],
    )
    best = planner.best()
    return {"trials": rows, "chosen": rows_at[identity(best)].id if best else None, "search": search}


def time_to_accuracy_search(result: RunResult, planner: Planner) -> tuple[TimeToAccuracySearch, list[str]]:
    """The search among the points that can run for the one that reaches the target first, and the trials of its rows.

    It has taken up all trainings so far.

    `planner` is the result's own, see `replay`.
    """
    rows = result.rows
    ids = {identity(point): trial for trial, point in reversed(searched(rows).items())}
    broken = {row.id for row in probes(rows) if row.status in ("oom", "failed")}
    runs_M = planner.chances() > 0.5
    runs_M[planner.measured_rows] = True
    trial_of = {row: ids[identity(planner.points[row])] for row in np.flatnonzero(runs_M)}
    known = [row for row, trial in trial_of.items() if trial not in broken]
    timed = [(row.metrics, row.scale.global_batch_size) for row in rows if "epoch_s" in row.metrics]
    samples = max((m["epoch_s"] / m["step_s"] * batch for m, batch in timed), default=1.0)
    batch_M = np.array([float(planner.points[row][GLOBAL_BATCH]) for row in known])
    found = TimeToAccuracySearch(
        batch_M,
        planner.step_s()[known],
        np.maximum(1.0, np.floor(samples / batch_M + 1e-6)),
        noise_scales=result.noise_scales,
    )
    trials = [trial_of[row] for row in known]
    for row in sorted(rows, key=lambda row: row.ended_s):
        if row.speed_trial in trials and row.status in (*OBSERVED_STATUSES, "stopped"):
            found.tell(trials.index(row.speed_trial), row.metrics)
    return found, trials


def summary_of_time_to_accuracy(result: RunResult, planner: Planner) -> SearchSummary:
    """What a search for time says at its end. `predicted_s`: of each point that could run, by trial."""
    found, ids = time_to_accuracy_search(result, planner)
    found.ask()
    scaling = found.scaling()
    return SearchSummary(
        why=found.why(),
        spent_gpu_s=spent_gpu_s(result.rows),
        b_noise=scaling.b_noise,
        s_min=scaling.s_min,
        predicted_s=dict(zip(ids, found.predict().tolist(), strict=True)),
    )


def spent_gpu_s(rows: Sequence[TrialRow]) -> float:
    """GPU-seconds (where there is no GPU: seconds of a worker's CPU slot) of all trials, starts included."""
    return float(sum(row.scale.num_workers * row.seconds for row in rows))
