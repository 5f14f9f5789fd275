"""Makes a short timing run of an experiment for the doctor."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from service.config.experiment import Resolved
from service.doctor.measure import step_ms_without
from service.doctor.read_run import Recording, read_run
from service.report import end_of_run
from service.runs.preflight import check_train
from service.runs.run_directory import begin_run, check_writable, new_run_dir
from service.runs.train import train
from trainables.config.job import StepPart

STEPS = 40
"""Timed steps of a probe, unless the experiment sets `train.max_steps`."""


def probe(resolved: Resolved, root: Path, parts: Sequence[StepPart] = ()) -> tuple[list[Recording], dict[StepPart, float]]:
    """Time a few steps of the student in a new run directory under `root`, without MLflow.

    Returns the recordings, and the milliseconds of a step without each of `parts`.

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
    return read_run(short, run_dir, result), {part: step_ms_without(part, short.experiment, run_dir) for part in parts}
