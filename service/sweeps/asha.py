"""Asha, which ends the worse trials early: by the epochs of all sessions of a sweep, which the trials' records have."""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler

from service.config.sweep import ACCURACIES, SweepConfig
from service.runs.outcome import Outcome
from trainables.rundir import RunDir, StageDir, final_names, headline, read_lines

Epochs = Sequence[Mapping[str, float]]
"""What a trial has reported, epoch by epoch."""


class ResumedASHA(ASHAScheduler):  # type: ignore[misc]
    """Asha that knows the epochs of `earlier` sessions, by trial."""

    def __init__(self, earlier: Mapping[str, Epochs], **options: object) -> None:
        super().__init__(**options)
        self._earlier = dict(earlier)

    def on_trial_add(self, tune_controller: object, trial: Trial) -> None:
        """Take up a trial and what it has reported before."""
        super().on_trial_add(tune_controller, trial)
        for epoch in self._earlier.pop(trial.config["trial"], ()):
            self.on_trial_result(tune_controller, trial, dict(epoch))


def asha_scheduler(sweep: SweepConfig, earlier: Mapping[str, Epochs], ended: Sequence[str]) -> ResumedASHA:
    """What ends the worse trials early. An init stage's epochs are not among those reported: no label is learned in them.

    `earlier`: what trials have reported in earlier sessions, of which those that have `ended` do not go on.
    """
    scheduler = ResumedASHA(
        earlier,
        time_attr="epoch",
        metric=sweep.metric,
        mode=sweep.mode,
        grace_period=sweep.grace_epochs,
        reduction_factor=sweep.reduction_factor,
        max_t=10**6,
    )
    for trial in ended:
        scheduler.on_trial_add(None, Trial("trial", config={"trial": trial}, stub=True))
    return scheduler


def reported_epochs(run_dir: RunDir) -> dict[str, Epochs]:
    """What the trials of a sweep have reported so far, by trial; without those that have not ended an epoch."""
    found = {path.name: epochs_of(RunDir(path).stage("student")) for path in sorted(run_dir.trials.glob("*"))}
    return {
        trial: [{"epoch": record["epoch"], **final_names(record["metrics"])} for record in records]
        for trial, records in found.items()
        if records
    }


def epochs_of(stage: StageDir) -> list[dict[str, Any]]:
    """The records of a stage's epochs."""
    return [record for record in read_lines(stage.metrics) if record["kind"] == "epoch"]


def stopped(stage: StageDir, reported: Mapping[str, Any]) -> Outcome:
    """The outcome of a trial that asha has stopped after its last epoch: the last on record, or the one `reported` if later."""
    epochs = epochs_of(stage)
    last = max([*epochs, reported], key=lambda epoch: float(epoch["epoch"]))
    numbers = final_names(epochs[-1]["metrics"]) if epochs else {}
    metrics = {name: value for name, value in numbers.items() if not name.startswith(("train/", "val/"))}  # as in a summary
    for name in ("train_s", "eval_s", "checkpoint_s", "other_s", "wall_s"):  # an epoch's own in its record, the stage's here
        metrics.pop(name, None)
        if epochs and all(f"epoch/{name}" in record["metrics"] for record in epochs):  # not in those of an older version
            metrics[name] = sum(record["metrics"][f"epoch/{name}"] for record in epochs)
    for record in epochs:
        metrics |= headline(record["metrics"])
    if last is reported:
        metrics |= {name: float(reported[name]) for name in ACCURACIES if name in reported}
    metrics["steps"] = float(last["step"])
    return Outcome(status="stopped", reason=f"stopped by asha after epoch {last['epoch']:g}", metrics=metrics)
