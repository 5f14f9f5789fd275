"""Rows of a sweep's `result.json`, made from a formula instead of a cluster."""

from collections.abc import Mapping
from typing import Any

from service.runs.result import RunResult, TrialRow

AXES = ("scale.num_workers", "data.global_batch_size", "data.loader_workers")


def step_s(point: Mapping[str, Any]) -> float:
    """Half of the images a worker, 1 ms each, 20 ms a step, and a loader of 500 images/s a thread."""
    batch = point["data.global_batch_size"] / point["scale.num_workers"]
    return float(max(0.02 + 0.001 * batch, batch / (500 * max(point["data.loader_workers"], 1))))


def stage(point: Mapping[str, Any]) -> dict[str, Any]:
    """What the `summary` of a timing run at `point` has."""
    seconds = step_s(point)
    wait = max(0.0, seconds - 0.02 - 0.001 * point["data.global_batch_size"] / point["scale.num_workers"])
    phases = {"data": wait, "student": 0.4 * (seconds - wait), "backward": 0.6 * (seconds - wait)}
    metrics = {"step_s": seconds, "images_per_s": point["data.global_batch_size"] / seconds, "epoch_s": 1000 * seconds}
    return {
        "metrics": metrics | {f"phase/{name}_ms": 1e3 * part for name, part in phases.items()},
        "steps_s": [seconds] * 12,
    }


def row(number: int, point: Mapping[str, Any], status: str = "ok", ended_s: float = 0.0) -> dict[str, Any]:
    """A row of `result.json`."""
    done = stage(point) if status == "ok" else {"metrics": {}, "steps_s": []}
    return {
        "id": f"{number:03d}",
        "params": dict(point),
        "kind": "timing",
        "status": status,
        "reason": "",
        "restarts": 0,
        "scale": {key: point[key] for key in AXES},
        "seconds": 10.0 if status == "ok" else 0.0,
        "start_s": 8.0 if status == "ok" else None,
        "ended_s": ended_s,
        **done,
    }


def typed(row: dict[str, Any]) -> TrialRow:
    return TrialRow.model_validate(row)


def grid() -> list[dict[str, Any]]:
    """24 points."""
    return [
        dict(zip(AXES, (workers, batch, threads), strict=True))
        for workers in (1, 2, 4)
        for batch in (64, 128, 256, 512)
        for threads in (1, 4)
    ]


def result(rows: list[dict[str, Any]], **changes: Any) -> RunResult:
    """A sweep's `result.json`."""
    hardware = {"nodes": 1, "slots_per_node": 4, "cpus_per_node": 32.0}
    return RunResult.model_validate(
        {
            "kind": "sweep",
            "runs_root": "",
            "name": "formula",
            "status": "running",
            "metric": "images_per_s",
            "mode": "max",
            "policy": "guided",
            "tolerance": 0.03,
            "timing_steps": 60,
            "space": {},
            "hardware": hardware,
            "trials": rows,
            **changes,
        }
    )
