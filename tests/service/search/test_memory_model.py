"""Which batches are believed to fit."""

from __future__ import annotations

import numpy as np

from service.search.memory_model import MemoryModel

BATCHES = np.array([16.0, 32.0, 64.0, 128.0, 256.0])
ZERO = np.zeros(5, dtype=int)


def test_two_probes_give_the_line() -> None:
    memory = MemoryModel()
    for batch in (16.0, 64.0):
        memory.tell(0, batch, 1000 + 50 * batch, 10_000, oom=False)
    assert memory.fits(ZERO, BATCHES).tolist() == [True, True, True, True, False]


def test_one_probe_bounds_the_peak_in_proportion_to_the_batch() -> None:
    memory = MemoryModel()
    memory.tell(0, 32.0, 2600, 10_000, oom=False)
    assert memory.fits(ZERO, BATCHES).tolist() == [True, True, True, False, False]
    assert memory.is_line_unknown()


def test_what_ran_out_of_memory_bounds_every_batch_as_big() -> None:
    memory = MemoryModel()
    memory.tell(0, 64.0, None, None, oom=True)
    assert memory.fits(ZERO, BATCHES).tolist() == [True, True, False, False, False]


def test_a_kind_that_nobody_tried_is_believed_to_be_as_hungry_as_the_hungriest() -> None:
    memory = MemoryModel()
    for batch in (16.0, 64.0):
        memory.tell(0, batch, 1000 + 50 * batch, 10_000, oom=False)
        memory.tell(1, batch, 1000 + 100 * batch, 10_000, oom=False)
    assert memory.fits(ZERO + 2, BATCHES).tolist() == [True, True, True, False, False]


def test_where_no_peak_is_known_everything_may_be_tried() -> None:
    assert MemoryModel().fits(ZERO, BATCHES).all()
