"""Reads evidence from a run directory's records."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from operator import itemgetter
from statistics import fmean, median_low
from typing import Any

from service.config.experiment import Resolved
from service.config.schema import Experiment
from service.doctor.evidence import Evidence
from service.doctor.recorded import Clock, EpochUse, GpuUse, LoaderCosts, NodeUse, RankTimes
from service.runs.result import RunResult, TrialRow
from service.runs.run_log import RunLog, read_log
from service.runs.stored.stored_runs import display_name, shell_name
from trainables.errors import ExperimentError
from trainables.metrics.phases import ALL_PHASES
from trainables.rundir import RunDir

Metrics = Mapping[str, float]
NUMBERS = ("start", "step", "epoch", "summary")
"""Kinds of a stage's events that have metrics."""


@dataclass(frozen=True)
class Recording:
    """The evidence of one stage or trial."""

    name: str
    evidence: Evidence


def read_run(resolved: Resolved, run_dir: RunDir, result: RunResult) -> list[Recording]:
    """Read the evidence of a run's last stage, or of a sweep's trials with the best one first.

    Raises ExperimentError: no step has been timed yet.
    """
    log, parts = read_log(run_dir), [*result.rows, *result.stages]
    if result.kind == "sweep":
        rows = [row for row in result.rows if row.status == "ok" and "phase/step_ms" in row.metrics]
        best = result.best.id if result.best else None
        cases = [_trial(resolved, log, row) for row in sorted(rows, key=lambda row: bool(row.id != best))]
    else:
        names = reversed(resolved.experiment.stage_names)
        cases = [case for name in names if (case := _stage(resolved.experiment, log, result, name))][:1]
    if not cases:
        ended = any(part.status not in ("running", "pending", "untested") for part in parts)
        reason = next((f" ({part.status}: {part.reason})" for part in parts if part.reason), "")
        problem = f"no step was timed{reason};" if ended else "no step has been timed yet: wait for the first one, or"
        raise ExperimentError(f"{display_name(run_dir.root)}: {problem} see distill report {shell_name(run_dir.root)}")
    return cases


def _trial(resolved: Resolved, log: RunLog, row: TrialRow) -> Recording:
    experiment = resolved.override(row.params, "trial", reading=True).experiment
    scale = row.scale
    name = f"trial {row.id} ({scale.num_workers} × batch {scale.global_batch_size} × {scale.loader_workers} loader workers)"
    lines = log.of_stage(f"trials/{row.id}/student", *NUMBERS)
    return Recording(name, evidence_of(experiment, row.metrics, lines, scale.loader_workers, row.precision))


def _stage(experiment: Experiment, log: RunLog, result: RunResult, name: str) -> Recording | None:
    """Read a stage from its summary, or its last logged step if it is not complete. Returns None if no step has been timed."""
    lines = log.of_stage(name, *NUMBERS)
    timed = next((line for line in reversed(lines) if "phase/step_ms" in strip_prefixes(line["metrics"])), None)
    if timed is None:
        return None
    loader_workers = experiment.data.loader_workers if result.loader_workers is None else result.loader_workers
    evidence = evidence_of(experiment, strip_prefixes(timed["metrics"]), lines, loader_workers, timed.get("precision"))
    return Recording(f"the {name}", evidence if name.startswith("student") else replace(evidence, teacher_actors=None))


def strip_prefixes(metrics: Metrics) -> dict[str, float]:
    """Remove the prefixes `train/` of steps and `epoch/` of epochs, so that metrics have the names of a summary."""
    return {name.removeprefix("epoch/").removeprefix("train/"): value for name, value in metrics.items()}


def evidence_of(
    experiment: Experiment,
    metrics: Metrics,
    lines: Iterable[Mapping[str, Any]] = (),
    loader_workers: int | str = 1,
    precision: str | None = None,
) -> Evidence:
    """Build evidence from a summary's metrics and a stage's events of the kinds `NUMBERS`.

    `loader_workers` is the resolved number; `auto` counts as 1. `precision` is that of an ended stage.
    """
    lines, num_workers = list(lines), int(metrics.get("num_workers", experiment.scale.num_workers))
    start: Metrics = next((line["metrics"] for line in lines if line["kind"] == "start"), {})
    evaluated = [line["metrics"]["val/num_images"] for line in lines if "val/num_images" in line["metrics"]]
    samples, epochs = start.get("samples_per_epoch"), _epochs(lines)
    numbers = sorted({int(match[1]) for name in metrics if (match := re.match(r"node(\d+)/", name))})
    batch = experiment.data.global_batch_size
    assert isinstance(batch, int)  # it is `auto` only until something is timed
    return Evidence(
        global_batch=batch,
        ranks=_ranks(metrics, num_workers),
        loader_workers=loader_workers if isinstance(loader_workers, int) else 1,
        accumulate=experiment.optim.accumulate,
        precision=precision or experiment.precision,
        exposed_ms=metrics.get("phase/allreduce_ms", 0.0),
        decodes_on_device=experiment.data.decodes_on_device,
        prefetch_batches=experiment.data.prefetch_batches,
        loader=loader_costs(metrics),
        copy_batch_ms=metrics.get("loader/copy_ms"),
        one_image_ms=metrics.get("one_image_ms"),
        passes_ms=_numbered(metrics, r"passes/(\d+)_images_ms"),
        out_of_memory_images=metrics.get("passes/out_of_memory_images"),
        nodes=tuple(NodeUse(**recorded(NodeUse, metrics, f"node{number}/")) for number in numbers),
        rank_nodes=tuple(map(int, _numbered(metrics, r"rank(\d+)/node").values())),
        gpus=_gpus(metrics),
        peak_memory_mib=metrics.get("peak_memory_mib"),
        gpu_memory_mib=metrics.get("gpu_memory_mib"),
        steps_per_epoch=int(start["steps_per_epoch"]) if start else None,
        train_images=int(samples) if samples else None,
        num_epochs=int(start["epochs"]) if "epochs" in start else None,
        evaluate_every=experiment.train.evaluate_every,
        compile=experiment.train.compile,
        clock=Clock(**recorded(Clock, metrics, "")) if epochs else Clock(),
        val_images=evaluated[-1] if evaluated else 0.0,
        epochs=epochs,
        pipeline_stages=int(start.get("pipeline_stages", experiment.scale.pipeline_stages)),
        micro_batches=int(start.get("micro_batches", 1)),
        teacher_actors=experiment.teacher.service if experiment.teacher is not None else None,
    )


def loader_costs(metrics: Metrics) -> LoaderCosts:
    """Return the costs of the median rank's loader, or zeros if they are not all recorded.

    The recorded costs are means over ranks. All ranks load similar images, so extra time of a slower rank's loader is waiting.
    """
    known = recorded(LoaderCosts, metrics, "loader/")
    costs = LoaderCosts(**known) if len(known) == len(fields(LoaderCosts)) else LoaderCosts()
    batches_ms = _numbered(metrics, r"rank(\d+)/loader_batch_ms").values()
    if not any(batches_ms):
        return costs
    more_ms = costs.image_ms * max(0.0, 1 - median_low(batches_ms) / fmean(batches_ms))
    waits_ms = min(more_ms, costs.read_wait_ms)
    return replace(costs, image_ms=costs.image_ms - waits_ms, read_wait_ms=costs.read_wait_ms - waits_ms)


def _numbered(metrics: Metrics, name: str) -> dict[int, float]:
    """Return the metrics whose names match a pattern, by the number in the name, in order."""
    found = ((re.fullmatch(name, each), value) for each, value in metrics.items())
    return dict(sorted((int(match[1]), value) for match, value in found if match))


def recorded(kind: type[Any], metrics: Metrics, prefix: str) -> dict[str, Any]:
    """Return the recorded metrics for a dataclass's fields. Their names are a prefix and the field's name."""
    return {field.name: metrics[prefix + field.name] for field in fields(kind) if prefix + field.name in metrics}


def _ranks(metrics: Metrics, num_workers: int) -> tuple[RankTimes, ...]:
    """Return each rank's times, or the means for every rank if they are not recorded."""
    # Phases without a record took no time; fields with a default may be unknown.
    phases = {field.name: 0.0 for field in fields(RankTimes) if field.default is MISSING}
    means = {name.replace("loader/", "phase/loader_"): ms for name, ms in metrics.items()}
    if "rank0/step_ms" not in metrics:
        return (RankTimes(**phases | recorded(RankTimes, means, "phase/")),) * num_workers
    known = [rank for rank in range(num_workers) if f"rank{rank}/step_ms" in metrics]
    return tuple(RankTimes(**phases | recorded(RankTimes, metrics, f"rank{rank}/")) for rank in known)


def _gpus(metrics: Metrics) -> tuple[GpuUse, ...]:
    names = sorted({match[0] for name in metrics if (match := re.match(r"node\d+/gpu\d+(?=/)", name))})
    return tuple(GpuUse(name, **recorded(GpuUse, metrics, f"{name}/")) for name in names)


def _epochs(lines: list[Mapping[str, Any]]) -> tuple[EpochUse, ...]:
    """Return the complete epochs, each with the mean times of its steps and phases from its logged steps.

    With `eval.asynchronous`, an epoch's event comes after steps of the next one.
    """
    found, before = list[EpochUse](), 0
    total_ms, count = dict.fromkeys((*ALL_PHASES, "step"), 0.0), 0
    for line in sorted(lines, key=itemgetter("step")):
        metrics, step = strip_prefixes(line["metrics"]), int(line["step"])
        if line["kind"] == "step":
            if "phase/step_ms" in metrics and step > before:
                for phase in total_ms:
                    total_ms[phase] += metrics.get(f"phase/{phase}_ms", 0.0) * (step - before)
                count += step - before
            before = step
        elif line["kind"] == "epoch" and count:
            means_ms = {phase: total / count for phase, total in total_ms.items()}
            step_ms = means_ms.pop("step")
            found.append(EpochUse(step_ms, metrics.get("eval_s", 0.0), _gpus(metrics), means_ms))
            total_ms, count = dict.fromkeys(total_ms, 0.0), 0
    return tuple(found)
