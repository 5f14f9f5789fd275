"""Measures what a part of a step costs by timing the same steps again without it."""

from collections.abc import Mapping

from service.config.rules import needs_teacher
from service.config.schema import Experiment
from service.doctor.evidence import Evidence
from service.doctor.read_run import evidence_of
from service.doctor.step_model import Effect, late_ms, step_after_ms
from service.runs.run_log import read_log
from trainables.config.job import StepPart
from trainables.rundir import RunDir

DESCRIPTIONS: dict[StepPart, str] = {
    "nothing": "unchanged, once more",
    "loading": "with one batch kept in memory",
    "teacher": "with the teacher's outputs kept in memory",
    "allreduce": "without averaging gradients over workers",
}


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


def step_ms_without(part: StepPart, experiment: Experiment, run_dir: RunDir) -> float:
    """Return the milliseconds of a typical step in the student's stage without `part`, see `Assignment.without`."""
    (summary,) = read_log(run_dir).of_stage(f"student-without-{part}", "summary")
    return evidence_of(experiment, summary["metrics"]).step_ms


def measured_lines(e: Evidence, steps_ms: Mapping[StepPart, float]) -> list[str]:
    """Return a line per part with a step's measured and predicted time without it.

    The line for "nothing" repeats the same steps, which shows the noise of the others.
    """
    saved = {
        "nothing": Effect(),
        "loading": Effect(supply_ms=e.supply_ms, beyond_ms=late_ms(e)),
        "teacher": Effect(work_ms=e.typical.teacher_ms),
        "allreduce": Effect(work_ms=e.exposed_ms or 0.0),
    }
    lines = []
    for part, step_ms in steps_ms.items():
        predicted_ms = step_after_ms(e, saved[part]) - e.outside_ms
        predicted = "" if part == "nothing" else f"; predicted {predicted_ms:.1f} ms ({_change(predicted_ms, e.step_ms)})"
        lines.append(f"measured {DESCRIPTIONS[part]}: {step_ms:.1f} ms/step ({_change(step_ms, e.step_ms)}){predicted}")
    return lines


def _change(new_ms: float, old_ms: float) -> str:
    return f"{100 * (new_ms / old_ms - 1):+.0f}%"
