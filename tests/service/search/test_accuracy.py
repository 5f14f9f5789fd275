"""Steps and time to an accuracy: trainings with a known law are explained, and doubt is neither hidden nor made up."""

import numpy as np
import pytest

from service.search.time_to_accuracy import SEEDS, BatchScaling, Training

BATCHES = np.array([16.0, 32.0, 64.0, 128.0, 256.0, 512.0])


def trainings(s_min: float, b_noise: float, seed: int, images: float = 1442.0, batches: np.ndarray = BATCHES) -> list[Training]:
    """What one seed each brings where the law holds: steps that scatter, seen at the end of an epoch."""
    rng = np.random.default_rng(seed)
    found = []
    for batch in batches:
        steps = s_min * (1 + b_noise / batch) * np.exp(SEEDS * rng.standard_normal())
        every = np.floor(images / batch)
        found.append(Training(float(batch), float(np.ceil(steps / every) * every), float(every)))
    return found


def spread_of(scaling: BatchScaling) -> np.ndarray:
    """Standard deviation of the logarithm of the steps to the target."""
    return scaling.time_to_accuracy(BATCHES, np.ones_like(BATCHES)).spread_M


def test_the_law_is_found_again_from_a_few_trainings() -> None:
    believed = [BatchScaling.of([60.0], trainings(80, 150, seed)) for seed in range(60)]
    assert np.median([one.s_min for one in believed]) == pytest.approx(80, rel=0.1)
    assert np.median([one.b_noise for one in believed]) == pytest.approx(150, rel=0.15)


def test_the_truth_lies_within_two_deviations_as_often_as_it_should() -> None:
    inside = []
    for seed in range(100):
        b_noise = float(np.exp(np.log(100) + 1.0 * np.random.default_rng(1000 + seed).standard_normal()))
        scaling = BatchScaling.of([100.0], trainings(80, b_noise, seed, batches=BATCHES[1::2]))
        off = np.log(80 * (1 + b_noise / BATCHES) / scaling.steps_M(BATCHES)) / spread_of(scaling)
        inside += list(np.abs(off) < 2)
    assert 0.9 < np.mean(inside) <= 1.0


def test_one_training_and_the_measured_noise_scale_predict_the_other_batches() -> None:
    believed = [BatchScaling.of([150.0], trainings(80, 150, seed, batches=BATCHES[2:3])) for seed in range(60)]
    truth = 80 * (1 + 150 / BATCHES)
    assert np.median([one.steps_M(BATCHES) for one in believed], axis=0) == pytest.approx(truth, rel=0.1)
    assert spread_of(believed[0])[2] < 0.25 < spread_of(believed[0])[5]
    assert believed[0].factor({"data.global_batch_size": 64}) == pytest.approx(believed[0].steps_M(BATCHES)[2] * 64)


def test_without_a_training_images_are_known_up_to_a_factor() -> None:
    scaling = BatchScaling.of([100.0])
    few, many = (scaling.factor({"data.global_batch_size": batch}) for batch in (100, 300))
    assert many / few == pytest.approx(2.0)
    assert spread_of(BatchScaling.of())[0] > spread_of(scaling)[0] > 3


def test_what_never_reached_the_target_only_says_that_it_takes_longer() -> None:
    reached = [Training(64.0, 200.0, 20.0)]
    short, long = (BatchScaling.of([100.0], [*reached, Training(512.0, steps, 2.0, reached=False)]) for steps in (10.0, 150.0))
    without = BatchScaling.of([100.0], reached)
    assert short.steps_M(BATCHES) == pytest.approx(without.steps_M(BATCHES), rel=1e-2)
    assert long.steps_M(BATCHES)[-1] > without.steps_M(BATCHES)[-1] * 1.1


def test_trainings_speak_louder_than_the_noise_scale() -> None:
    scaling = BatchScaling.of([30.0], [t for seed in range(4) for t in trainings(50, 400, seed)])
    assert scaling.b_noise == pytest.approx(400, rel=0.25)


def test_the_time_is_steps_times_seconds_and_its_order_needs_no_s_min() -> None:
    step_s = 0.004 + 1e-4 * BATCHES
    scaling = BatchScaling.of([100.0])
    predicted = scaling.time_to_accuracy(BATCHES, step_s)
    assert predicted.seconds_M == pytest.approx(scaling.steps_M(BATCHES) * step_s)
    order = np.argsort(predicted.seconds_M)
    assert list(order) == list(np.argsort((1 + 100 / BATCHES) * step_s))
    assert predicted.spread_M.min() > 3  # S_min is unknown


def test_the_wait_for_an_evaluation_is_part_of_the_time() -> None:
    scaling = BatchScaling.of([100.0], [Training(64.0, 200.0, 20.0)])
    every = 1442 / BATCHES
    plain, waits = (scaling.time_to_accuracy(BATCHES, np.full(6, 0.1), 0.0, wait).seconds_M for wait in (0.0, every))
    assert waits - plain == pytest.approx(0.05 * every)
    assert waits[2] == pytest.approx(20.0, rel=0.03)  # which is what was seen
