"""Trainings in the order of what is predicted: few of them find the batch that reaches the target first."""

import numpy as np
import pytest

from service.search.time_to_accuracy import SEEDS, TimeToAccuracySearch

BATCHES = np.array([16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
EVERY = np.maximum(1.0, 1442 // BATCHES)


class Cluster:
    """Trainings by the law: steps by batch that scatter from seed to seed, seconds of a step with a fixed part."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.b_noise, self.s_min = float(np.exp(rng.uniform(3, 6))), float(rng.uniform(40, 200))
        self.step_s = 0.005 + float(np.exp(rng.uniform(-10, -7))) * BATCHES
        scatter = np.exp(SEEDS * rng.standard_normal(len(BATCHES)))
        self.steps = np.ceil(self.s_min * (1 + self.b_noise / BATCHES) * scatter / EVERY) * EVERY
        self.seconds = self.steps * self.step_s
        self.noise = self.b_noise * np.exp(0.5 * rng.standard_normal(len(BATCHES)))

    def train(self, row: int, until_s: float | None) -> dict[str, float]:
        if until_s is not None and self.seconds[row] > until_s:
            steps = max(1.0, np.ceil(until_s / self.step_s[row] / EVERY[row])) * EVERY[row]
            if steps < self.steps[row]:
                return {"noise_scale": self.noise[row], "steps": steps, "train_s": steps * self.step_s[row]}
        reached = {"steps_to_accuracy": self.steps[row], "time_to_accuracy_s": self.seconds[row]}
        return {"noise_scale": self.noise[row], "steps": self.steps[row], "train_s": self.seconds[row], **reached}


def searched(seed: int) -> tuple[TimeToAccuracySearch, Cluster]:
    cluster = Cluster(seed)
    search = TimeToAccuracySearch(BATCHES, cluster.step_s, EVERY)
    while (row := search.ask()) is not None:
        search.tell(row, cluster.train(row, search.until_s))
    return search, cluster


def test_a_few_trainings_find_nearly_the_fastest() -> None:
    regrets, counts, costs = [], [], []
    for seed in range(60):
        search, cluster = searched(seed)
        regrets.append(cluster.seconds[search.best] / cluster.seconds.min() - 1)
        counts.append(len(search.summaries))
        costs.append(sum(told["train_s"] for told in search.summaries.values()) / cluster.seconds.sum())
    assert np.median(regrets) < 0.02
    assert np.quantile(regrets, 0.9) < 0.2
    assert max(counts) <= 4
    assert np.median(costs) < 0.4


def test_a_training_may_take_as_long_as_the_best_so_far_and_no_longer() -> None:
    search = TimeToAccuracySearch(BATCHES, np.full(7, 0.01), EVERY)
    assert search.until_s is None
    search.tell(2, {"steps": 200, "train_s": 2.0, "steps_to_accuracy": 200, "time_to_accuracy_s": 2.0})
    search.tell(3, {"steps": 220, "train_s": 2.2})
    assert (search.best, search.until_s) == (2, 2.0)


def test_a_search_that_takes_up_the_same_trainings_goes_on_alike() -> None:
    search, cluster = searched(7)
    again = TimeToAccuracySearch(BATCHES, cluster.step_s, EVERY)
    for row, summary in search.summaries.items():
        assert again.ask() == row
        again.tell(row, summary)
    assert again.ask() is None
    assert again.why() == search.why()


def test_points_whose_training_failed_are_not_trained_again() -> None:
    search = TimeToAccuracySearch(BATCHES, np.full(7, 0.01), EVERY, max_trainings=7)
    first = search.ask()
    assert first is not None
    search.tell(first, {})
    second = search.ask()
    assert second not in (None, first)
    assert search.best is None


def test_points_of_one_batch_differ_by_their_speed_alone() -> None:
    search = TimeToAccuracySearch(np.array([64.0, 64.0, 64.0]), np.array([0.02, 0.01, 0.03]), np.full(3, 20.0))
    assert search.ask() == 1
    search.tell(1, {"steps": 200, "train_s": 2.0, "steps_to_accuracy": 200, "time_to_accuracy_s": 2.0, "noise_scale": 90.0})
    assert search.ask() is None
    assert "no other point" in search.why()


def test_the_wait_for_an_evaluation_is_part_of_the_time() -> None:
    search = TimeToAccuracySearch(BATCHES, np.full(7, 0.1), EVERY)
    search.tell(2, {"steps": 200, "train_s": 20.0, "steps_to_accuracy": 200, "time_to_accuracy_s": 20.0})
    assert search.predict()[2] == pytest.approx(20.0, rel=0.03)  # which is what was seen


@pytest.mark.parametrize("noise", [20.0, 2000.0])
def test_the_noise_scale_of_an_earlier_training_says_where_to_begin(noise: float) -> None:
    search = TimeToAccuracySearch(BATCHES, 0.005 + 1e-4 * BATCHES, EVERY, noise_scales=[noise])
    assert search.ask() == int(np.argmin((1 + noise / BATCHES) * (0.005 + 1e-4 * BATCHES)))


def test_while_none_has_reached_the_target_the_fastest_of_the_others_is_trained_and_the_end_says_so() -> None:
    search = TimeToAccuracySearch(BATCHES[:3], np.array([0.01, 0.012, 0.3]), EVERY[:3])
    trained = []
    while (row := search.ask()) is not None:
        trained.append(row)
        search.tell(row, {"steps": 100.0, "train_s": 1.0})
    assert sorted(trained) == [0, 1, 2]
    assert search.why() == "3 points were trained, which is all, and none reached the target"


def test_a_search_without_a_point_that_can_run_is_over() -> None:
    nobody = np.array([])
    assert TimeToAccuracySearch(nobody, nobody, nobody).ask() is None
