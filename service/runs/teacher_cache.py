"""`distill cache`: compute a teacher's outputs before the trainings that read them."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from service.cluster.connect import SHARED_RUNS, connect
from service.config.experiment import Resolved
from service.runs.display import Display, wait_for
from service.runs.driver_log import recording
from service.runs.plan import Plan, max_local_cpus
from service.runs.preflight import check_train
from service.runs.run_directory import check_writable
from service.runs.trial import run_to_end
from trainables.config import FillConfig
from trainables.errors import ExperimentError, TrainingError
from trainables.rundir import RunDir, StageDir, create_private


def fill_cache(resolved: Resolved, root: Path) -> str:
    """Run the teacher where its outputs are missing, on the experiment's workers. Returns the line that is shown at the end.

    Raises DistillError.
    """
    experiment, teacher = resolved.experiment, resolved.experiment.teacher
    if teacher is None or teacher.cache is None:
        raise ExperimentError("teacher.cache: names no folder to fill: write --set teacher.cache=FOLDER")
    if experiment.data.more:
        raise ExperimentError("data.more: `distill cache` goes over one set: leave it out, or let `distill train` fill the cache")
    check_writable(root, None)
    resolved, _ = check_train(resolved.override({"tracking.enabled": False}, "cache"))  # nothing is sent to MLflow
    experiment, teacher = resolved.experiment, resolved.experiment.teacher
    if teacher is None or teacher.needs_training or teacher.head:
        raise ExperimentError(
            "teacher.weights: the teacher is not trained on these classes yet: give its checkpoint; `distill train` trains it "
            "first, and fills teacher.cache while it distils"
        )
    create_private(root)
    run_dir = RunDir(root.absolute() / ".cache" / f"{experiment.name}-{time.time_ns():x}")
    cpus, cache = max_local_cpus(experiment), experiment.written_cache("train")
    with (
        Display() as display,
        connect(cpus, run_dir.root, cache, instead=SHARED_RUNS) as cluster,
        recording(run_dir.events) as recorder,
    ):
        plan = Plan.on(experiment, cluster)
        plan.check(cluster)
        after_teacher = [name for name in experiment.preparation if name != "teacher"]
        display.print(f"filling {teacher.cache} with the outputs of {teacher.model}: {plan.describe(cluster)}")
        first, labels = next(iter(after_teacher), "student"), {"run": run_dir.root.name}
        assignment = plan.assign(first, run_dir, labels, teacher.weights)
        stage = StageDir(run_dir.stage("cache").root)
        values = {**assignment.config.model_dump(), "stage": "cache", "output_dir": str(stage.root), "model": teacher.model}
        assignment = replace(assignment, config=FillConfig.model_validate(values)).recorded_by(recorder)
        display.watch(run_dir.events)
        display.follow("cache", "cache", stage)
        outcome = wait_for(lambda: run_to_end(assignment), display)
        display.unfollow("cache")
    if outcome.status != "ok":
        raise TrainingError(f"{outcome.reason}; the log is {stage.log}")
    shutil.rmtree(run_dir.root, ignore_errors=True)
    done = outcome.metrics
    unread = f", all but {done['missing']:,.0f} that cannot be read" if done["missing"] else ""
    num_cached = done["rows"] - done["missing"]
    return f"{teacher.cache} holds the outputs for {num_cached:,.0f} images{unread}; {done['images']:,.0f} were computed now"
