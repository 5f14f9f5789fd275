"""Points that cannot run, found before anything starts."""

import pytest

from service.cluster.resources import Cluster, Node
from service.config.experiment import load
from service.runs.outcome import Outcome
from service.runs.preflight import check_data_of_run
from service.runs.result import RunResult
from service.sweeps.preflight import check_sweep, mark_unschedulable
from service.sweeps.trials import plan_trials
from trainables.errors import ExperimentError


def test_a_point_that_does_not_fit_on_the_cluster_is_infeasible_before_anything_starts() -> None:
    trials = plan_trials(load("digits", ["sweep.space={scale.num_workers: [1, 8]}", "data.loader_workers=1"]))
    mark_unschedulable(trials, Cluster((Node("a", 8, 0),), real_cpus=2))
    assert trials[0].outcome is None
    assert not trials[0].oversubscribed
    assert trials[1].outcome is not None
    assert trials[1].outcome.status == "infeasible"
    assert "8 workers of 2 CPUs each do not fit" in trials[1].outcome.reason


def test_a_trial_that_ended_before_a_resume_has_its_loader_workers_in_numbers_too() -> None:
    trials = plan_trials(load("digits", ["sweep.space={data.global_batch_size: [64, 128]}"]))
    trials[0].outcome = Outcome(status="ok")
    mark_unschedulable(trials, Cluster((Node("a", 8, 0),), real_cpus=2))
    assert [trial.loader_workers for trial in trials] == [1, 1]
    assert trials[0].outcome == Outcome(status="ok")


def test_a_sweep_is_not_elastic() -> None:
    resolved = load("digits", ["scale.num_workers=[1, 2]", "sweep.space={seed: [1, 2]}"])
    with pytest.raises(ExperimentError, match=r"scale\.min_workers: .* write one number in scale\.num_workers"):
        check_sweep(resolved)


@pytest.mark.parametrize("sets", ["eval.asynchronous=true", "sweep.space={eval.asynchronous: [true]}"])
def test_trials_of_a_sweep_have_no_evaluators(sets: str) -> None:
    with pytest.raises(ExperimentError, match=r"^eval\.asynchronous: a sweep's trials .*: leave it out, and their workers"):
        check_sweep(load("digits", ["sweep.space={seed: [1, 2]}", sets]))


@pytest.mark.parametrize("metric", ["{metric: top1_pct}", "{metric: time_to_accuracy, target_pct: 90}"])
def test_a_sweep_for_accuracy_does_not_stop_after_steps(metric: str) -> None:
    resolved = load("digits", ["train.max_steps=20", f"sweep={metric}", "sweep.space={seed: [1, 2]}"])
    with pytest.raises(ExperimentError, match=r"^train\.max_steps: a timing run has no accuracy, .*: leave one of them out$"):
        check_sweep(resolved)


def test_a_sweep_over_data_sets_accepts_no_other_data() -> None:
    experiment = load("digits", ["sweep.space={data.path: [digits, synthetic]}"]).experiment
    begun = RunResult(kind="sweep", name="digits", status="interrupted", runs_root="runs")
    check_data_of_run("run", experiment, begun, None, accept_new=False)
    with pytest.raises(
        ExperimentError, match=r"^--accept-new-data: a sweep over data\.path continues with the data of each trial"
    ):
        check_data_of_run("run", experiment, begun, None, accept_new=True)
