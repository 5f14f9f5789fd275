"""When asha ends a trial, in one session or several, and what it leaves of it."""

from pathlib import Path

import pytest
from ray.tune.experiment import Trial

from service.config.sweep import SweepConfig
from service.runs.run_log import read_log
from service.sweeps.asha import ResumedASHA, asha_scheduler, reported_epochs, stopped
from tests.run_log import add, numbers
from trainables.rundir import RunDir

SWEEP = SweepConfig(policy="asha", metric="top1_pct", reduction_factor=2)
EPOCH = {
    "epoch/train_s": 2.0,
    "epoch/eval_s": 0.5,
    "epoch/checkpoint_s": 0.1,
    "epoch/other_s": 0.4,
    "epoch/wall_s": 3.0,
    "epoch/train/loss": 1.5,
    "epoch/step_s": 0.1,
    "val/top1_pct": 60.0,
    "val/top5_pct": 90.0,
    "val/loss": 1.2,
}


def trial_of(trial: str) -> Trial:
    return Trial("trial", config={"trial": trial}, stub=True)


def decision(scheduler: ResumedASHA, trial: Trial, epoch: int, top1_pct: float) -> str:
    result = {"epoch": float(epoch), "top1_pct": top1_pct}
    return str(scheduler.on_trial_result(None, trial, result))


def test_asha_compares_trials_with_those_of_earlier_sessions_and_each_epoch_once(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for trial, top1_pct in (("000", 60.0), ("001", 50.0)):
        for epoch in (1, 2, 3):
            metrics = {"val/top1_pct": top1_pct + epoch}
            add(run_dir, numbers("epoch", f"trials/{trial}/student", 10 * epoch, epoch, **metrics))
    scheduler = asha_scheduler(SWEEP, reported_epochs(read_log(run_dir)), ended=["000"])
    resumed, worse = trial_of("001"), trial_of("002")
    for trial in (resumed, worse):
        scheduler.on_trial_add(None, trial)
    assert decision(scheduler, resumed, 3, 0.0) == "CONTINUE"  # that epoch was compared in the earlier session
    assert decision(scheduler, worse, 1, 55.0) == "STOP"  # as the middle of 61 and 51
    assert decision(scheduler, resumed, 4, 0.0) == "CONTINUE"  # the first after four epochs


def metrics_when_stopped(*epochs: dict[str, float]) -> dict[str, float]:
    """The numbers of a trial that asha stopped after these epochs."""
    events = [numbers("epoch", "student", 10 * number, number, **metrics) for number, metrics in enumerate(epochs, 1)]
    outcome = stopped(events)
    assert (outcome.status, outcome.reason) == ("stopped", f"stopped by asha after epoch {len(epochs)}")
    return outcome.metrics


def test_a_stopped_trial_has_each_number_once_under_the_name_that_a_summary_has(tmp_path: Path) -> None:
    late = {name: value for name, value in EPOCH.items() if not name.startswith("val/")}
    assert metrics_when_stopped(EPOCH, late) == pytest.approx(
        {
            "train_s": 4.0,
            "eval_s": 1.0,
            "checkpoint_s": 0.2,
            "other_s": 0.8,
            "wall_s": 6.0,
            "step_s": 0.1,
            "steps": 20.0,
            "top1_pct": 60.0,
            "top5_pct": 90.0,
            "val_loss": 1.2,
        }
    )


def test_a_stopped_student_without_labels_has_its_likeness_to_the_teacher() -> None:
    assert metrics_when_stopped({"val/cka": 0.7}, {"epoch/step_s": 0.1})["cka"] == 0.7
