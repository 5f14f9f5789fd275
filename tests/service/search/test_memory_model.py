"""Which batches are believed to fit, and how surely."""

import numpy as np
import pytest

from service.search.memory_model import Kind, MemoryModel, kinds_of
from service.search.points import Hardware, Layout, categories
from tests.service.search.queues import point

BATCHES = np.array([16.0, 32.0, 64.0, 128.0, 256.0])
ZERO = np.zeros(5, dtype=int)


def test_two_probes_give_the_line_and_what_lies_near_the_capacity_stays_possible() -> None:
    memory = MemoryModel()
    for batch in (16.0, 64.0):
        memory.add(0, batch, 1000 + 50 * batch, 10_000, oom=False)
    chances = memory.chances(ZERO, BATCHES)
    assert chances[:3].tolist() == [1.0, 1.0, 1.0]
    assert chances[3] > 0.95  # 7,400
    assert chances[4] < 0.05  # 13,800
    assert 0.1 < memory.chances(ZERO[:1], np.array([178.0]))[0] < 0.6  # 9,900


def test_one_probe_bounds_the_peak_in_proportion_to_the_batch_and_leaves_the_base_open() -> None:
    memory = MemoryModel()
    memory.add(0, 32.0, 2600, 10_000, oom=False)
    chances = memory.chances(ZERO, BATCHES)
    assert chances[:3].tolist() == [1.0, 1.0, 1.0]
    assert 0.5 < chances[3] < 1.0
    assert 0.05 < chances[4] < 0.5
    assert memory.is_line_unknown()


def test_with_one_peak_known_a_smaller_batch_needs_less() -> None:
    memory = MemoryModel()
    memory.add(0, 32.0, 9990, 10_000, oom=False)
    assert memory.chances(ZERO, BATCHES)[:2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("peaks", [{1024.0: 80_000.0}, {256.0: 30_000.0, 1024.0: 80_000.0}])
def test_what_ran_is_never_refused_whatever_the_line_says(peaks: dict[float, float]) -> None:
    memory = MemoryModel()
    for batch, peak in peaks.items():
        memory.add(0, batch, peak, 81_920, oom=False)
    batches = np.array([4.0, 256.0, 512.0, 1024.0])
    assert memory.chances(np.zeros(4, dtype=int), batches).tolist() == [1.0] * 4


def test_a_batch_that_ran_once_and_once_did_not_is_left_open() -> None:
    memory = MemoryModel()
    memory.add(0, 64.0, 9000, 10_000, oom=False)
    memory.add(0, 64.0, None, 10_000, oom=True)
    chances = memory.chances(ZERO, BATCHES)
    assert chances[:2].tolist() == [1.0, 1.0]
    assert 0.3 < chances[2] < 1.0
    assert chances[3:].tolist() == [0.0, 0.0]


def test_what_ran_out_of_memory_bounds_every_batch_as_big_and_makes_those_just_below_doubtful() -> None:
    memory = MemoryModel()
    memory.add(0, 64.0, None, None, oom=True)
    chances = memory.chances(ZERO, BATCHES)
    assert chances[2:].tolist() == [0.0, 0.0, 0.0]
    assert 0.5 < chances[1] < chances[0] < 1.0


def test_a_batch_just_below_one_that_ran_out_of_memory_is_tried_where_the_line_says_that_it_fits() -> None:
    memory = MemoryModel()
    for batch in (32.0, 64.0):
        memory.add(0, batch, 1000 + 100 * batch, 10_000, oom=False)
    memory.add(0, 100.0, None, 10_000, oom=True)
    fits, doubtful = memory.chances(ZERO[:2], np.array([80.0, 88.0]))
    assert fits > 0.9
    assert 0.2 < doubtful < 0.7


def test_a_line_that_a_batch_out_of_memory_has_refuted_is_not_believed() -> None:
    memory = MemoryModel()
    for batch in (16.0, 32.0):
        memory.add(0, batch, 1000 + 10 * batch, 10_000, oom=False)
    memory.add(0, 64.0, None, 10_000, oom=True)
    assert memory.chances(ZERO[:1], np.array([60.0]))[0] < 0.2


def test_a_kind_that_nobody_tried_is_believed_to_be_like_the_others_and_never_refused_for_them() -> None:
    memory = MemoryModel()
    for batch in (16.0, 64.0):
        memory.add(0, batch, 1000 + 50 * batch, 10_000, oom=False)
        memory.add(1, batch, 1000 + 100 * batch, 10_000, oom=False)
    chances = memory.chances(ZERO + 2, BATCHES)
    assert chances[:3].tolist() == [1.0, 1.0, 1.0]
    assert 0.3 < chances[3] < 0.8  # one of the two holds it
    assert chances[4] > 0.1


def test_where_no_peak_is_known_everything_may_be_tried() -> None:
    assert MemoryModel().chances(ZERO, BATCHES).tolist() == [1.0] * 5


WHOLE, HALVES, QUARTERS = 0, 1, 2
CUT = (Kind((), 1.0), Kind((), 2.0), Kind((), 4.0), Kind((1.0,), 2.0))


def test_a_batch_that_is_too_large_for_a_whole_model_is_not_refused_for_one_in_stages() -> None:
    memory = MemoryModel(CUT)
    memory.add(WHOLE, 16.0, None, 10_000, oom=True)  # the model alone may be too large
    assert memory.chances(ZERO + WHOLE, BATCHES).tolist() == [0.0] * 5
    assert memory.chances(ZERO + HALVES, BATCHES)[0] > 0.3
    assert memory.chances(ZERO + QUARTERS, BATCHES)[0] > memory.chances(ZERO + HALVES, BATCHES)[0]
    memory.add(HALVES, 16.0, 6000, 10_000, oom=False)
    assert memory.chances(ZERO + HALVES, BATCHES)[0] == 1.0


def test_what_fits_in_fewer_stages_fits_in_more_with_the_same_batch_of_a_replica() -> None:
    memory = MemoryModel(CUT)
    memory.add(WHOLE, 128.0, 9900, 10_000, oom=False)
    assert memory.chances(ZERO + HALVES, BATCHES)[:3].tolist() == [1.0, 1.0, 1.0], "a replica has 128 images"
    assert memory.chances(ZERO + QUARTERS, BATCHES)[:2].tolist() == [1.0, 1.0]
    assert memory.chances(ZERO + HALVES, BATCHES)[4] < 1.0


def test_what_is_out_of_memory_in_more_stages_is_in_fewer_with_the_same_batch_of_a_replica() -> None:
    memory = MemoryModel(CUT)
    memory.add(QUARTERS, 16.0, None, 10_000, oom=True)
    assert memory.chances(ZERO + HALVES, BATCHES)[1:].tolist() == [0.0] * 4, "32 images a worker are 64 of a replica"
    assert memory.chances(ZERO + HALVES, BATCHES)[0] > 0
    assert memory.chances(ZERO + WHOLE, BATCHES)[2:].tolist() == [0.0] * 3
    assert memory.chances(ZERO + 3, BATCHES).min() > 0, "another precision says nothing for sure"


def test_how_a_stages_peak_grows_is_bounded_by_how_those_of_other_numbers_of_stages_do() -> None:
    memory = MemoryModel(CUT)
    for batch in (16.0, 64.0):
        memory.add(QUARTERS, batch, 5000 + 20 * batch, 10_000, oom=False)
    memory.add(HALVES, 2.0, 7000, 10_000, oom=False)  # hardly more than its base
    at = np.array([16.0, 64.0, 256.0])
    chances = memory.chances(ZERO[:3] + HALVES, at)
    assert chances[0] == 1.0  # 14 further images take 1,120 at most
    assert 0 < chances[1] < 1  # 62 take 1,240 to 4,960, and 2,850 are left
    assert chances[2] == 0.0


def test_fewer_stages_have_no_fewer_parameters_so_that_one_peak_bounds_the_memory_of_an_image() -> None:
    memory = MemoryModel(CUT)
    for batch in (42.0, 68.0):
        memory.add(QUARTERS, batch, 1860 + 112 * batch, 11_264, oom=False)
    memory.add(HALVES, 42.0, 7078, 11_264, oom=False)
    at = np.array([67.0, 84.0])
    chances = memory.chances(ZERO[:2] + HALVES, at)
    assert chances[0] > 0.9, "25 further images take 3,300 at most, and 4,017 are left: none of 1,860 fixed is for images"
    memory.add(HALVES, 84.0, None, 11_264, oom=True)
    chances = memory.chances(ZERO[:2] + HALVES, at)
    assert chances[0] > 0.9, "as was expected, 84 images did not fit"
    assert chances[1] == 0.0


def test_a_stages_own_probes_count_more_than_what_others_say_of_it() -> None:
    memory = MemoryModel(CUT)
    memory.add(HALVES, 64.0, 9000, 10_000, oom=False)
    memory.add(QUARTERS, 16.0, None, 10_000, oom=True)  # by somebody else on the GPU
    assert memory.chances(ZERO + HALVES, BATCHES)[:3].tolist() == [1.0, 1.0, 1.0]


def test_points_that_differ_in_their_stages_alone_are_of_one_family() -> None:
    points = [
        {**point(2, 64, 1), "scale.pipeline_stages": stages, "precision": precision}
        for precision in ("fp32", "bf16")
        for stages in (1, 2)
    ]
    extras = categories(points)
    kind_M, kinds = kinds_of(Layout.of(points, Hardware(1, 4, 16), extras), extras)
    assert kind_M.tolist() == [0, 1, 2, 3]
    assert [(kind.family, kind.stages) for kind in kinds] == [((0.0,), 1.0), ((0.0,), 2.0), ((1.0,), 1.0), ((1.0,), 2.0)]
