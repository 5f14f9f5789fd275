"""`distill cache`: compute a teacher's outputs before the trainings that read them."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from service.cluster.connect import SHARED_RUNS, connect
from service.config.batch_size import refuse_auto
from service.config.experiment import Resolved
from service.config.schema import Experiment
from service.runs.display import Display, wait_for
from service.runs.driver_log import recording
from service.runs.plan import Plan, max_local_cpus
from service.runs.preflight import check_train
from service.runs.run_directory import check_writable
from service.runs.trial import run_to_end
from trainables.config import FillConfig
from trainables.data.storage.free_space import format_bytes
from trainables.errors import ExperimentError, TrainingError
from trainables.notices import notice
from trainables.rundir import RunDir, StageDir, create_private
from trainables.teachers.cache import CARD_TITLE


def fill_cache(resolved: Resolved, root: Path, publish: Path | None = None) -> str:
    """Run the teachers where their outputs are missing, on the experiment's workers. Returns the line that is shown at the end.

    `publish`: the folder of the cache, which becomes a reinforced data set.

    Raises DistillError.
    """
    experiment, teachers = resolved.experiment, resolved.experiment.all_teachers
    refuse_auto(experiment, "cache")
    if not teachers or teachers[0].cache is None:
        raise ExperimentError("teacher.cache: names no folder to fill: write --set teacher.cache=FOLDER")
    if publish is not None:
        _check_published(publish, experiment)
    if experiment.data.more:
        raise ExperimentError("data.more: `distill cache` goes over one set: leave it out, or let `distill train` fill the cache")
    check_writable(root, None)
    resolved, data = check_train(resolved.override({"tracking.enabled": False}, "cache"))  # nothing is sent to MLflow
    experiment, teacher = resolved.experiment, resolved.experiment.teacher
    if teacher is not None and (teacher.needs_training or teacher.head):
        raise ExperimentError(
            "teacher.weights: the teacher is not trained on these classes yet: give its checkpoint; `distill train` trains it "
            "first, and fills teacher.cache while it distils"
        )
    if publish is not None and data is not None:
        _note_size(experiment, data.train.num_images)
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
        names = " and ".join(each.model for each in teachers)
        display.print(f"filling {teachers[0].cache} with the outputs of {names}: {plan.describe(cluster)}")
        first, labels = next(iter(after_teacher), "student"), {"run": run_dir.root.name}
        assignment = plan.assign(first, run_dir, labels, teacher.weights if teacher is not None else None)
        stage = StageDir(run_dir.stage("cache").root)
        values = {**assignment.config.model_dump(), "stage": "cache", "output_dir": str(stage.root), "model": teachers[0].model}
        values["publish"] = publish is not None
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
    where = f"{teachers[0].cache}{', with README.md and read_targets.py,' if publish else ''}"
    return f"{where} holds the outputs for {num_cached:,.0f} images{unread}; {done['images']:,.0f} were computed now"


def _check_published(folder: Path, experiment: Experiment) -> None:
    """Refuse a folder that cannot become a reinforced data set. Raises ExperimentError."""
    from trainables.teachers.cache.publish import unpublished_policy

    if policy := unpublished_policy(experiment.data):
        raise ExperimentError(
            f"data.device_augment.policy {policy}: --publish has no columns for it: write randaugment, randaugment_timm, "
            "autoaugment or trivialaugment"
        )
    readme = folder / "README.md"
    if any(each.cache != str(folder) for each in experiment.all_teachers):
        raise ExperimentError(f"--publish {folder}: write cache: {folder} in each of teachers")
    if readme.exists() and not readme.read_text(errors="replace").startswith(CARD_TITLE):
        raise ExperimentError(f"--publish {folder}: its README.md is not of a reinforced data set: name another folder")


def _note_size(experiment: Experiment, num_images: int) -> None:
    """Say how much is stored with the teachers' outputs."""
    from trainables.teachers.cache.cached_teacher import cached_epochs
    from trainables.teachers.cache.publish import augmentation_bytes

    config = experiment.stage("student", Path("/"), {})
    size = format_bytes(augmentation_bytes(config, num_images, cached_epochs(config)))
    notice(f"--publish: {size} more say how each image is augmented")
