"""The search: points of a space as Ray Tune trials, one row each, resumable, nothing run twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from service import cluster as clusters
from service.cluster import Cluster
from service.experiment import Resolved, read_resolved
from service.plan import Plan, absolute
from service.report.tables import SCALE, sweep_table, verdict
from service.run import Session, record_student, session, start_tracking, train_teacher, written_ms
from service.search.replay import conclusion, race, replay
from service.search.space import SpaceError, points
from service.trees import flatten
from service.trial import Assignment, Outcome, need
from service.tuning import guide_trials, sharing_starts, tune_trials
from trainables.errors import ExperimentError, TrainingError
from trainables.rundir import RunDir, headline, read_lines, write_atomic, write_json

PROBE_LOG_STEPS = 4


@dataclass
class Trial:
    """One point of the sweep. `outcome` is None until it has ended."""

    id: str
    params: dict[str, Any]
    resolved: Resolved | None
    outcome: Outcome | None = None
    oversubscribed: bool = False
    loader_workers: int | str = "auto"
    probe: str | None = None
    """Of a training to the target: the trial that had measured the point's speed."""

    def row(self, base: Resolved, timing: bool) -> dict[str, Any]:
        """The trial in `result.json`."""
        values = flatten(base.experiment.model_dump(mode="json")) | self.params | {"data.loader_workers": self.loader_workers}
        outcome = self.outcome or Outcome("stopped", "not finished")
        return {
            "id": self.id, "params": self.params, "kind": "timing" if timing and not self.probe else "accuracy",
            "status": outcome.status if self.outcome else "pending", "reason": outcome.reason if self.outcome else "",
            "oversubscribed": self.oversubscribed, "restarts": outcome.restarts, "scale": {key: values[key] for key in SCALE},
            "metrics": outcome.metrics, "steps_s": outcome.steps_s, "seconds": outcome.seconds, "start_s": outcome.start_s,
            "ended_s": outcome.ended_s, **({"probe": self.probe} if self.probe else {}),
        }  # fmt: skip

    def judged(self, outcome: Outcome) -> Outcome:
        """A training that ended without the accuracy that it was to reach is no complete one."""
        target = self.resolved.experiment.train.until_top1_pct if self.resolved else None
        if target is None or outcome.status != "ok" or "time_to_accuracy_s" in outcome.metrics:
            return outcome
        m = outcome.metrics
        return replace(
            outcome, status="stopped", reason=f"top-1 {m['top1_pct']:.2f}% after {m['train_s']:.1f} s, not {target:g}%"
        )


def plan_trials(resolved: Resolved) -> list[Trial]:
    """Every point of the space, those that are wrong in themselves already `infeasible`.

    Raises:
        ExperimentError: nothing to search.
    """
    sweep = resolved.experiment.sweep
    try:
        found = points(sweep.space, sweep.policy, sweep.num_samples, resolved.experiment.seed)
    except SpaceError as error:
        raise ExperimentError(f"sweep.space: {error}") from error
    timing: dict[str, Any] = {"train.max_steps": sweep.timing_steps} if sweep.timing_steps is not None else {}
    if sweep.target_pct is not None and not sweep.races:
        timing["train.until_top1_pct"] = sweep.target_pct
    if sweep.policy == "guided":  # a probe may end where it is logged
        timing["train.log_every"] = min(PROBE_LOG_STEPS, resolved.experiment.train.log_every)
    width = max(3, len(str(len(found) - 1)))
    trials = []
    for number, point in enumerate(found):
        trial = Trial(
            f"{number:0{width}d}",
            point,
            None,
            loader_workers=point.get("data.loader_workers", resolved.experiment.data.loader_workers),
        )
        try:
            trial.resolved = resolved.override({**point, **timing}, "trial")
        except ExperimentError as error:
            trial.outcome = Outcome("infeasible", str(error).splitlines()[0].removeprefix("trial: "))
        trials.append(trial)
    return trials


def refuse(trials: list[Trial], cluster: Cluster) -> None:
    """Mark as `infeasible` what the cluster can never hold, as `oversubscribed` what has fewer real cores than it reserves."""
    for trial in trials:
        if trial.resolved is None:
            continue
        plan = Plan.on(trial.resolved.experiment, cluster)
        trial.loader_workers = plan.loader_workers
        trial.oversubscribed = cluster.oversubscribed(plan.need())
        if trial.outcome is None and (refusal := plan.refusal(cluster)):
            trial.outcome = Outcome("infeasible", refusal)


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
        pending = [trial for trial in trials if trial.outcome is None]
        if pending or resolved.experiment.sweep.races:
            experiments = [resolved.experiment, *(trial.resolved.experiment for trial in pending if trial.resolved)]
            most = max(Plan.on(experiment, capacity).need().total_cpus for experiment in experiments)
            with clusters.connect(most, run_dir.root) as cluster:
                refuse(trials, cluster)
                run_trials(now, trials, cluster)
        finish(now, trials)
    return now.result


def recall(trials: list[Trial], run_dir: RunDir) -> None:
    """Take up the outcomes that an earlier, interrupted sweep has left."""
    for trial in trials:
        path = run_dir.trial(trial.id).result
        if path.exists():
            trial.outcome = trial.judged(Outcome(**json.loads(path.read_text())))


def run_trials(now: Session, trials: list[Trial], cluster: Cluster) -> None:
    """Train the teacher once, then hand the trials that are left to Ray Tune and record each as it ends."""
    base = now.resolved
    plan = Plan.on(base.experiment, cluster)
    config = base.experiment.sweep
    now.save(
        use_gpu=plan.use_gpu, space=config.space, metric=config.metric, mode=config.mode, policy=config.policy,
        tolerance=config.tolerance, timing_steps=config.timing_steps,
        hardware=cluster.hardware(plan.use_gpu, base.experiment.scale.cpus_per_worker),
    )  # fmt: skip
    pending = [trial for trial in trials if trial.outcome is None]
    now.display.say(f"{len(pending)} trials to run, {len(trials) - len(pending)} already decided")
    if not pending and not config.races:
        return
    timing = config.timing_steps is not None and not config.races
    weights = untrained_teacher(now) if timing else train_teacher(now, fitting(plan, cluster))
    if config.races:
        trained = [stage["metrics"] for stage in now.result.get("stages", ())]
        now.save(noise_scales=[m["noise_scale"] for m in trained if m.get("noise_scale", 0.0) > 0])
    carry_on(now, trials, pending, cluster, weights)
    if config.races:
        race_trials(now, trials, cluster, weights)


def carry_on(now: Session, trials: list[Trial], pending: list[Trial], cluster: Cluster, weights: str | None) -> None:
    """Hand the pending ones of the trials to Ray Tune and record each as it ends."""
    config = now.experiment.sweep
    guided = config.policy == "guided" and not any(trial.probe for trial in pending)
    assignments: dict[str, Assignment] = {}
    needs = []
    for trial in pending:
        if trial.resolved is None:
            continue
        mine = Plan.on(trial.resolved.experiment, cluster)
        trial_dir = now.run_dir.trial(trial.id)
        if guided:  # what a kill left of a probe is of no use, and would look as if the point had been begun again
            shutil.rmtree(trial_dir.stage("student").root, ignore_errors=True)
        write_atomic(trial_dir.experiment, trial.resolved.to_yaml().encode())
        assignments[trial.id] = mine.assign("student", trial_dir, {"run": now.run_dir.root.name, "trial": trial.id}, weights)
        needs.append(mine.need())
    report(now, trials)
    if not assignments:
        return
    known = {trial.id for trial in trials if trial.outcome is not None}
    begun: set[str] = set()

    def tick() -> None:
        start_tracking(now)
        for trial in trials:
            if trial.id in known:
                continue
            stage = now.run_dir.trial(trial.id).stage("student")
            if stage.root.exists() and trial.id not in begun:
                begun.add(trial.id)
                begin_record(now, trial)
                now.display.follow(trial.id, stage)
            if now.run_dir.trial(trial.id).result.exists():
                recall([trial], now.run_dir)
                known.add(trial.id)
                end_trial(now, trial)
                report(now, trials)
        now.display.trials(len(known), len(trials))

    search = partial(tune_trials, config)
    if guided:
        assignments = sharing_starts(assignments)
        search = partial(guide_trials, now.result)
        needs = [need(work.config, work.loader_workers, work.use_gpu) for work in assignments.values()]
    at_once = min(cluster.concurrent(each, config.max_concurrent) for each in needs)
    now.wait_for(lambda: search(assignments, now.run_dir, at_once), tick)
    tick()
    for trial in [] if guided else pending:  # a guided search has written how each point ended that it began
        if trial.id not in known:
            if trial.id not in begun:
                begin_record(now, trial)
            trial.outcome = unfinished(now, trial)
            write_json(now.run_dir.trial(trial.id).result, asdict(trial.outcome))
            end_trial(now, trial)
    report(now, trials)


def race_trials(now: Session, trials: list[Trial], cluster: Cluster, weights: str | None) -> None:
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
        carry_on(now, trials, trials[-1:], cluster, weights)


def training_of(base: Resolved, probe: Trial, until_s: float | None) -> Trial:
    """The training to the target of a point whose speed is known."""
    goal = {"train.until_top1_pct": base.experiment.sweep.target_pct, "train.until_s": until_s}
    return following(probe, base.override({**probe.params, "data.loader_workers": probe.loader_workers, **goal}, "trial"))


def following(probe: Trial, resolved: Resolved) -> Trial:
    """The training of a probe's point, as `resolved` has it."""
    workers = resolved.experiment.data.loader_workers
    return Trial(trained_id(probe), probe.params, resolved, None, probe.oversubscribed, workers, probe.id)


def trained_id(probe: Trial) -> str:
    return f"{probe.id}-trained"


def finished_trainings(probes: list[Trial], run_dir: RunDir) -> list[Trial]:
    """The trainings to the target that an earlier, interrupted sweep has finished."""
    places = {probe.id: run_dir.trial(trained_id(probe)) for probe in probes}
    done = [probe for probe in probes if places[probe.id].result.exists()]
    found = [following(probe, read_resolved(places[probe.id].experiment)) for probe in done]
    recall(found, run_dir)
    return found


def untrained_teacher(now: Session) -> str | None:
    """The teacher of a timing sweep: how fast it runs does not depend on its weights, so that its first ones will do.

    Raises:
        DistillError: the data or the model cannot be opened.
    """
    experiment, stage = now.experiment, now.run_dir.stage("untrained-teacher")
    teacher, data = experiment.teacher, experiment.data
    if teacher is None or teacher.weights:
        return absolute(teacher.weights) if teacher and teacher.weights else None
    from trainables import checkpoint
    from trainables.data.source import open_source
    from trainables.models.registry import build_model

    classes = open_source(data, "train").classes
    model = build_model(teacher.model, num_classes=len(classes), image_size=data.image_size, seed=experiment.seed)
    about = {"model": teacher.model, "num_classes": len(classes), "classes": list(classes), "image_size": data.image_size}
    checkpoint.write_tensors(stage.best, {f"model.{name}": value for name, value in model.state_dict().items()}, about)
    now.display.say(f"a timing sweep: the teacher {teacher.model} runs with untrained weights")
    return str(stage.best)


def fitting(plan: Plan, cluster: Cluster) -> Plan:
    """The teacher's plan; where the base experiment itself does not fit, its workers do with fewer loader workers.

    Raises:
        TrainingError: not even so.
    """
    if not cluster.refusal(plan.need()):
        return plan
    smaller = replace(plan, loader_workers=1)
    if refusal := cluster.refusal(smaller.need()):
        raise TrainingError(f"the teacher's training: {refusal}: lower scale.num_workers of the experiment itself")
    return smaller


def unfinished(now: Session, trial: Trial) -> Outcome:
    """The outcome of a trial that left no result: stopped by the scheduler, or lost with its process."""
    records = read_lines(now.run_dir.trial(trial.id).stage("student").metrics)
    epochs = [record for record in records if record["kind"] == "epoch"]
    if now.experiment.sweep.policy == "asha" and epochs:
        metrics = epochs[-1]["metrics"]
        named = {**metrics, **headline(metrics), "steps": float(epochs[-1]["step"])}
        return Outcome("stopped", f"stopped by asha after epoch {epochs[-1]['epoch']:g}", named)
    return Outcome("failed", "the trial's process died: see the logs under " + str(now.run_dir.trial(trial.id).root))


def begin_record(now: Session, trial: Trial) -> None:
    """A child run in MLflow that follows the trial's numbers; a point that is wrong in itself has its own values alone."""
    if now.tracker:
        key = f"trial/{trial.id}"
        whole = flatten(trial.resolved.experiment.model_dump(mode="json")) if trial.resolved else {}
        params = whole | trial.params | {"data.loader_workers": trial.loader_workers}
        now.tracker.start_run(
            key, f"{now.run_dir.root.name}/{trial.id}", parent_key=now.key, params=params, tags={"raydistill.kind": "trial"}
        )
        now.tracker.follow(key, now.run_dir.trial(trial.id).stage("student").metrics, "student/")


def end_trial(now: Session, trial: Trial) -> None:
    """Show and record how a trial ended."""
    now.display.unfollow(trial.id)
    outcome = trial.outcome or Outcome("failed")
    m = outcome.metrics
    numbers = f"{m['images_per_s']:.1f} images/s, {m['epoch_s']:.2f} s an epoch" if "epoch_s" in m else outcome.reason
    point = ", ".join(f"{key}={value}" for key, value in trial.params.items())
    now.display.say(f"trial {trial.id} ({point}): {outcome.status}  {numbers}")
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
            },
        )
        if m:
            now.tracker.metrics(key, int(m.get("steps", 0)), m, written_ms(now.run_dir.trial(trial.id).result))
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
        space=config.space, metric=config.metric, mode=config.mode, trials=rows, best=best_of(rows, config.figure, config.mode)
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
    now.display.console.print(sweep_table(now.result))
    for line in verdict(now.result):
        now.display.say(line)
    best = now.result["best"]
    if best is None:
        raise TrainingError(f"no trial of {len(trials)} gave {now.experiment.sweep.metric}: see the reasons in the table")
    stage = now.run_dir.trial(best["id"]).stage("student")
    record_student(now, now.key, stage, best["metrics"])
