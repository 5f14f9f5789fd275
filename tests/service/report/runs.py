"""Run directories as sweeps and runs leave them, with times from a formula that is not the product's."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.config.experiment import load, read_resolved
from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report.charts import Figure
from service.report.document import drawn
from service.report.page import write_page
from service.report.records import Records, read_records
from service.runs.events import Event, event
from service.runs.result import RunResult, TrialRow
from service.runs.run_log import as_json, read_log
from tests.run_log import add, result_of, write_log
from trainables.rundir import RunDir

HARDWARE = {"nodes": 2, "slots_per_node": 4, "cpus_per_node": 32.0}
BEGAN_MS = 1_790_000_000_000

SPACE = {NUM_WORKERS: [1, 2, 4], GLOBAL_BATCH: [64, 128, 256, 512], LOADER_WORKERS: [1, 2, 4]}


def sweep_dir(
    root: Path,
    space: Mapping[str, Sequence[Any]],
    *,
    gpu: bool = True,
    ends: Mapping[str, Mapping[str, Any]] | None = None,
    epochs: int = 0,
    slow: float = 1.0,
    seed: int = 0,
    **top: Any,
) -> RunDir:
    """A sweep over a grid. `ends`: trial id → what its row has otherwise. With `epochs`, trials have accuracies."""
    run_dir, rng = RunDir(root), np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    sets = [f"sweep.space.{key}={json.dumps(list(values))}" for key, values in space.items()]
    resolved = load("digits", [*sets, f"name={top.pop('name', 'demo')}"])
    run_dir.experiment.write_text(resolved.to_yaml())
    rows, events = [], list[Event]()
    for number, setting in enumerate(itertools.product(*space.values())):
        params = dict(zip(space, setting, strict=True))
        row = timed(f"{number:03d}", params, gpu, slow, rng) | dict((ends or {}).get(f"{number:03d}", {}))
        rows.append(row)
        if row["status"] == "ok":
            events += history(f"trials/{row['id']}/student", row, number, gpu, epochs, rng)
    result = {
        "kind": "sweep",
        "name": resolved.experiment.name,
        "status": "complete",
        "started": "2026-01-02T03:04:05",
        "finished": "2026-01-02T04:04:05",
        "runs_root": str(root.parent),
        "sources": resolved.sources,
        "reason": "",
        "mlflow": None,
        "use_gpu": gpu,
        "space": {key: list(values) for key, values in space.items()},
        "metric": "images_per_s",
        "mode": "max",
        "policy": "grid",
        "tolerance": 0.03,
        "hardware": HARDWARE,
        "trials": rows,
        **top,
    }
    write_log(run_dir, result, *events)
    return run_dir


def timed(name: str, params: Mapping[str, Any], gpu: bool, slow: float, rng: np.random.Generator) -> dict[str, Any]:
    """A timing trial's row: a step is the longer of decoding and computing."""
    scale = {"scale.num_workers": 1, "data.global_batch_size": 128, "data.loader_workers": 2}
    scale |= {key: params[key] for key in scale if key in params}
    workers, batch, loaders = scale.values()
    faster = 0.6 if params.get("precision") == "bf16" else 1.0
    compute_s = (0.02 + 0.001 * batch / workers) * faster * (1 + 0.05 * (workers - 1))
    decode_s = batch / workers / (400.0 * max(loaders, 0.5))
    step_s = max(compute_s, decode_s) * slow
    steps_s = (step_s * (1 + 0.04 * np.abs(rng.standard_normal(20)))).tolist()
    mean = float(np.mean(steps_s))
    wait_ms = 1e3 * (mean - compute_s * slow)
    wait_ms = max(wait_ms, 0.4)
    rest_ms = 1e3 * mean - wait_ms
    parts = {
        "data": wait_ms,
        "h2d": 0.01 * rest_ms,
        "teacher": 0.4 * rest_ms,
        "student": 0.2 * rest_ms,
        "backward": 0.35 * rest_ms,
        "optimizer": 0.04 * rest_ms,
        "step": 1e3 * mean,
    }
    epoch_s = 50_000 / batch * mean
    metrics = {
        "images_per_s": batch / mean,
        "step_s": mean,
        "epoch_s": epoch_s,
        "epoch_projected": 1.0,
        "gpu_s_per_epoch": workers * epoch_s,
        "data_pct": 100 * wait_ms / (1e3 * mean),
        "steps": 30.0,
    }
    for phase, ms in parts.items():
        for part, factor in (("", 1.0), ("_min", 0.3), ("_p50", 0.9), ("_p95", 1.6), ("_max", 3.0)):
            metrics[f"phase/{phase}{part}_ms"] = ms * factor
    if gpu:
        metrics |= {"peak_memory_mib": 2000 + 30.0 * batch / workers, "gpu_memory_mib": 81_000.0}
    return {
        "id": name,
        "params": dict(params),
        "kind": "timing",
        "status": "ok",
        "reason": "",
        "oversubscribed": False,
        "restarts": 0,
        "scale": scale,
        "metrics": metrics,
        "seconds": 31.5,
        "start_s": 25.0,
        "steps_s": steps_s,
    }


def hardware(gpu: bool, workers: int, rise: float) -> dict[str, float]:
    """Telemetry of one node."""
    telemetry = {"node0/gpus": float(workers if gpu else 0), "node0/cpu_pct": 55.0, "node0/cpu_max_pct": 70.0}
    for gpu_index in range(workers if gpu else 0):
        gpu_now = {
            "util_pct": 80.0 + gpu_index,
            "util_max_pct": 99.0,
            "temperature_c": 60 + rise + gpu_index,
            "sm_clock_mhz": 1900 - 5 * rise,
        }
        telemetry |= {f"node0/gpu{gpu_index}/{name}": setting for name, setting in gpu_now.items()}
    return telemetry


def history(stage: str, row: dict[str, Any], number: int, gpu: bool, epochs: int, rng: np.random.Generator) -> list[Event]:
    """What a stage recorded while it ran."""
    m = row["metrics"]
    begin = BEGAN_MS + number * 60_000
    workers = row["scale"]["scale.num_workers"]
    lines = [line("start", 0, 0, begin, {"steps_per_epoch": 10, "epochs": epochs, "num_workers": workers}, stage)]
    for epoch in range(1, epochs + 1):
        top1 = 90 * (1 - np.exp(-epoch / 3)) - 0.5 * (number % 7) + float(rng.normal(0, 0.3))
        begin += int(1e3 * m["epoch_s"] * (1 + 0.02 * epoch)) + 500
        step = {"train/loss": 2 / epoch, "train/images_per_s": m["images_per_s"], "train/phase/step_ms": 1e3 * m["step_s"]}
        step |= {"train/phase/data_ms": 1.0, "train/phase/data_min_ms": 0.5, "train/phase/data_max_ms": 9.0}
        lines.append(line("step", 10 * epoch, epoch, begin - 600, step, stage))
        val = {"val/top1_pct": top1, "val/loss": 2.1 / epoch}
        own = {"train/loss": 2 / epoch} | hardware(gpu, row["scale"]["scale.num_workers"], 2.0 * epoch)
        own |= {"train_s": m["epoch_s"] * (1 + 0.02 * epoch), "eval_s": 0.3, "checkpoint_s": 0.15, "other_s": 0.05}
        parts = ("train", "eval", "checkpoint", "other")
        for part in parts:
            m[f"{part}_s"] = m.get(f"{part}_s", 0.0) + own[f"{part}_s"]
        own["wall_s"] = sum(own[f"{part}_s"] for part in parts)
        m["wall_s"] = sum(m[f"{part}_s"] for part in parts)
        lines.append(
            line("epoch", 10 * epoch, epoch, begin, val | {f"epoch/{name}": value for name, value in own.items()}, stage)
        )
        m["top1_pct"] = m["best_top1_pct"] = top1
        m["epoch_wall_s"] = own["wall_s"]
    return [*lines, line("summary", 30, 1, begin + 5000, {**m, **hardware(gpu, workers, number % 20)}, stage)]


def line(kind: str, step: int, epoch: float, time_ms: int, metrics: Mapping[str, Any], stage: str = "student") -> Event:
    made = event(kind, stage, step=step, epoch=float(epoch), metrics=dict(metrics))
    return made | {"time_ms": time_ms}


def train_dir(root: Path, *, status: str = "complete", slow: float = 1.0) -> RunDir:
    """A `train` run of a teacher and a student, five epochs each."""
    run_dir, rng = RunDir(root), np.random.default_rng(1)
    root.mkdir(parents=True)
    resolved = load("digits", ["name=single"])
    run_dir.experiment.write_text(resolved.to_yaml())
    stages, events = [], list[Event]()
    for name in ("teacher", "student"):
        row = timed("000", {"scale.num_workers": 2, "data.global_batch_size": 128}, True, slow, rng)
        events += history(name, row, 0, True, 5, rng)
        stages.append(
            {
                "stage": name,
                "model": "resnet8",
                "status": "ok",
                "reason": "",
                "restarts": 0,
                "metrics": row["metrics"],
                "checkpoint": None,
                "seconds": row["metrics"]["wall_s"] + 11,
                "start_s": 10.0,
                "end_s": 1.0,
            }
        )
    write_log(
        run_dir,
        {
            "kind": "train",
            "name": "single",
            "status": status,
            "started": "2026-01-02T03:04:05",
            "runs_root": str(root.parent),
            "sources": resolved.sources,
            "reason": "",
            "use_gpu": True,
            "num_workers": 2,
            "loader_workers": 2,
            "stages": stages,
        },
        *events,
    )
    return run_dir


def written(run_dir: RunDir) -> dict[str, Any]:
    """What a run's log comes to, as plain data that a test may change."""
    return as_json(result_of(run_dir))


def typed(result: Mapping[str, Any]) -> RunResult:
    """A sweep's result with these fields."""
    sweep = {"kind": "sweep", "name": "demo", "status": "complete", "runs_root": "", "space": {}, "metric": "images_per_s"}
    return RunResult.model_validate({**sweep, "mode": "max", **result})


def typed_row(row: Mapping[str, Any]) -> TrialRow:
    """A trial with these fields."""
    scale = {NUM_WORKERS: 1, GLOBAL_BATCH: 128, LOADER_WORKERS: 2}
    return TrialRow.model_validate({"params": {}, "scale": scale, **row})


def grow(run_dir: RunDir) -> None:
    """One more line, as a run that is still going on writes it."""
    add(run_dir, line("step", 60, 5.5, BEGAN_MS, {"train/images_per_s": 1.0, "train/loss": 0.1}))


def records_with(run_dir: RunDir, result: RunResult | None = None) -> Records:
    """The records of a run, with another result than its log's."""
    log = read_log(run_dir)
    return read_records(run_dir, log, result or log.result, read_resolved(run_dir.experiment, reading=True).experiment)


def bare_records(run_dir: RunDir, result: RunResult) -> Records:
    """The records of a run without an experiment, whose log is as far as it goes."""
    if not run_dir.events.exists():
        write_log(run_dir, result)
    return Records(run_dir, read_log(run_dir), result, {})


def page_text(run_dir: RunDir, result: RunResult | None = None) -> str:
    return write_page(records_with(run_dir, result)).read_text()


class Shown:
    """A figure as the page has it."""

    def __init__(self, figure: Figure) -> None:
        content = drawn(figure)
        self.traces: list[dict[str, Any]] = content["traces"]
        self.layout: dict[str, Any] = content["layout"]
        self.caption, self.numbers = figure.caption, figure.numbers


def shown(figure: Figure | None) -> Shown:
    assert figure is not None
    return Shown(figure)
