"""Runs one training: the teacher (trained or loaded), its assistants, then the student."""

from collections.abc import Sequence

from service.cluster.connect import connect
from service.config.experiment import Resolved
from service.runs.backbone import write_backbone
from service.runs.plan import Plan, max_local_cpus
from service.runs.result import RunResult
from service.runs.session import ResultReporter, open_session
from service.runs.stages.run_stages import best_checkpoint, prepare_teacher, run_stage
from service.runs.stages.teacher_actors import running_teacher_actors
from service.runs.stored.stored_runs import uri_of
from trainables.config import DataIdentity
from trainables.config.job import StepPart
from trainables.rundir import RunDir


def train(
    resolved: Resolved,
    run_dir: RunDir,
    reporter: ResultReporter,
    data: DataIdentity | None = None,
    without: Sequence[StepPart] = (),
) -> RunResult:
    """Start or resume one run: teacher if needed, assistants, then student. Returns the content of `result.json`.

    For `data` see `open_session`. A timing run times its student again without each of the parts of a step in `without`.

    Raises:
        DistillError: the run failed; `result.json` has the same message.
        KeyboardInterrupt: the run was interrupted; its records are complete.
    """
    experiment = resolved.experiment
    with open_session(resolved, run_dir, reporter, data) as session:
        cpus = max_local_cpus(experiment)
        is_copy = uri_of(run_dir.root) is not None
        with connect(cpus, run_dir.root, experiment.written_cache("train"), is_copy=is_copy) as cluster, session.log.recording():
            plan = Plan.on(experiment, cluster, session.result.accepted_data)
            plan.check(cluster)
            session.save(use_gpu=plan.use_gpu, num_workers=experiment.scale.num_workers, loader_workers=plan.loader_workers)
            session.display.print(plan.describe(cluster))
            weights = prepare_teacher(session, plan)
            with running_teacher_actors(session, plan, cluster, weights) as teachers:
                assignment = plan.assign("student", run_dir, {"run": run_dir.root.name}, weights, teachers)
                student = run_stage(session, assignment)
                for part in without:
                    run_stage(session, assignment.without(part))
        session.show_result()
        for line in write_backbone(run_dir, best_checkpoint(session, student)):
            session.display.print(line)
    return session.result
