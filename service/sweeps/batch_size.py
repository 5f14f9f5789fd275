"""Decides `data.global_batch_size: auto` once, when a training begins: by a guided timing sweep over batches.

The sweep is a run of its own in the folder `batch-size` of the training's run. So it is resumed as every sweep is, has a page,
and leaves nothing in the training's metrics and in MLflow. A teacher that the run trains is timed too, at the batch that is
best for the student, since it has to fit as well.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from service.cluster.resources import Cluster
from service.config.batch_size import AUTO, TIMED, smallest_batch
from service.config.experiment import Resolved
from service.config.paths import absolute_paths
from service.config.space import GLOBAL_BATCH
from service.runs.driver_log import DriverLog
from service.runs.dry_run import check_parts, note_warmup
from service.runs.method_copies import use_copies_of
from service.runs.plan import Plan
from service.runs.result import RunResult
from service.runs.run_directory import begin_run, has_begun, locked_run, reopen, runs_root_of
from service.runs.run_log import read_log
from service.runs.session import ResultReporter, Session, open_session
from service.runs.stages.run_stages import UNTRAINED_TEACHER, run_stage
from service.runs.stored.stored_runs import delete, display_name, fetch_records
from service.runs.stored.stored_session import stored_session
from service.search.points import SPARE_MEMORY, Observation
from service.search.replay import observation, replay
from service.search.rows import measurements
from service.sweeps.sweep import sweep
from trainables.config import DataIdentity
from trainables.data.source import open_source
from trainables.errors import DistillError, ExperimentError, TrainingError
from trainables.notices import notice, notices_to
from trainables.rules import enough_images
from trainables.rundir import RunDir, write_text

BUDGET_S = 300.0
"""Seconds of the workers that the timings may take, unless the experiment has `sweep.budget_gpu_h`."""
TEACHER_STEPS = 8
NO_BATCH_FITS = "data.global_batch_size: auto finds no batch that fits: take smaller models, or more workers"
STEPS_PER_EPOCH = 16
"""The least that a batch leaves of an epoch, unless it is the smallest: a training of a few large steps learns little."""


def with_batch_size(resolved: Resolved, run_dir: RunDir, reporter: ResultReporter, data: DataIdentity | None) -> Resolved:
    """Replace `data.global_batch_size: auto` by the batch that is best on this cluster, and record that in the run.

    A number stays as it is. An interrupted timing is resumed. The log has the decision before `experiment.yaml` does.

    Raises DistillError: no batch fits; the run's log has the reason.
    """
    if resolved.experiment.data.global_batch_size != AUTO or data is None:
        return resolved
    try:
        with (
            locked_run(run_dir),
            stored_session(run_dir, notice) as store,
            contextlib.closing(DriverLog(run_dir.events, store)) as log,
        ):

            def record(line: str) -> None:
                log.record("notice", text=line)

            result = time_batches(resolved, run_dir, reporter, data, record)
            use_copies_of(run_dir)  # the sweep has used its own
            delete(RunDir(run_dir.batch_size).stage(UNTRAINED_TEACHER).best)
            batch = choose(timings(result), result.tolerance)
            decided = resolved.override({GLOBAL_BATCH: batch}, TIMED)
            log.record("result", changes={"sources": decided.sources})
            with notices_to(record):
                notice(describe(decided, batch, result, run_dir))
                note_warmup(decided.experiment, data.train.num_images)
            write_text(run_dir.experiment, decided.to_yaml())
            return decided
    except DistillError:
        untracked = resolved.override({"tracking.enabled": False}, TIMED)  # MLflow would keep `auto` for good
        with open_session(untracked, run_dir, reporter, data):
            raise


def time_batches(
    resolved: Resolved, run_dir: RunDir, reporter: ResultReporter, data: DataIdentity, record: Callable[[str], None]
) -> RunResult:
    """Run the timing sweep of a training's run, or what is left of it. `record` writes a notice to the training's log.

    Raises what `sweep` raises; TrainingError: no batch fits.
    """
    sweep_dir = RunDir(run_dir.batch_size)
    fetch_records(sweep_dir.root)
    if not has_begun(sweep_dir.root):
        batches = batches_to_try(resolved, len(data.classes))
        with notices_to(record):  # the run is in its object store from here on
            notice(f"data.global_batch_size: auto: timing {', '.join(map(str, batches))} first")
        timing = timing_sweep(resolved, batches)
        begin_run(timing, "sweep", sweep_dir, runs_root_of(read_log(run_dir).result))
    else:
        timing, _, result = reopen(sweep_dir.root, to_continue=True)
        if result.status == "complete":
            return result
    then = time_teacher if "teacher" in timing.experiment.trained_before else None
    try:
        return sweep(timing, sweep_dir, reporter, then=then)
    except TrainingError as error:
        rows = read_log(sweep_dir).result.rows
        if any(row.status == "oom" for row in rows) and all(row.status in ("oom", "untested") for row in rows):
            raise TrainingError(NO_BATCH_FITS) from error
        raise


def batches_to_try(resolved: Resolved, num_classes: int) -> list[int]:
    """List the global batches from `smallest_batch` on, each twice the one before, that the data and all rules allow.

    None has more images than `data.path` has for training, see also `STEPS_PER_EPOCH`. Raises ExperimentError: there is none.
    """
    data, batch, batches = resolved.experiment.data, smallest_batch(resolved.experiment), list[int]()
    num_images = len(open_source(data.sets[0].model_copy(update={"stage": "none"}), "train"))
    problem = f"{data.path} has {num_images} training images, and the smallest batch that is tried {batch}"
    largest = min(num_images, max(batch, num_images // STEPS_PER_EPOCH))
    while batch <= largest:
        try:
            tried = resolved.override({GLOBAL_BATCH: batch}, TIMED).experiment
            if reason := enough_images(tried.stage("student", Path("/"), {}).data, num_images):
                raise ExperimentError(reason)
            check_parts(tried, num_images, num_classes, ["student", *tried.trained_before])
            batches.append(batch)
        except ExperimentError as error:
            problem = str(error)
        batch *= 2
    if not batches:
        raise ExperimentError(f"data.global_batch_size: auto finds no batch: write a number ({problem})")
    return batches


def timing_sweep(resolved: Resolved, batches: list[int]) -> Resolved:
    """The experiment of the sweep over `batches`. Methods and models in files are those that the run has copied."""
    experiment = resolved.experiment
    own, tree = experiment.sweep, experiment.model_dump(mode="json")
    budget_gpu_h = own.budget_gpu_h or BUDGET_S * experiment.scale.num_workers / 3600
    search = {"policy": "guided", "tolerance": own.tolerance, "steps": own.steps, "trial_limit_s": own.trial_limit_s}
    changes: dict[str, Any] = {
        "sweep": {"space": {GLOBAL_BATCH: batches}, "budget_gpu_h": budget_gpu_h, **search},
        GLOBAL_BATCH: batches[0],
        "train.until_top1_pct": None,
        "train.until_s": None,
        "tracking.enabled": False,
    }
    return resolved.override(absolute_paths(tree) | changes, "data.global_batch_size: auto")


def time_teacher(session: Session, cluster: Cluster) -> None:
    """Time the teacher's training at the batch that is best for the student, and while it does not fit, at the next best.

    Raises TrainingError: it fails, or fits with none.
    """
    while (batch := choose(timings(session.result), session.result.tolerance)) not in teacher_timings(session.result):
        values = {GLOBAL_BATCH: batch, "train.max_steps": TEACHER_STEPS}
        plan = Plan.on(session.resolved.override(values, TIMED).experiment, cluster)
        teacher = plan.experiment.teacher
        weights = teacher.weights if teacher is not None else None
        assignment = plan.assign("teacher", session.run_dir, {"run": session.run_dir.root.name}, weights)
        try:
            run_stage(session, assignment.named(f"teacher-{batch}"))
        except TrainingError:
            if batch not in teacher_timings(session.result):
                raise


def teacher_timings(result: RunResult) -> dict[int, Observation]:
    """The batches that the teacher's training was timed at."""
    ended = [row for row in result.stages if row.status in ("ok", "oom")]
    return {int(row.stage.removeprefix("teacher-")): observation(row) for row in ended}


class Timing(NamedTuple):
    """What a batch brought."""

    images_per_s: float = 0.0
    problem: str = ""
    """Why it is not taken, however fast it is."""
    is_tight: bool = False
    """Whether that is the little memory it leaves; it fits."""

    def __str__(self) -> str:
        speed = f"{self.images_per_s:,.{0 if self.images_per_s >= 100 else 1}f} images/s" if self.images_per_s else ""
        return ", ".join(filter(None, [speed, self.problem]))


def timings(result: RunResult) -> dict[int, Timing]:
    """The batches that were tried, in order; speeds are those of the search's model, which has seen all measurements."""
    planner, found = replay(result), dict[int, Timing]()
    step_s = {planner.points[row][GLOBAL_BATCH]: float(planner.step_s()[row]) for row in planner.measured_rows}
    for row in result.rows:
        batch, seen = row.scale.global_batch_size, [observation(one) for one in measurements(row)]
        teacher = [one for timed, one in teacher_timings(result).items() if timed <= batch]
        problem, is_tight = "", False
        if any(one.status == "oom" for one in seen):
            problem = "out of memory"
        elif batch not in step_s:
            problem = str(row.status)
        elif any(one.status == "oom" for one in teacher):
            problem = "the teacher runs out of memory"
        elif not all(one.leaves_memory for one in (*seen, *teacher)):
            problem, is_tight = "too little memory left", True
        if seen:
            found[batch] = Timing(batch / step_s[batch] if batch in step_s else 0.0, problem, is_tight)
    return found


def choose(timings: Mapping[int, Timing], tolerance: float) -> int:
    """The smallest batch that is within `tolerance` of the most images/s, among those that leave memory to spare.

    If none leaves memory, it is the smallest that ran. Raises TrainingError: none did.
    """
    speeds = {batch: one.images_per_s for batch, one in timings.items() if not one.problem}
    tight = [batch for batch, one in timings.items() if one.is_tight]
    if not speeds and not tight:
        raise TrainingError(NO_BATCH_FITS)
    fastest = max(speeds.values(), default=0.0)
    return min([batch for batch, speed in speeds.items() if speed * (1 + tolerance) >= fastest] or tight)


def describe(decided: Resolved, batch: int, result: RunResult, run_dir: RunDir) -> str:
    """Say which batch is taken and why, what the others gave, and what it changes about the training."""
    from trainables.engine.optim import peak_learning_rate

    optim, tried = decided.experiment.optim, timings(result)
    why = f"the smallest batch within {result.tolerance:.1%} of the most images/s"
    if tried[batch].problem:
        why = f"the smallest one, since none leaves {SPARE_MEMORY:.0%} of a GPU's memory free"
    listed = "; ".join(f"{each}: {timing}" for each, timing in tried.items())
    peak = peak_learning_rate(optim, batch)
    rate = f"stays {optim.lr:g}" if optim.lr_scaling == "none" else f"{optim.lr:g} becomes {peak:g}"
    return (
        f"data.global_batch_size: auto is {batch}, {why} ({listed}). Accuracy depends on the batch: optim.lr {rate} "
        f"(optim.lr_scaling: {optim.lr_scaling}). The timings are in {display_name(run_dir.batch_size)}"
    )
