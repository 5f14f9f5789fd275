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


def test_the_law_is_found_again_from_a_few_trainings() -> None:
    believed = [BatchScaling.of([60.0], trainings(80, 150, seed)) for seed in range(60)]
    assert np.median([one.s_min for one in believed]) == pytest.approx(80, rel=0.1)
    assert np.median([one.b_noise for one in believed]) == pytest.approx(150, rel=0.15)


def test_one_training_and_the_measured_noise_scale_predict_the_other_batches() -> None:
    believed = [BatchScaling.of([150.0], trainings(80, 150, seed, batches=BATCHES[2:3])) for seed in range(60)]
    truth = 80 * (1 + 150 / BATCHES)
    assert np.median([one.steps_M(BATCHES) for one in believed], axis=0) == pytest.approx(truth, rel=0.1)
    assert believed[0].factor({"data.global_batch_size": 64}) == pytest.approx(believed[0].steps_M(BATCHES)[2] * 64)


def test_without_a_training_images_are_known_up_to_a_factor() -> None:
    scaling = BatchScaling.of([100.0])
    few, many = (scaling.factor({"data.global_batch_size": batch}) for batch in (100, 300))
    assert many / few == pytest.approx(2.0)


def test_what_never_reached_the_target_only_says_that_it_takes_longer() -> None:
    reached = [Training(64.0, 200.0, 20.0)]
    short, long = (BatchScaling.of([100.0], [*reached, Training(512.0, steps, 2.0, reached=False)]) for steps in (10.0, 150.0))
    without = BatchScaling.of([100.0], reached)
    assert short.steps_M(BATCHES) == pytest.approx(without.steps_M(BATCHES), rel=1e-2)
    assert long.steps_M(BATCHES)[-1] > without.steps_M(BATCHES)[-1] * 1.1


def test_trainings_speak_louder_than_the_noise_scale() -> None:
    scaling = BatchScaling.of([30.0], [t for seed in range(4) for t in trainings(50, 400, seed)])
    assert scaling.b_noise == pytest.approx(400, rel=0.25)
