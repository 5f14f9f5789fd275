"""When asha ends a trial."""

from service.config.sweep import SweepConfig
from service.sweeps.tune import asha_scheduler


def test_asha_compares_trials_after_as_many_epochs_of_training_whatever_came_before_them() -> None:
    from ray.tune.experiment import Trial

    scheduler = asha_scheduler(SweepConfig(policy="asha", metric="top1_pct", reduction_factor=2))
    straight, prepared, worse = (Trial("trial", stub=True) for _ in range(3))

    def decision(trial: Trial, epoch: int, training_epoch: int, top1_pct: float) -> str:
        result = {"epoch": float(epoch), "training_epoch": float(training_epoch), "top1_pct": top1_pct}
        return str(scheduler.on_trial_result(None, trial, result))

    for trial in (straight, prepared, worse):
        scheduler.on_trial_add(None, trial)
    assert [decision(straight, epoch, epoch, 60.0 + epoch) for epoch in (1, 2)] == ["CONTINUE", "CONTINUE"]
    warming_up = [decision(prepared, epoch, epoch - 2, 10.0) for epoch in (1, 2)]
    assert warming_up == ["CONTINUE", "CONTINUE"]  # at chance: its classifier has not begun
    assert decision(prepared, 3, 1, 62.0) == "CONTINUE"
    assert [decision(worse, epoch, epoch - 2, 10.0) for epoch in (1, 2, 3)] == ["CONTINUE", "CONTINUE", "STOP"]
