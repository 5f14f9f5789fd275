"""From a run directory's records to evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from service.doctor.evidence import EpochUse, Evidence, GpuUse, LoaderCosts, NodeUse, RankTimes
from service.experiment import Experiment, Resolved
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, StageDir, final_names, read_lines

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One stage or trial to speak of."""

    name: str
    evidence: Evidence


def read_run(resolved: Resolved, run_dir: RunDir, result: Mapping[str, Any]) -> list[Case]:
    """What a run directory tells: a run's last stage, or a sweep's trials, the best one first and the others as they stand.

    Raises:
        ExperimentError: no step has been timed yet.
    """
    if result["kind"] == "sweep":
        rows = [row for row in result.get("trials", []) if row["status"] == "ok" and "phase/step_ms" in row["metrics"]]
        best = (result.get("best") or {}).get("id")
        cases = [_trial(resolved, run_dir, row) for row in sorted(rows, key=lambda row: bool(row["id"] != best))]
    else:
        names = ("student", *reversed(resolved.experiment.preparation))
        cases = [case for name in names if (case := _stage(resolved.experiment, run_dir, result, name))][:1]
    if not cases:
        raise ExperimentError(
            f"{run_dir.root}: no step has been timed yet: wait for its first, or see distill report {run_dir.root}"
        )
    return cases


def _trial(resolved: Resolved, run_dir: RunDir, row: Mapping[str, Any]) -> Case:
    experiment = resolved.override(row["params"], "trial", reading=True).experiment
    scale = row["scale"]
    name = (
        f"trial {row['id']} ({scale['scale.num_workers']} × batch {scale['data.global_batch_size']} × "
        f"{scale['data.loader_workers']} loader workers)"
    )
    lines = read_lines(run_dir.trial(row["id"]).stage("student").metrics)
    return Case(name, evidence_of(experiment, row["metrics"], lines, scale["data.loader_workers"]))


def _stage(experiment: Experiment, run_dir: RunDir, result: Mapping[str, Any], name: str) -> Case | None:
    """A stage that is complete, or as far as its log lines go; None where no step has been timed."""
    stage = run_dir.stage(name)
    lines, metrics = read_lines(stage.metrics), _summary(stage)
    last: Metrics = next((line["metrics"] for line in reversed(lines) if "train/phase/step_ms" in line["metrics"]), {})
    metrics = metrics or {name.removeprefix("train/"): value for name, value in last.items()}
    if "phase/step_ms" not in metrics:
        return None
    evidence = evidence_of(experiment, metrics, lines, result.get("loader_workers", experiment.data.loader_workers))
    return Case(f"the {name}", evidence if name == "student" else replace(evidence, teacher_actors=None))


def _summary(stage: StageDir) -> dict[str, float]:
    try:
        return dict(json.loads(stage.result.read_text())["metrics"])
    except (OSError, ValueError, KeyError):
        return {}


def evidence_of(
    experiment: Experiment, metrics: Metrics, lines: Iterable[Mapping[str, Any]] = (), loader_workers: int | str = 1
) -> Evidence:
    """Evidence from a summary's metrics and the lines of `metrics.jsonl`. `loader_workers` as resolved; `auto` counts as some."""
    lines = list(lines)
    start: Metrics = next((line["metrics"] for line in lines if line["kind"] == "start"), {})
    evaluated = [line["metrics"]["val/num_images"] for line in lines if "val/num_images" in line["metrics"]]
    nodes = sorted({int(m[1]) for name in metrics if (m := re.match(r"node(\d+)/", name))})
    return Evidence(
        global_batch=experiment.data.global_batch_size,
        ranks=_ranks(metrics, experiment.scale.num_workers),
        loader_workers=loader_workers if isinstance(loader_workers, int) else 1,
        accumulate=experiment.optim.accumulate,
        precision=experiment.precision,
        decodes_on_device=experiment.data.decodes_on_device,
        loader=LoaderCosts(**{name: metrics[f"loader/{name}"] for name in ("image_ms", "read_ms", "cpu_ms", "threads")})
        if "loader/image_ms" in metrics else None,
        one_image_ms=metrics.get("one_image_ms"),
        further_image_ms=metrics.get("further_image_ms"),
        nodes=tuple(NodeUse(metrics.get(f"node{n}/cpu_pct"), metrics.get(f"node{n}/disk_read_mib_per_s")) for n in nodes),
        gpus=_gpus(metrics),
        peak_memory_mib=metrics.get("peak_memory_mib"),
        gpu_memory_mib=metrics.get("gpu_memory_mib"),
        steps_per_epoch=int(start["steps_per_epoch"]) if start else None,
        val_images=evaluated[-1] if evaluated else 0.0,
        epochs=_epochs(lines),
        teacher_actors=experiment.teacher.service if experiment.teacher is not None else None,
    )  # fmt: skip


def _ranks(metrics: Metrics, num_workers: int) -> tuple[RankTimes, ...]:
    """Each rank's times; where they are not recorded, the means for every one."""
    names = [field.name for field in fields(RankTimes) if not field.name.startswith("allreduce")]

    def times(prefix: str) -> RankTimes:
        return RankTimes(
            **{name: metrics.get(f"{prefix}/{name}", 0.0) for name in names},
            allreduce_wait_ms=metrics.get(f"{prefix}/allreduce_wait_ms"),
            allreduce_wait_p50_ms=metrics.get(f"{prefix}/allreduce_wait_p50_ms"),
            allreduce_wait_error_ms=metrics.get(f"{prefix}/allreduce_wait_error_ms"),
        )

    if "rank0/step_ms" in metrics:
        return tuple(times(f"rank{rank}") for rank in range(num_workers) if f"rank{rank}/step_ms" in metrics)
    return (times("phase"),) * num_workers


def _gpus(metrics: Metrics) -> tuple[GpuUse, ...]:
    names = {m[0] for name in metrics if (m := re.match(r"node\d+/gpu\d+(?=/)", name))}
    return tuple(
        GpuUse(
            name, metrics.get(f"{name}/util_pct"), metrics.get(f"{name}/temperature_c"), metrics.get(f"{name}/sm_clock_mhz"),
            int(metrics.get(f"{name}/throttle_reasons", 0)),
        )
        for name in sorted(names)
    )  # fmt: skip


def _epochs(lines: list[Mapping[str, Any]]) -> tuple[EpochUse, ...]:
    """The epochs that ended, each with the mean of its steps as its log lines have it."""
    found, before = list[EpochUse](), 0
    total_ms, count = 0.0, 0
    for line in lines:
        metrics, step = line["metrics"], int(line["step"])
        if line["kind"] == "step":
            if "train/phase/step_ms" in metrics and step > before:
                total_ms += metrics["train/phase/step_ms"] * (step - before)
                count += step - before
            before = step
        elif line["kind"] == "epoch" and count:
            found.append(EpochUse(total_ms / count, metrics.get("epoch/eval_s", 0.0), _gpus(final_names(metrics))))
            total_ms, count = 0.0, 0
    return tuple(found)
