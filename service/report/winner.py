"""Sentences about a sweep: which trial won, why, how certain that is, and how to train with it."""

import contextlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from service.config import strict_yaml
from service.config.experiment import read_resolved
from service.config.space import LOADER_WORKERS
from service.config.sweep import FRONT, TIME, TIME_S
from service.report import labels as names
from service.report.records import UNFINISHED, axes, ended, ran, step_error, value
from service.runs.result import RunResult, TrialRow
from service.runs.run_log import RunLog
from service.runs.stored.stored_runs import checkpoint, display_name, uri_of
from service.search.points import SPARE_MEMORY
from service.search.rows import probes
from trainables.errors import ExperimentError
from trainables.rundir import RunDir

BEYOND = 1.96  # standard errors that a difference must exceed
ENDS = {"infeasible": " (cannot run on this cluster)", "oom": " (out of memory)"}
"""Explanations of statuses."""
OVERSUBSCRIBED = "oversubscribed: the trial reserved more CPUs than this machine has; its times say little about a real cluster"


def lead(result: RunResult) -> list[str]:
    """Say which of a sweep's trials won, why, by how much, and where its step time goes."""
    best, rows = result.best, result.rows
    if best is None:
        count = f"{len(ended(rows))} of {names.counted(len(rows), 'trial')} have ended"
        return ["no trial is complete: nothing to compare yet", *([count] if rows else [])]
    shares = names.shares_text(best.metrics)
    return [
        f"best: trial {best.id} with {won(best, result.unit, axes(rows), ranking_metric(result)[0])}",
        why(result, best),
        *([f"its step: {shares}"] if shares else []),
    ]


def notes(result: RunResult) -> list[str]:
    """Return further notes on a sweep: its front, trials without a result, and how certain the winner is."""
    sure = [*bound(result), *doubts(result)] if result.best is not None else []
    return [*on_the_front(result), *without_result(result.rows), *sure]


def won(best: TrialRow, unit: str, keys: Sequence[str], name: str) -> str:
    """Format the winner's point and what it reached."""
    reached = names.metrics_text(best.metrics, (name, "images_per_s", "epoch_s", "top1_pct"))
    return f"{names.point(best, unit, keys)}: {reached}"


def why(result: RunResult, best: TrialRow) -> str:
    """Say how much each of the winner's values gains over the next best one, with the others unchanged."""
    (metric, mode), keys = ranking_metric(result), axes(result.rows)
    compared = [row for row in ran(result.rows) if metric in row.metrics]
    pick, sentences = max if mode == "max" else min, []
    for key in keys:
        changed = [(row, [each for each in keys if value(row, each) != value(best, each)]) for row in compared]
        if others := [row for row, differences in changed if differences == [key]]:
            runner_up = pick(others, key=lambda row: row.metrics[metric])
            gain = describe_lead(best, runner_up, metric, mode)
            sentences.append(f"{names.at(key, value(best, key), result.unit)}: {gain} {value(runner_up, key)}")
    if not sentences:
        what, extreme = names.label(metric).unit.removeprefix("% "), "highest" if mode == "max" else "lowest"
        return f"It has the {extreme} {what} of {names.counted(len(compared), 'trial')} that ran."
    return f"Compared with the next best value of each axis, others unchanged: {'; '.join(sentences)}."


def describe_lead(best: TrialRow, runner_up: TrialRow, metric: str, mode: str) -> str:
    """Say how much better the best trial is than another, or that it is within noise; the other's value is to follow."""
    a, b = best.metrics[metric], runner_up.metrics[metric]
    compared = names.label(metric).compared
    if not compared or a <= 0 or b <= 0:
        return f"{a - b:+.2f} points over" if metric.endswith("_pct") else f"{a - b:+.4g} over"
    gain = (a / b if mode == "max" else b / a) - 1
    errors = [step_error(row) for row in (best, runner_up)]
    is_noise = all(errors) and abs(gain) < BEYOND * math.hypot(*filter(None, errors))
    than = ", within noise, than" if is_noise else " than"
    if compared == "cost":
        return f"costs {abs(1 - a / b):.1%} {'less' if a <= b else 'more'}{than}"
    if gain >= 1 and not is_noise:
        return f"{1 + gain:.1f} times as fast as"
    return f"{abs(gain):.1%} {'faster' if gain >= 0 else 'slower'}{than}"


def ranking_metric(result: RunResult) -> tuple[str, str]:
    """Return the metric that ranks trials, and its mode, "max" or "min". For the front of speed and cost it is speed."""
    if result.metric == FRONT:
        return "images_per_s", "max"
    return (TIME_S if result.metric == TIME else result.metric), result.mode


def bound(result: RunResult) -> list[str]:
    """Say how much better an untried point may be, and what the search has cost."""
    rows, search = probes(result.rows), result.search
    unmeasured, counted = sum(row.status in UNFINISHED for row in rows), names.counted(len(rows), "point")
    if search is not None:
        sure = (
            f"With 90% probability, no point is more than {search.bound_pct:.1f}% better; "
            if search.bound_pct is not None
            else ""
        )
        share = f", {search.grid_share:.0%} of what measuring every point briefly would take" if search.grid_share else ""
        tried = f"{len(rows) - unmeasured} of {counted} were tried, for {search.spent_gpu_s:,.0f} {result.unit}-seconds"
        return [f"{sure}{tried}{share}.", f"Why the search ended: {search.why}."]
    if unmeasured:
        return [f"{names.counted(unmeasured, 'point')} of {len(rows)} not tried yet: one of them may be better."]
    if result.policy in ("random", "asha"):
        return [f"{counted} drawn at random: another one may be better."]
    return [f"All points measured: {counted}, the whole space."] if rows else []


def without_result(rows: Sequence[TrialRow]) -> list[str]:
    """Say how many trials have no speed, and how they ended."""
    with_speed = {row.id for row in ran(rows)}
    counts = Counter(row.status for row in ended(rows) if row.id not in with_speed)
    order = sorted(counts, key=lambda status: (status == "infeasible", status))
    ends = [f"{counts[status]} {status}{ENDS.get(status, '')}" for status in order]
    total = names.counted(len(ended(rows)), "trial")
    return [f"{counts.total()} of {total} have no result: {', '.join(ends)}."] if ends else []


def on_the_front(result: RunResult) -> list[str]:
    """List the Pareto front of a search for speed and cost: no other trial beats one of these in both."""
    if result.metric != FRONT or not result.search or not result.search.front:
        return []
    rows, unit = {row.id: row for row in result.rows}, result.unit
    keys, sentences = axes(result.rows), ["the front of speed and cost:"]
    for id in result.search.front:
        m = rows[id].metrics
        cost = f"{names.short(m['gpu_s_per_epoch'])} {unit}-s/epoch"
        sentences.append(f"  {id}: {names.point(rows[id], unit, keys)}: {names.number(m['images_per_s'], 1)} images/s for {cost}")
    return sentences


def doubts(result: RunResult) -> list[str]:
    """Return caveats about the numbers."""
    sentences = memory_to_spare(result)
    if any(row.oversubscribed for row in result.rows):
        sentences.insert(0, OVERSUBSCRIBED)
    if any(row.metrics.get("epoch_projected") for row in result.rows):
        sentences.insert(0, "* projected from fewer steps than an epoch has")
    return sentences


def memory_to_spare(result: RunResult) -> list[str]:
    """Warn if the winner leaves too little GPU memory for a long run, and name the next best trial that leaves enough."""

    def peak(row: TrialRow) -> float:
        return row.metrics.get("peak_memory_mib", 0.0) / row.metrics.get("gpu_memory_mib", math.inf)

    (metric, mode), best = ranking_metric(result), result.best
    if best is None or peak(best) <= 1 - SPARE_MEMORY:
        return []
    others = [row for row in ran(result.rows) if metric in row.metrics and peak(row) <= 1 - SPARE_MEMORY]
    pick: Callable[..., TrialRow | None] = max if mode == "max" else min
    other = pick(others, key=lambda row: row.metrics[metric], default=None)
    instead = f"take trial {other.id}, the next best that leaves {SPARE_MEMORY:.0%}" if other else "no trial leaves more"
    return [f"trial {best.id} took {peak(best):.1%} of a GPU's memory: a long run may not fit; {instead}"]


def command(run_dir: RunDir, log: RunLog, best: TrialRow) -> str:
    """Return the `distill train …` command that trains at the winner's point, from the run's own experiment.

    It uses the teacher, or last assistant, that the sweep has trained, if any; for a run in an object store, a copy of it, which
    a comment asks the user to make.
    """
    is_copy, comment = uri_of(run_dir.root) is not None, ""
    values = {**best.params, LOADER_WORKERS: best.scale.loader_workers}
    experiment = read_resolved(run_dir.experiment, reading=True).experiment
    preparation = experiment.preparation
    if trained := [name for name in preparation if (log.is_complete(name) if is_copy else run_dir.stage(name).best.exists())]:
        name = trained[-1]
        if name != "teacher":
            values |= {"teacher.model": preparation[name].model, "teachers": [], "assistants": []}
        weights = checkpoint(run_dir.stage(name), log.of_stage(name, "checkpoint")) or run_dir.stage(name).best
        replaced = ("finetune", "weights_key", "head", "logit_scale")
        values |= {f"teacher.{key}": None for key in replaced if getattr(experiment.teacher, key)}
        values["teacher.weights"] = f"{name}.safetensors" if is_copy else str(weights)
        comment = f"  # {name}.safetensors: copy it from {display_name(weights)}" if is_copy else ""
    sets = [f"--set {shlex.quote(f'{key}={written(item)}')}" for key, item in values.items()]
    return " ".join(["distill train", shlex.quote(display_name(run_dir.experiment)), *sets]) + comment


def written(item: Any) -> str:
    """Format a value for `--set`: as JSON, which is YAML, or unquoted if YAML reads the text back unchanged."""
    if isinstance(item, str):
        with contextlib.suppress(ExperimentError):
            if strict_yaml.parse(item, "") == item:
                return item
    return json.dumps(item)
