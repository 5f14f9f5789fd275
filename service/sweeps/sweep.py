"""The search carried out: trials in the hands of Ray Tune, one row each, resumable, nothing run twice."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from service.cluster import resources as clusters
from service.cluster.resources import Cluster
from service.config.dotted import flatten
from service.config.experiment import Resolved
from service.config.method_rules import needs_teacher
from service.report.tables import compared, verdict
from service.runs.dry_run import refuse_misfits
from service.runs.plan import Plan, absolute
from service.runs.teacher_actors import serving
from service.runs.train import Session, prepare, record_student, session, start_tracking, written_ms
from service.runs.trial import Assignment, Outcome, need
from service.search.replay import conclusion, race, replay
from service.sweeps.trials import Trial, finished_trainings, plan_trials, recall, refuse, training_of
from service.sweeps.tune import guide_trials, sharing_starts, tune_trials
from trainables.errors import TrainingError
from trainables.rundir import RunDir, StageDir, final_names, headline, read_lines, write_atomic, write_json

Taught = tuple[str | None, tuple[str, ...]]
"""Where the teacher's weights are, and the names of the actors of `teacher.service`."""


def sweep(resolved: Resolved, run_dir: RunDir) -> dict[str, Any]:
    """Carry out, or continue, a sweep. Returns what `result.json` holds.

    Raises:
        DistillError: one line; `result.json` says the same. A trial that fails is a row, not an error.
        KeyboardInterrupt: after everything was put away.
    """
    trials = plan_trials(resolved)
    with session(resolved, run_dir) as now:
        recall(trials, run_dir)
        resolved_before = {row["id"]: row["scale"]["data.loader_workers"] for row in now.result.get("trials", ())}
        for trial in trials:
            trial.loader_workers = resolved_before.get(trial.id, trial.loader_workers)
        trials += finished_trainings(trials, run_dir)
        capacity = clusters.local_capacity()
        if clusters.is_local():
            refuse(trials, capacity)
        refuse_misfits(trials)
        pending = [trial for trial in trials if trial.outcome is None]
        if pending or resolved.experiment.sweep.policy == "guided":
            experiments = [resolved.experiment, *(trial.resolved.experiment for trial in pending if trial.resolved)]
            most = max(Plan.on(experiment, capacity).need().total_cpus for experiment in experiments)
            with clusters.connect(most, run_dir.root, resolved.experiment.written_cache("sweep")) as cluster:
                refuse(trials, cluster)
                run_trials(now, trials, cluster)
        finish(now, trials)
    return now.result


def run_trials(now: Session, trials: list[Trial], cluster: Cluster) -> None:
    """Prepare teacher and assistants once, then hand the trials that are left to Ray Tune and record each as it ends."""
    base = now.resolved
    plan = Plan.on(base.experiment, cluster)
    config = base.experiment.sweep
    now.save(
        use_gpu=plan.use_gpu, space=config.axes, metric=config.metric, mode=config.mode, policy=config.policy,
        tolerance=config.tolerance, timing_steps=config.timing_steps, warmup_steps=base.experiment.train.warmup_steps,
        hardware=cluster.hardware(plan.use_gpu, base.experiment.scale.cpus_per_worker),
    )  # fmt: skip
    pending = [trial for trial in trials if trial.outcome is None]
    now.display.say(f"{len(pending)} trials to run, {len(trials) - len(pending)} already decided")
    if not pending and config.policy != "guided":
        return
    timing = config.timing_steps is not None and not config.races
    weights = untrained_teacher(now) if timing else prepare(now, fitting(plan, cluster))
    if config.races:
        trained = [stage["metrics"] for stage in now.result.get("stages", ())]
        now.save(noise_scales=[m["noise_scale"] for m in trained if m.get("noise_scale", 0.0) > 0])
    with serving(now.run_dir.root.name, now.display, plan, cluster, weights) as teachers:
        taught = weights, teachers
        carry_on(now, trials, pending, cluster, taught)
        if config.races:
            race_trials(now, trials, cluster, taught)


def carry_on(now: Session, trials: list[Trial], pending: list[Trial], cluster: Cluster, taught: Taught) -> None:
    """Hand the pending ones of the trials to Ray Tune and record each as it ends; a guided search may measure any point again."""
    config = now.experiment.sweep
    guided = config.policy == "guided" and not any(trial.probe for trial in pending)
    assignments: dict[str, Assignment] = {}
    needs = []
    for trial in [trial for trial in trials if not trial.probe] if guided else pending:
        if trial.resolved is None or (trial.outcome is not None and trial.outcome.status == "infeasible"):
            continue
        mine = Plan.on(trial.resolved.experiment, cluster)
        trial_dir = now.run_dir.trial(trial.id)
        if guided:  # what a kill left of a measurement is of no use, and would look as if it had been begun again
            shutil.rmtree(trial_dir.measurement(trial.num_measurements).root, ignore_errors=True)
        if trial.outcome is None:
            write_atomic(trial_dir.experiment, trial.resolved.to_yaml().encode())
        assignments[trial.id] = mine.assign("student", trial_dir, {"run": now.run_dir.root.name, "trial": trial.id}, *taught)
        needs.append(mine.need())
    report(now, trials)
    if not assignments:
        return
    begun: set[StageDir] = set()
    results = {trial.id: now.run_dir.trial(trial.id).result for trial in trials}
    recalled = {trial.id: changed_ns(results[trial.id]) for trial in trials}

    def tick() -> None:
        start_tracking(now)
        for trial in trials:
            stage = now.run_dir.trial(trial.id).measurement(trial.num_measurements)
            if stage.root.exists() and stage not in begun:
                begun.add(stage)
                begin_record(now, trial, stage)
                now.display.follow(trial.id, stage)
            if (changed := changed_ns(results[trial.id])) != recalled[trial.id]:
                recall([trial], now.run_dir)
                recalled[trial.id] = changed
                end_trial(now, trial)
                report(now, trials)
        now.display.trials(sum(trial.outcome is not None for trial in trials), len(trials))

    search = partial(tune_trials, config)
    if guided:
        assignments = sharing_starts(assignments)
        search = partial(guide_trials, now.result)
        needs = [need(work.config, work.loader_workers, work.use_gpu) for work in assignments.values()]
    at_once = min(cluster.concurrent(each, config.max_concurrent) for each in needs)
    if at_once > 1 and config.steps and any(each.service for each in needs):
        now.display.say("one trial at a time: those beside it would take their part of teacher.service, and of its speed")
        at_once = 1
    now.wait_for(lambda: search(assignments, now.run_dir, at_once), tick)
    tick()
    for trial in [] if guided else pending:  # a guided search has written how each point ended that it began
        if trial.outcome is None:
            if now.run_dir.trial(trial.id).measurement(0) not in begun:
                begin_record(now, trial)
            trial.outcome = unfinished(now, trial)
            write_json(now.run_dir.trial(trial.id).result, asdict(trial.outcome))
            end_trial(now, trial)
    report(now, trials)


def changed_ns(path: Path) -> int:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def race_trials(now: Session, trials: list[Trial], cluster: Cluster, taught: Taught) -> None:
    """Train to the target, one after the other, the points that may reach it first; each as long as it may be the first."""
    if not any(trial.outcome and trial.outcome.status == "ok" for trial in trials):
        return
    planner = replay(now.result)
    while True:
        contest, ids = race(now.result, planner)
        row = contest.ask()
        now.display.say(contest.why() if row is None else f"trial {ids[row]} is trained to the target: {contest.why()}")
        if row is None:
            return
        probe = next(trial for trial in trials if trial.id == ids[row])
        trials.append(training_of(now.resolved, probe, contest.until_s))
        carry_on(now, trials, trials[-1:], cluster, taught)


def untrained_teacher(now: Session) -> str | None:
    """The student's teacher in a timing sweep: how fast it runs does not depend on its weights, so that its first ones will do.

    Raises:
        DistillError: the data or the model cannot be opened.
    """
    experiment, stage = now.experiment, now.run_dir.stage("untrained-teacher")
    teacher, data = experiment.teacher, experiment.data
    if teacher is not None and teacher.weights and not experiment.assistants:
        return absolute(teacher.weights)
    if teacher is None or not needs_teacher(experiment.distill, experiment.sweep.axes):
        return None
    name = experiment.assistants[-1].model if experiment.assistants else teacher.model
    from trainables.data.source import open_source
    from trainables.engine import checkpoint
    from trainables.models.registry import build_model

    classes = open_source(data, "train").classes
    model = build_model(name, num_classes=len(classes), image_size=data.image_size, seed=experiment.seed)
    about = {"model": name, "num_classes": len(classes), "classes": list(classes), "image_size": data.image_size}
    checkpoint.write_tensors(stage.best, {f"model.{name}": value for name, value in model.state_dict().items()}, about)
    now.display.say(f"a timing sweep: the teacher {name} runs with untrained weights")
    return str(stage.best)


def fitting(plan: Plan, cluster: Cluster) -> Plan:
    """The teacher's plan; where the base experiment itself does not fit, its workers do with fewer loader workers.

    Raises:
        TrainingError: not even so.
    """
    alone = replace(plan.need(), service=None)  # it answers for the teacher, once that is trained
    if not cluster.refusal(alone):
        return plan
    smaller = replace(plan, loader_workers=1)
    if refusal := cluster.refusal(replace(smaller.need(), service=None)):
        raise TrainingError(f"the teacher's training: {refusal}: lower scale.num_workers of the experiment itself")
    return smaller


def unfinished(now: Session, trial: Trial) -> Outcome:
    """The outcome of a trial that left no result: stopped by the scheduler, or lost with its process."""
    records = read_lines(now.run_dir.trial(trial.id).stage("student").metrics)
    epochs = [record for record in records if record["kind"] == "epoch"]
    if now.experiment.sweep.policy == "asha" and epochs:
        last = final_names(epochs[-1]["metrics"])
        named = {name: value for name, value in last.items() if not name.startswith(("train/", "val/"))}  # as in a summary
        named["steps"] = float(epochs[-1]["step"])
        for name in ("train_s", "eval_s", "checkpoint_s", "other_s", "wall_s"):  # an epoch's own in its record, the stage's here
            named.pop(name, None)
            if all(f"epoch/{name}" in record["metrics"] for record in epochs):  # not in those of an older version
                named[name] = sum(record["metrics"][f"epoch/{name}"] for record in epochs)
        evaluated = [headline(record["metrics"]) for record in epochs if "val/top1_pct" in record["metrics"]]
        named |= evaluated[-1] if evaluated else {}
        return Outcome("stopped", f"stopped by asha after epoch {epochs[-1]['epoch']:g}", named)
    return Outcome("failed", "the trial's process died: see the logs under " + str(now.run_dir.trial(trial.id).root))


def begin_record(now: Session, trial: Trial, stage: StageDir | None = None) -> None:
    """A child run in MLflow that follows the trial's numbers; a point that is wrong in itself has its own values alone.

    `stage`: the measurement that has begun; without one, the first.
    """
    if now.tracker:
        key = f"trial/{trial.id}"
        whole = flatten(trial.resolved.experiment.model_dump(mode="json")) if trial.resolved else {}
        params = whole | trial.params | {"data.loader_workers": trial.loader_workers}
        now.tracker.start_run(
            key, f"{now.run_dir.root.name}/{trial.id}", parent_key=now.key, params=params, tags={"raydistill.kind": "trial"}
        )
        if not is_timing(now, trial):
            follow(now, trial, stage or now.run_dir.trial(trial.id).measurement(0))


def is_timing(now: Session, trial: Trial) -> bool:
    """Whether a trial ends after its steps are timed: its log lines are of interest when it has ended, if at all."""
    return now.experiment.sweep.timing_steps is not None and trial.probe is None


def follow(now: Session, trial: Trial, stage: StageDir) -> None:
    """Send the log lines of one of the trial's measurements to MLflow."""
    if now.tracker:
        now.tracker.follow(f"trial/{trial.id}", stage.metrics, f"{stage.root.name}/")


def end_trial(now: Session, trial: Trial) -> None:
    """Show and record how a trial ended."""
    now.display.unfollow(trial.id)
    outcome = trial.outcome or Outcome("failed")
    m = outcome.metrics
    numbers = f"{m['images_per_s']:.1f} images/s, {m['epoch_s']:.2f} s an epoch" if "epoch_s" in m else outcome.reason
    again = f", measured {trial.num_measurements} times" if trial.num_measurements > 1 else ""
    point = ", ".join(f"{key}={value}" for key, value in trial.params.items())
    now.display.say(f"trial {trial.id} ({point}): {outcome.status}  {numbers}{again}")
    if now.tracker:
        key = f"trial/{trial.id}"
        row = trial.row(now.resolved, now.experiment.sweep.timing_steps is not None)
        now.tracker.tags(
            key,
            {
                "status": outcome.status,
                "reason": outcome.reason,
                "trial_kind": row["kind"],
                "oversubscribed": str(trial.oversubscribed),
                "measurements": str(trial.num_measurements),
            },
        )
        if m:
            now.tracker.metrics(key, int(m.get("steps", 0)), m, written_ms(now.run_dir.trial(trial.id).result))
        if is_timing(now, trial):  # behind its final numbers: MLflow's compare page opens on what a run was first given
            for number in range(trial.num_measurements):
                follow(now, trial, now.run_dir.trial(trial.id).measurement(number))
        if (written := now.run_dir.trial(trial.id).experiment).exists():
            now.tracker.artifact(key, written)
        now.tracker.end_run(key, "FINISHED" if outcome.status in ("ok", "stopped") else "FAILED")


def best_of(rows: list[dict[str, Any]], metric: str, mode: str) -> dict[str, Any] | None:
    """The complete trial with the best metric; None where no complete trial has it."""
    complete = [row for row in rows if row["status"] == "ok" and row["metrics"].get(metric) is not None]
    if not complete:
        return None
    return (max if mode == "max" else min)(complete, key=lambda row: row["metrics"][metric])


def report(now: Session, trials: list[Trial]) -> None:
    """Write the rows as they stand."""
    config = now.experiment.sweep
    rows = [trial.row(now.resolved, config.timing_steps is not None) for trial in trials]
    now.save(
        space=config.axes, metric=config.metric, mode=config.mode, trials=rows, best=best_of(rows, config.figure, config.mode)
    )


def finish(now: Session, trials: list[Trial]) -> None:
    """The table, the verdict and the winner's student."""
    report(now, trials)
    guided = now.experiment.sweep.policy == "guided"
    if guided:
        now.save(**conclusion(now.result))
    # Points that never ran, and trials that ended in the very moment in which an earlier driver died.
    recorded = now.tracker.runs() if now.tracker else {}
    for trial in trials:
        untested = guided and trial.outcome is None
        if now.tracker and not untested and recorded.get(f"trial/{trial.id}") not in ("FINISHED", "FAILED"):
            begin_record(now, trial)
            end_trial(now, trial)
    for part in compared(now.result):
        now.display.say(part) if isinstance(part, str) else now.display.console.print(part)
    best = now.result["best"]
    if now.tracker:
        now.tracker.describe(now.key, verdict(now.result))
        if best is not None:
            now.tracker.tags(f"trial/{best['id']}", {"best": "true"})
    if best is None:
        raise TrainingError(f"no trial of {len(trials)} gave {now.experiment.sweep.metric}: see the reasons in the table")
    stage = now.run_dir.trial(best["id"]).stage("student")
    record_student(now, now.key, stage, best["metrics"])
