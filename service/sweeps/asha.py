"""ASHA, which stops worse trials early, resumable: it compares the epochs of all sessions of a sweep."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler

from service.config.sweep import SweepConfig
from service.runs.events import Event
from service.runs.outcome import Outcome
from service.runs.run_log import RunLog
from trainables.rundir import final_names, headline

Epochs = Sequence[Mapping[str, float]]
"""A trial's reports, one per epoch."""


class ResumedASHA(ASHAScheduler):  # type: ignore[misc]
    """ASHA that starts with the epochs of `earlier` sessions, by trial."""

    def __init__(self, earlier: Mapping[str, Epochs], **options: object) -> None:
        super().__init__(**options)
        self._earlier = dict(earlier)

    def on_trial_add(self, tune_controller: object, trial: Trial) -> None:
        """Add a trial, and replay its earlier reports."""
        super().on_trial_add(tune_controller, trial)
        for epoch in self._earlier.pop(trial.config["trial"], ()):
            self.on_trial_result(tune_controller, trial, dict(epoch))


def asha_scheduler(sweep: SweepConfig, earlier: Mapping[str, Epochs], ended: Sequence[str]) -> ResumedASHA:
    """Create the scheduler. It sees no epochs of init stages, which learn no labels.

    `earlier` are the reports of earlier sessions by trial; the trials in `ended` do not continue.
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


def reported_epochs(log: RunLog) -> dict[str, Epochs]:
    """Return the reports of a sweep's trials so far, by trial. Trials without a complete epoch are left out."""
    found = {Path(stage).parts[1]: log.of_stage(stage, "epoch") for stage in log.stages if Path(stage).match("trials/*/student")}
    return {
        trial: [{"epoch": event["epoch"], **final_names(event["metrics"])} for event in events]
        for trial, events in sorted(found.items())
        if events
    }


def stopped(events: Iterable[Event]) -> Outcome:
    """Return the outcome of a trial that ASHA stopped after its last epoch. `events` are those of its student stage.

    They have that epoch: a worker reports it to Ray once its record is durable.
    """
    epochs = [event for event in events if event["kind"] == "epoch"]
    last = epochs[-1]
    numbers = final_names(last["metrics"])
    metrics = {name: value for name, value in numbers.items() if not name.startswith(("train/", "val/"))}  # as in a summary
    for name in ("train_s", "eval_s", "checkpoint_s", "other_s", "wall_s"):  # per epoch in the record, per stage here
        metrics.pop(name, None)
        if all(f"epoch/{name}" in record["metrics"] for record in epochs):
            metrics[name] = sum(record["metrics"][f"epoch/{name}"] for record in epochs)
    for record in epochs:
        metrics |= headline(record["metrics"])
    metrics["steps"] = float(last["step"])
    return Outcome(status="stopped", reason=f"stopped by asha after epoch {last['epoch']:g}", metrics=metrics)
