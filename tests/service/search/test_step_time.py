"""The step-time model against published tables, against itself, and against one wild probe."""

import math
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from service.runs.result import ClusterHardware
from service.search.points import Observation, Point, categories
from service.search.step_time import INDEX, PARAMETERS, Measured, StepTime, Times, step_times
from tests.service.search.queues import grid, point
from trainables.metrics.phases import PHASES

IMAGENET = 1_281_167
EIGHT_GPUS = ClusterHardware(nodes=1, slots_per_node=8, cpus_per_node=32)

# GPUs, global batch, loader workers of each GPU, s/step, of it data (the middle of its range), s/epoch
KD = [
    (4, 256, 4, 0.150, 0.029, 770),
    (8, 256, 2, 0.161, 0.0385, 805),
    (8, 512, 4, 0.229, 0.050, 570),
    (6, 384, 4, 0.185, 0.0365, 630),
]
KD_POINTS = [point(*row[:3]) for row in KD]
KD_SEEN = [Observation("ok", [step] * 10, {"data": data, "backward": step - data}) for *_, step, data, _ in KD]
KD_EPOCHS = np.array([row[-1] for row in KD])

# GPUs, global batch, s of 30 epochs
INCEPTION = [(1, 32, 7870), (1, 64, 7065), (1, 128, 6657), (2, 64, 8235), (2, 256, 5376)]


def fitted(points: Sequence[Point], seen: Sequence[Observation], hardware: ClusterHardware) -> StepTime:
    prior = StepTime.prior(hardware, categories(points))
    return prior.fitted(Measured.of(prior.layout(points), seen))


def predicted(model: StepTime, points: Sequence[Point]) -> Times:
    return step_times(model.mean_P, model.layout(points))


def epoch_s(model: StepTime, points: Sequence[Point], num_images: int) -> np.ndarray:
    return predicted(model, points).step * num_images / np.array([float(at["data.global_batch_size"]) for at in points])


@pytest.mark.parametrize("left_out", [0, 1, 2, 3])
def test_three_rows_of_the_distillation_table_predict_the_fourth_and_the_order_of_all(left_out: int) -> None:
    kept = [row for row in range(4) if row != left_out]
    model = fitted([KD_POINTS[row] for row in kept], [KD_SEEN[row] for row in kept], EIGHT_GPUS)
    epochs_s = epoch_s(model, KD_POINTS, IMAGENET)
    assert abs(epochs_s[left_out] / KD_EPOCHS[left_out] - 1) < 0.15
    assert epochs_s.argsort().tolist() == KD_EPOCHS.argsort().tolist()


def test_two_gpus_lose_at_a_batch_of_32_and_gain_at_128_since_the_all_reduce_comes_every_step() -> None:
    images = 33_000  # only scales all times; the table does not say
    points = [point(workers, batch, 8) for workers, batch, _ in INCEPTION]
    seen = [Observation("ok", [seconds / 30 * batch / images] * 10) for _, batch, seconds in INCEPTION]
    hardware = ClusterHardware(nodes=1, slots_per_node=2, cpus_per_node=32)
    model = fitted(points, seen, hardware)
    one_32, one_64, one_128, two_32, two_128 = 30 * epoch_s(model, points, images)
    assert two_32 > one_32
    assert two_128 / one_128 == pytest.approx(1 - 0.19, abs=0.03)
    assert [one_32, one_64, one_128, two_32, two_128] == pytest.approx([row[-1] for row in INCEPTION], rel=0.03)


def test_the_two_rows_of_teacher_training_keep_their_order() -> None:
    rows = [(4, 256, 4, 800, 1 / 4), (4, 512, 4, 770, 1 / 3)]
    points = [point(*row[:3]) for row in rows]
    steps = [seconds * batch / IMAGENET for _, batch, _, seconds, _ in rows]
    seen = [
        Observation("ok", [step] * 10, {"data": share * step, "backward": (1 - share) * step})
        for step, (*_, share) in zip(steps, rows, strict=True)
    ]
    small, large = epoch_s(fitted(points, seen, EIGHT_GPUS), points, IMAGENET)
    assert small > large
    assert [small, large] == pytest.approx([800, 770], rel=0.03)


CLUSTER = ClusterHardware(nodes=4, slots_per_node=4, cpus_per_node=24)
SPREAD = grid([1, 2, 4, 8, 16], [64, 256, 1024, 4096], [1, 4, 12])


def truth() -> StepTime:
    model = StepTime.prior(CLUSTER)
    true = {"image_s": 1e-3, "fixed_s": 0.03, "thread_images_per_s": 200.0, "reduce_net_s": 0.08, "reduce_node_s": 0.02}
    for name, value in true.items():
        model.mean_P[INDEX[name]] = math.log(value)
    return model


def observed(
    model: StepTime, points: list[dict[str, object]], rng: np.random.Generator, noise: float = 0.02
) -> list[Observation]:
    exact = step_times(model.mean_P, model.layout(points))
    seen = []
    for row in range(len(points)):
        step = float(exact.step[row])
        forward, work = float(exact.forward[row]), float(exact.work[row])
        phases = {"data": step - work, "student": forward, "backward": work - forward}
        seen.append(Observation("ok", (step * np.exp(rng.normal(0, 0.02, 20) + rng.normal(0, 0.005))).tolist(), phases))
    return seen


def test_parameters_that_the_points_can_tell_are_recovered_within_their_stated_uncertainty() -> None:
    true, rng = truth(), np.random.default_rng(0)
    model = fitted(SPREAD, observed(true, SPREAD, rng), CLUSTER)
    known = np.sqrt(np.diag(model.covariance_PP)) < 0.5 * np.array([parameter.spread for parameter in PARAMETERS])
    told = {parameter.name for parameter, is_known in zip(PARAMETERS, known, strict=True) if is_known}
    assert {"image_s", "fixed_s", "thread_images_per_s", "reduce_net_s"} <= told
    off = (model.mean_P - true.mean_P) / np.sqrt(np.diag(model.covariance_PP))
    assert np.abs(off[known]).max() < 3
    assert math.exp(model.mean_P[INDEX["image_s"]]) == pytest.approx(1e-3, rel=0.1)


def test_the_stated_uncertainty_covers_points_that_were_not_measured() -> None:
    true, rng = truth(), np.random.default_rng(1)
    some = [SPREAD[row] for row in rng.permutation(len(SPREAD))[:12]]
    model = fitted(some, observed(true, some, rng), CLUSTER)
    logs_SM = np.log(step_times(model.draws(400, rng), model.layout(SPREAD)).step)
    exact = step_times(true.mean_P, true.layout(SPREAD)).step
    off = (np.log(exact) - logs_SM[0]) / (logs_SM.std(axis=0) + 0.01)
    assert (np.abs(off) < 2).mean() > 0.8


def test_one_probe_that_is_five_times_too_slow_moves_the_others_little() -> None:
    true, rng = truth(), np.random.default_rng(2)
    seen = observed(true, SPREAD, rng)
    wild = seen[7]
    seen[7] = Observation("ok", [5 * step for step in wild.steps_s], {})
    exact = step_times(true.mean_P, true.layout(SPREAD)).step
    off = np.abs(predicted(fitted(SPREAD, seen, CLUSTER), SPREAD).step / exact - 1)
    assert np.median(off) < 0.02
    assert np.quantile(off, 0.95) < 0.08


def test_the_parts_are_seconds_of_one_step() -> None:
    parts = predicted(truth(), SPREAD)
    assert (parts.step >= np.maximum(parts.work, parts.supply)).all()
    double = truth()
    for place, parameter in enumerate(PARAMETERS):  # a cluster that is twice as slow in everything that has a second in its unit
        if parameter.unit.startswith(("s ", "images/s")):
            double.mean_P[place] += math.log(2) * (1 if parameter.unit.startswith("s ") else -1)
    assert predicted(double, SPREAD).step == pytest.approx(2 * parts.step)


def test_without_loader_threads_nothing_overlaps() -> None:
    parts = predicted(truth(), [point(1, 64, 0)])
    assert parts.step == pytest.approx(parts.work + parts.supply)


def test_a_further_value_of_an_extra_key_gets_multipliers_of_its_own() -> None:
    points = [{**at, "train.precision": precision} for at, precision in product(SPREAD[:24], ("fp32", "bf16"))]
    plain, rng = truth(), np.random.default_rng(3)
    seen = observed(plain, points, rng)
    halved = [
        Observation("ok", [step / 2 for step in one.steps_s], {})
        if at["train.precision"] == "bf16"
        else Observation("ok", one.steps_s, {})
        for at, one in zip(points, seen, strict=True)
    ]
    model = fitted(points, halved, CLUSTER)
    assert model.extras == (("train.precision", "'bf16'"),)
    step_s = predicted(model, points).step
    assert np.median(step_s[1::2] / step_s[::2]) == pytest.approx(0.5, abs=0.05)


def test_six_hundred_points_are_fitted_and_predicted_in_a_fifth_of_a_second() -> None:
    points = grid([1, 2, 4, 8, 16], [2**power for power in range(5, 17)], [1, 2, 3, 4, 5, 6, 8, 10, 12, 16])
    assert len(points) == 600
    seen = observed(truth(), points, np.random.default_rng(4))
    took = []
    for _ in range(3):
        start = time.process_time()
        predicted(fitted(points, seen, CLUSTER), points)
        took.append(time.process_time() - start)
    assert min(took) < 0.2


def test_the_phases_are_those_that_a_worker_times() -> None:
    from trainables.metrics.phase_timer import ALL_PHASES

    assert set(ALL_PHASES) <= {*PHASES, "allreduce", "receive", "bubble"}


def test_an_axis_of_pipeline_stages_is_learned_from_a_few_points() -> None:
    rng = np.random.default_rng(0)
    points = [
        {**point(workers, batch, 8), "scale.pipeline_stages": stages}
        for workers, batch, stages in product((1, 2, 4, 8), (64, 256), (1, 2, 4))
        if workers % stages == 0
    ]
    prior = StepTime.prior(EIGHT_GPUS, categories(points))
    true = prior.mean_P + 0.3 * np.sqrt(np.diag(prior.covariance_PP)) * rng.standard_normal(len(prior.mean_P))
    steps_s = step_times(true, prior.layout(points)).step
    shown = rng.permutation(len(points))[:10].tolist()
    seen = [Observation("ok", list(steps_s[row] * rng.normal(1, 0.01, 20))) for row in shown]
    model = prior.fitted(Measured.of(prior.layout([points[row] for row in shown]), seen))
    errors = predicted(model, points).step / steps_s - 1
    assert np.median(abs(errors)) < 0.08
    assert max(abs(errors)) < 0.35
