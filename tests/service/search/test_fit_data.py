"""Observations as the fit of the step-time model wants them."""

import math

import numpy as np
import pytest

from service.search.fit_data import LEAST_NOISE, MODEL_ERROR, UNKNOWN_NOISE, Measured
from service.search.points import Hardware, Layout, Observation
from tests.service.search.queues import grid

HARDWARE = Hardware(1, 4, 16)
LAYOUT = Layout.of(grid([1], [64, 128], [4]), HARDWARE, ())


def test_work_and_forward_are_shares_of_the_step_by_the_phases() -> None:
    phases_s = {"data": 0.5, "teacher": 0.25, "student": 0.25, "backward": 1.0}
    logs_31 = Measured.of(LAYOUT.take([0]), [Observation("ok", [0.2] * 8, phases_s)]).logs_3M
    assert np.exp(logs_31[:, 0]).tolist() == pytest.approx([0.2, 0.15, 0.05])


def test_the_bubble_of_pipeline_stages_is_work_and_no_forward_pass() -> None:
    phases_s = {"data": 0.5, "student": 0.25, "backward": 0.5, "bubble": 0.75}
    logs_31 = Measured.of(LAYOUT.take([0]), [Observation("ok", [0.2] * 8, phases_s)]).logs_3M
    assert np.exp(logs_31[:, 0]).tolist() == pytest.approx([0.2, 0.15, 0.025])


def test_a_share_that_nothing_is_known_of_is_not_measured() -> None:
    only_data = Observation("ok", [0.2] * 8, {"data": 1.0})
    logs_32 = Measured.of(LAYOUT, [only_data, Observation("ok", [0.1] * 8)]).logs_3M
    assert np.isfinite(logs_32).tolist() == [[True, True], [False, False], [False, False]]


def test_steady_steps_leave_the_least_noise_and_a_single_one_an_unknown_one() -> None:
    measured = Measured.of(LAYOUT, [Observation("ok", [0.2] * 8), Observation("ok", [0.1])])
    assert measured.noise_M.tolist() == [LEAST_NOISE, UNKNOWN_NOISE]
    assert measured.errors_3M[:, 0].tolist() == pytest.approx([math.hypot(LEAST_NOISE, error) for error in MODEL_ERROR.values()])


def test_points_that_are_taken_for_measured_are_joined_with_a_noise_of_their_own() -> None:
    measured = Measured.of(LAYOUT.take([0]), [Observation("ok", [0.2] * 8)])
    joined = measured.joined(np.log([[0.3], [0.2], [0.1]]), LAYOUT)
    assert np.exp(joined.logs_3M[:, 1]).tolist() == pytest.approx([0.3, 0.2, 0.1])
    assert joined.errors_3M[:, 1].tolist() == [*MODEL_ERROR.values()]
    assert joined.noise_M.tolist() == [LEAST_NOISE, UNKNOWN_NOISE / 2]
