from __future__ import annotations

import numpy as np
import pytest

from trainables.data.order import epoch_order, rank_part, split_order


@pytest.mark.parametrize("num_samples", [0, 1, 2, 7, 1000])
def test_an_order_holds_every_sample_once(num_samples: int) -> None:
    order_N = epoch_order(seed=3, epoch=4, num_samples=num_samples)
    assert order_N.dtype == np.int64
    assert sorted(order_N.tolist()) == list(range(num_samples))


def test_an_order_is_a_function_of_seed_and_epoch_alone() -> None:
    first = epoch_order(1, 2, 500)
    np.random.seed(99)
    epoch_order(5, 5, 10)
    assert (epoch_order(1, 2, 500) == first).all()
    for other in (epoch_order(1, 3, 500), epoch_order(2, 2, 500), epoch_order(2, 1, 500), epoch_order(2**32 - 1, 2, 500)):
        assert (other != first).mean() > 0.9


def test_an_order_is_shuffled_evenly() -> None:
    places = np.stack([epoch_order(0, epoch, 10) for epoch in range(2000)])
    for column in places.T:
        assert np.bincount(column, minlength=10) == pytest.approx(200, abs=70)


def test_validation_is_read_in_the_stored_order() -> None:
    assert split_order("val", 1, 2, 9).tolist() == list(range(9))
    assert split_order("train", 1, 2, 9).tolist() == epoch_order(1, 2, 9).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (0, 2), (4, 8), (10, 17), (64, 128), (7, 1000)])
def test_ranks_share_a_batch_as_array_split_does(world_size: int, start: int, stop: int) -> None:
    expected = [part.tolist() for part in np.array_split(np.arange(start, stop), world_size)]
    assert [list(range(*rank_part(start, stop, rank, world_size))) for rank in range(world_size)] == expected
