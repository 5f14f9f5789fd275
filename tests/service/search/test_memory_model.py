"""Which batches are believed to fit, and how surely."""

import numpy as np
import pytest

from service.search.memory_model import MemoryModel, kinds_of
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


def test_every_number_of_pipeline_stages_is_a_kind_of_its_own_as_every_precision_is() -> None:
    points = [
        {**point(2, 64, 1), "scale.pipeline_stages": stages, "precision": precision}
        for precision in ("fp32", "bf16")
        for stages in (1, 2)
    ]
    kind_M = kinds_of(Layout.of(points, Hardware(1, 4, 16), categories(points)))
    assert kind_M.tolist() == [0, 1, 2, 3]


def test_a_batch_that_is_too_large_for_one_kind_may_be_tried_with_another() -> None:
    memory = MemoryModel()
    memory.add(0, 16.0, None, 10_000, oom=True)
    assert memory.chances(ZERO, BATCHES).tolist() == [0.0] * 5
    assert memory.chances(ZERO + 1, BATCHES).min() > 0.1
