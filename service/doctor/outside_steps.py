"""What lies between steps: evaluations, checkpoints, the ends of epochs."""

import math

from service.doctor.evidence import LEAST_PCT, Evidence
from service.doctor.step_model import Cause, Effect


def evaluation(e: Evidence) -> Cause | None:
    """Evaluations that take much of an epoch: with one in k epochs, k the least for which they take 5%, they cost 1/k."""
    if not e.eval_s or not e.steps_per_epoch:
        return None
    step = e.typical
    steps_s = e.steps_per_epoch * step.step_ms / 1e3
    could_s = e.val_images / e.num_workers * step.student_ms / e.rank_batch / 1e3
    every = max(2, math.ceil(e.eval_s / (LEAST_PCT / 100 * steps_s)))
    if e.num_epochs is not None:
        every = min(every, max(1, e.num_epochs // e.evaluate_every))
    every_epochs, grace = every * e.evaluate_every, ""
    if e.grace_epochs is not None and e.grace_epochs % every_epochs:
        grace = f" --set sweep.grace_epochs={max(every_epochs, e.grace_epochs // every_epochs * every_epochs)}"
    faster = f", or load its images faster: --set data.loader_workers={2 * max(1, e.loader_workers)}, or distill pack"
    loading = "" if could_s > 0.5 * e.eval_s else faster
    return Cause(
        "evaluation",
        f"evaluating {e.val_images:,.0f} images takes {e.eval_s:.1f} s, an epoch's steps {steps_s:.1f} s; the "
        f"student's forward on them takes {could_s:.1f} s",
        f"--set train.evaluate_every={every_epochs}{grace}{loading}",
        Effect(outside_ms=1e3 * e.eval_s / e.steps_per_epoch * (1 - 1 / every)),
    )


def checkpoints(e: Evidence) -> Cause | None:
    """Checkpoints are written while nothing is trained."""
    if e.clock is None or not e.clock.train_s:
        return None
    return Cause(
        "checkpoints",
        f"checkpoints take {e.clock.checkpoint_s:.1f} of {e.clock.wall_s:.1f} s",
        "--set train.checkpoint_every to more steps, where an epoch has several, or a runs' folder on a faster disk",
        Effect(outside_ms=e.typical.step_ms * e.clock.checkpoint_s / e.clock.train_s),
    )


def between_epochs(e: Evidence) -> Cause | None:
    """Reports and checks at the end of an epoch."""
    if e.clock is None or not e.clock.train_s:
        return None
    return Cause(
        "between epochs",
        f"what lies between steps, evaluations and checkpoints takes {e.clock.other_s:.1f} of {e.clock.wall_s:.1f} s",
        "epochs as short as these pay for their beginning and end: fewer workers, or more steps an epoch (a smaller batch)",
        Effect(outside_ms=e.typical.step_ms * e.clock.other_s / e.clock.train_s),
    )
