"""The points of a sweep, what becomes of those that cannot run, and which one wins."""

from service.config.experiment import load
from service.runs.outcome import Outcome
from service.sweeps.trial_functions import check_target
from service.sweeps.trials import plan_trials, rows_of, target_trial


def test_a_grid_has_every_combination_once_in_the_order_of_the_space() -> None:
    trials = plan_trials(load("digits"))
    assert len(trials) == 8
    assert [trial.id for trial in trials] == [f"{i:03d}" for i in range(8)]
    assert trials[0].params == {"scale.num_workers": 1, "data.global_batch_size": 64, "data.loader_workers": 1}
    assert len({tuple(trial.params.items()) for trial in trials}) == 8


def test_a_point_that_is_wrong_in_itself_is_infeasible_with_its_reason() -> None:
    trials = plan_trials(load("digits", ["sweep.space={scale.num_workers: [1, 3]}"]))
    assert trials[0].outcome is None
    assert trials[1].outcome == Outcome(
        status="infeasible", reason="data.global_batch_size 64 is not divisible by scale.num_workers 3: write 63 or 66"
    )


def test_workers_that_no_stages_divide_are_infeasible_before_anything_starts_and_replicas_share_the_batch() -> None:
    space = "{scale.num_workers: [2, 3], scale.pipeline_stages: [1, 2], data.global_batch_size: [63]}"
    reasons = [trial.outcome.reason if trial.outcome else None for trial in plan_trials(load("digits", [f"sweep.space={space}"]))]
    assert reasons == [
        "data.global_batch_size 63 is not divisible by scale.num_workers 2: write 62 or 64",
        None,  # one replica of two stages
        None,
        "scale.num_workers 3 is not divisible by scale.pipeline_stages 2: write 2 or 4",
    ]


def test_random_points_are_drawn_from_the_seed_alone() -> None:
    space = "sweep.space={optim.lr: {loguniform: [0.001, 1]}, data.global_batch_size: [64, 128]}"
    drawn = [
        [t.params for t in plan_trials(load("digits", [space, "sweep.policy=random", f"seed={seed}"]))] for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(0.001 <= point["optim.lr"] <= 1 for point in drawn[0])


def test_a_timing_sweep_says_so_in_every_row() -> None:
    timed = load("digits", ["sweep.steps=7"])
    trial = plan_trials(timed)[0]
    assert trial.resolved is not None
    assert trial.resolved.experiment.train.max_steps == 7
    assert rows_of([trial], timed, timing=True)[0].kind == "timing"


def test_every_trial_of_a_grid_by_time_trains_to_the_target() -> None:
    sets = ["sweep.metric=time_to_accuracy", "sweep.target_pct=90"]
    (first, *_) = plan_trials(load("digits", sets))
    assert first.resolved is not None
    assert first.resolved.experiment.train.until_top1_pct == 90
    probes = plan_trials(load("digits", [*sets, "sweep.policy=guided"]))
    assert probes[0].resolved is not None
    assert probes[0].resolved.experiment.train.until_top1_pct is None
    assert probes[0].resolved.experiment.train.max_steps == 60


def test_a_training_to_the_target_is_a_row_of_its_own_and_names_the_trial_of_its_speed() -> None:
    base = load("digits", ["sweep.metric=time_to_accuracy", "sweep.target_pct=90", "sweep.policy=guided"])
    probe = plan_trials(base)[3]
    trial = target_trial(base, probe, until_s=7.5)
    assert trial.resolved is not None
    train = trial.resolved.experiment.train
    assert (train.max_steps, train.until_top1_pct, train.until_s) == (None, 90, 7.5)
    (row,) = rows_of([trial], base, timing=True)
    assert (row.id, row.speed_trial, row.kind, row.params) == ("003-trained", "003", "accuracy", probe.params)


def test_a_training_that_did_not_reach_its_target_is_stopped_and_says_how_far_it_came() -> None:
    late = check_target(Outcome(status="ok", metrics={"top1_pct": 81.25, "train_s": 8.04}), 90)
    assert (late.status, late.reason) == ("stopped", "top-1 81.25% after 8.0 s, not 90%")
    reached = Outcome(status="ok", metrics={"top1_pct": 91.0, "train_s": 6.0, "time_to_accuracy_s": 6.0})
    assert check_target(reached, 90) == reached
