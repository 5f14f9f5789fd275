"""Times an experiment for the doctor: a short run, and the same steps again without a part, which shows what that part costs."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.config.experiment import Resolved
from service.config.rules import needs_teacher
from service.config.schema import Experiment
from service.doctor.evidence import Evidence
from service.doctor.read_run import Recording, evidence_of, read_run
from service.doctor.step_model import Effect, late_ms, step_after_ms
from service.report import end_of_run
from service.runs.preflight import check_train
from service.runs.run_directory import begin_run, check_writable, new_run_dir
from service.runs.run_log import read_log
from service.runs.train import train
from trainables.config.job import StepPart

STEPS = 40  # timed, unless the experiment sets `train.max_steps`
DESCRIPTIONS: dict[StepPart, str] = {
    "nothing": "unchanged, once more",
    "loading": "with one batch kept in memory",
    "teacher": "with the teacher's outputs kept in memory",
    "allreduce": "without averaging gradients over workers",
}


def probe(resolved: Resolved, root: Path, parts: Sequence[StepPart] = ()) -> tuple[list[Recording], dict[StepPart, float]]:
    """Time a few steps of the student in a new run directory under `root`, without MLflow.

    Returns the recordings, and the milliseconds of a typical step without each of `parts`, see `Assignment.without`.

    Raises DistillError: the experiment cannot be run.
    """
    steps = resolved.experiment.train.max_steps or STEPS
    short = resolved.override({"train.max_steps": steps, "tracking.enabled": False}, "doctor")
    check_writable(root, None)
    short, data = check_train(short)
    run_dir = new_run_dir(root, f"{resolved.experiment.name}-doctor", None)
    begin_run(short, "train", run_dir, root)
    with contextlib.redirect_stdout(sys.stderr):  # standard output begins with the main finding
        result = train(short, run_dir, end_of_run, data, without=parts)
    log = read_log(run_dir)
    summaries = {part: log.of_stage(f"student-without-{part}", "summary")[0]["metrics"] for part in parts}
    steps_ms = {part: evidence_of(short.experiment, metrics).step_ms for part, metrics in summaries.items()}
    return read_run(short, run_dir, result), steps_ms


def parts_of(experiment: Experiment) -> tuple[StepPart, ...]:
    """Return the parts of the experiment's steps that can be left out of a timing."""
    teacher = experiment.teacher
    runs_teacher = bool(experiment.all_teachers) and needs_teacher(experiment.distill, ())
    is_served = teacher is not None and teacher.service is not None  # requests are sent ahead, and repeated ones are free
    has: dict[StepPart, bool] = {
        "nothing": True,
        "loading": not is_served,
        "teacher": runs_teacher and not is_served and (teacher is None or teacher.placement != "sharded"),
        "allreduce": experiment.scale.num_workers > experiment.scale.pipeline_stages,
    }
    return tuple(part for part, is_present in has.items() if is_present)


def measured_lines(e: Evidence, steps_ms: Mapping[StepPart, float]) -> list[str]:
    """Return a line per part with a step's measured and predicted time without it.

    The line for "nothing" repeats the same steps, which shows the noise of the others.
    """
    saved = {
        "nothing": Effect(),
        "loading": Effect(supply_ms=e.supply_ms, beyond_ms=late_ms(e)),
        "teacher": Effect(work_ms=e.typical.teacher_ms),
        "allreduce": Effect(work_ms=e.exposed_ms),
    }
    lines = []
    for part, step_ms in steps_ms.items():
        predicted_ms = step_after_ms(e, saved[part]) - e.outside_ms
        predicted = "" if part == "nothing" else f"; predicted {predicted_ms:.1f} ms ({_change(predicted_ms, e.step_ms)})"
        lines.append(f"measured {DESCRIPTIONS[part]}: {step_ms:.1f} ms/step ({_change(step_ms, e.step_ms)}){predicted}")
    return lines


def _change(new_ms: float, old_ms: float) -> str:
    return f"{100 * (new_ms / old_ms - 1):+.0f}%"
