"""Runs a sweep: trains its teacher once, then its trials with Ray Tune, one row each. A resumed sweep runs nothing twice."""

from collections.abc import Callable
from dataclasses import replace

from service.cluster.connect import connect
from service.cluster.resources import HEAD, Cluster, is_local, local_capacity
from service.config.experiment import Resolved
from service.runs.backbone import write_backbone
from service.runs.plan import Plan, max_local_cpus
from service.runs.result import ClusterHardware, RunResult
from service.runs.session import ResultReporter, Session, open_session
from service.runs.stages.run_stages import best_checkpoint, prepare_teacher, untrained_teacher
from service.runs.stages.teacher_actors import running_teacher_actors
from service.runs.stored.stored_runs import uri_of
from service.search.replay import conclusion, replay, time_to_accuracy_search
from service.sweeps.preflight import mark_unbuildable, mark_unschedulable
from service.sweeps.run_trials import TeacherSource, run_pending, save_rows
from service.sweeps.trials import (
    Trial,
    finished_target_trials,
    load_outcomes,
    may_retry,
    plan_trials,
    retry_trials,
    target_trial,
)
from trainables.config import DataIdentity
from trainables.errors import ClusterError, TrainingError
from trainables.rundir import RunDir


def sweep(
    resolved: Resolved,
    run_dir: RunDir,
    reporter: ResultReporter,
    data: DataIdentity | None = None,
    then: Callable[[Session, Cluster], None] | None = None,
) -> RunResult:
    """Start or resume a sweep. Returns the content of `result.json`. For `data` see `open_session`.

    `then` is called after the trials, while Ray runs, if there is a trial with a result.

    Raises:
        DistillError: the sweep failed; `result.json` has the same message. A trial that fails is a row, not an error.
        KeyboardInterrupt: the sweep was interrupted; its records are complete.
    """
    trials = plan_trials(resolved)
    with open_session(resolved, run_dir, reporter, data) as session:
        load_outcomes(trials, session.fold)
        if may_retry(resolved.experiment):
            retry_trials(trials, session)
        rows = {row.id: row for row in session.result.rows}
        for trial in trials:
            if (row := rows.get(trial.id)) is not None:
                trial.loader_workers, trial.oversubscribed = row.scale.loader_workers, row.oversubscribed
        trials += finished_target_trials(trials, session.fold)
        if is_local():
            mark_unschedulable(trials, local_capacity())
        mark_unbuildable(trials, data)
        pending = [trial for trial in trials if trial.outcome is None]
        if pending or resolved.experiment.sweep.policy == "guided":
            experiments = [resolved.experiment, *(trial.resolved.experiment for trial in pending if trial.resolved)]
            cache = resolved.experiment.written_cache("sweep")
            is_copy = uri_of(run_dir.root) is not None
            cpus = max_local_cpus(*experiments)
            with connect(cpus, run_dir.root, cache, is_copy=is_copy) as cluster, session.log.recording():
                check_driver_node(run_dir)
                mark_unschedulable(trials, cluster)
                run_trials(session, trials, cluster)
                if then is not None and session.result.best is not None:
                    then(session, cluster)
        finish(session, trials)
    return session.result


def check_driver_node(run_dir: RunDir) -> None:
    """Raise ClusterError if the sweep is in an object store and the driver is not on the head node, where trials run."""
    if uri := uri_of(run_dir.root):
        import ray

        here = ray.get_runtime_context().get_node_id()
        if not any(HEAD in node["Resources"] for node in ray.nodes() if node["NodeID"] == here):
            what = "a sweep in an object store, such as that of data.global_batch_size: auto,"
            raise ClusterError(f"{uri}: the driver of {what} must run on the head node: use `distill submit`")


def run_trials(session: Session, trials: list[Trial], cluster: Cluster) -> None:
    """Prepare teacher and assistants once, run the pending trials, then train to the target if the sweep has one."""
    experiment = session.experiment
    plan, config = Plan.on(experiment, cluster, session.result.accepted_data), experiment.sweep
    session.save(
        use_gpu=plan.use_gpu,
        policy=config.policy,
        tolerance=config.tolerance,
        budget_grid_share=config.budget_grid_share,
        budget_gpu_h=config.budget_gpu_h,
        timing_steps=config.timing_steps,
        warmup_steps=experiment.train.warmup_steps,
        hardware=ClusterHardware.model_validate(cluster.hardware(plan.use_gpu, experiment.scale.cpus_per_worker)),
    )
    pending = [trial for trial in trials if trial.outcome is None]
    session.display.print(f"{len(pending)} trials to run, {len(trials) - len(pending)} already decided")
    if not pending and config.policy != "guided":
        return
    timing = config.timing_steps is not None and not config.is_time_to_accuracy
    weights = untrained_teacher(session) if timing else prepare_teacher(session, shrink_to_fit(plan, cluster))
    if config.is_time_to_accuracy:
        noise_scales = [stage.metrics.get("noise_scale", 0.0) for stage in session.result.stages]
        session.save(noise_scales=[noise_scale for noise_scale in noise_scales if noise_scale > 0])
    with running_teacher_actors(session, plan, cluster, weights) as actors:
        teacher = TeacherSource(weights, actors)
        run_pending(session, trials, pending, cluster, teacher)
        if config.is_time_to_accuracy:
            train_to_target(session, trials, cluster, teacher)


def train_to_target(session: Session, trials: list[Trial], cluster: Cluster, teacher: TeacherSource) -> None:
    """Train one after another the points that may reach the target first, each for as long as it may still be the first."""
    if not any(trial.outcome and trial.outcome.status == "ok" for trial in trials):
        return
    planner = replay(session.result)
    while True:
        search, ids = time_to_accuracy_search(session.result, planner)
        row = search.ask()
        session.display.print(search.why() if row is None else f"training trial {ids[row]} to the target: {search.why()}")
        if row is None:
            return
        speed_trial = next(trial for trial in trials if trial.id == ids[row])
        trials.append(target_trial(session.resolved, speed_trial, search.until_s))
        run_pending(session, trials, trials[-1:], cluster, teacher)


def shrink_to_fit(plan: Plan, cluster: Cluster) -> Plan:
    """Return the teacher's plan, with 1 loader worker if the base experiment does not fit on the cluster as it is.

    Raises TrainingError: it does not fit even then.
    """

    def refusal(plan: Plan) -> str | None:  # without teacher.service, which starts after the teacher's training
        return cluster.refusal(replace(plan.reservation(), service=None))

    if not refusal(plan):
        return plan
    smaller = replace(plan, loader_workers=1)
    if reason := refusal(smaller):
        raise TrainingError(f"the teacher's training: {reason}: lower scale.num_workers of the experiment itself")
    return smaller


def finish(session: Session, trials: list[Trial]) -> None:
    """Show the table, record the verdict, and write the winner's backbone. Raises TrainingError: no trial has a result."""
    save_rows(session, trials)
    if session.experiment.sweep.policy == "guided":
        session.save(**conclusion(session.result))
    session.save(verdict=session.show_result())
    best = session.result.best
    if best is None:
        raise TrainingError(f"none of {len(trials)} trials measured {session.experiment.sweep.metric}: see the table for reasons")
    stage = session.run_dir.trial(best.id).stage("student")
    for line in write_backbone(session.run_dir, best_checkpoint(session, stage)):
        session.display.print(line)
