"""A short timing run of an experiment, for the doctor to read."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from service.cluster.connect import connect
from service.config.experiment import Resolved
from service.doctor.measure import step_ms_without, without
from service.doctor.read_run import Recording, read_run
from service.report import end_of_run
from service.runs.plan import Plan, most_local_cpus
from service.runs.preflight import check_train
from service.runs.result import RunResult
from service.runs.run_directory import begin_run, check_writable, new_run_dir
from service.runs.session import open_session
from service.runs.stages.run_stages import prepare_teacher, run_stage
from service.runs.stages.teacher_actors import running_teacher_actors
from service.runs.stored.stored_runs import uri_of
from trainables.config.job import StepPart
from trainables.rundir import RunDir

STEPS = 40
"""Timed steps of a probe, where the experiment does not set `train.max_steps` itself."""


def probe(resolved: Resolved, root: Path, parts: Sequence[StepPart] = ()) -> tuple[list[Recording], dict[StepPart, float]]:
    """Time a few steps of the student, in a run directory of its own under `root`; nothing is sent to MLflow.

    Returns what it has recorded, and the milliseconds of a step without each of `parts`.

    Raises DistillError: one line: the experiment cannot be run.
    """
    steps = resolved.experiment.train.max_steps or STEPS
    short = resolved.override({"train.max_steps": steps, "tracking.enabled": False}, "doctor")
    check_writable(root, None)
    short, _ = check_train(short)
    run_dir = new_run_dir(root, f"{resolved.experiment.name}-doctor", None)
    begin_run(short, "train", run_dir, root)
    with contextlib.redirect_stdout(sys.stderr):  # its progress: standard output begins with the main finding
        result = run_probe(short, run_dir, parts)
    return read_run(short, run_dir, result), {part: step_ms_without(part, short.experiment, run_dir) for part in parts}


def run_probe(resolved: Resolved, run_dir: RunDir, parts: Sequence[StepPart]) -> RunResult:
    """Run the student's timing steps, and the same again without each of `parts`."""
    cpus = most_local_cpus(resolved.experiment)
    is_copy = uri_of(run_dir.root) is not None
    with (
        open_session(resolved, run_dir, end_of_run) as session,
        connect(cpus, run_dir.root, is_copy=is_copy) as cluster,
        session.log.recording(),
    ):
        plan = Plan.on(resolved.experiment, cluster)
        plan.check(cluster)
        session.save(use_gpu=plan.use_gpu, num_workers=resolved.experiment.scale.num_workers, loader_workers=plan.loader_workers)
        session.display.print(plan.describe(cluster))
        weights = prepare_teacher(session, plan)
        with running_teacher_actors(session.run_dir.root.name, session.display, plan, cluster, weights) as teachers:
            student = plan.assign("student", run_dir, {"run": run_dir.root.name}, weights, teachers)
            run_stage(session, student)
            for part in parts:
                run_stage(session, without(student, part))
    return session.result
