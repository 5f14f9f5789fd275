"""An order is a permutation that no statistic here tells from a random one, the same however it is asked for."""

import itertools
import math
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from trainables.data.order import REPEAT, MixedOrder, Order, permuted, rank_part, sample_at

Ints = NDArray[np.int64]


def _epoch(seed: int, epoch: int, num_samples: int) -> Ints:
    return sample_at(seed, epoch, np.arange(num_samples), num_samples)


def _sigmas(counts: Ints, freedom: int) -> float:
    """How many standard deviations a chi-square statistic over equally likely cells lies from its mean."""
    expected = counts.mean()
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))


def _correlation(first: Ints, second: Ints) -> float:
    """Pearson's, in standard deviations of its value for independent samples."""
    return float(np.corrcoef(first, second)[0, 1] * math.sqrt(len(first)))


def test_every_length_up_to_1000_is_a_permutation() -> None:
    for num_samples in range(1001):
        order_N = _epoch(3, 4, num_samples)
        assert order_N.dtype == np.int64
        assert (np.bincount(order_N, minlength=num_samples) == 1).all()
        assert len(order_N) == num_samples


@pytest.mark.parametrize("num_samples", [65_536, 99_991, 1_281_167])
def test_a_large_order_holds_every_sample_once(num_samples: int) -> None:
    assert (np.bincount(_epoch(0, 0, num_samples), minlength=num_samples) == 1).all()


def test_an_order_is_a_function_of_seed_epoch_and_position_alone() -> None:
    whole = _epoch(1, 2, 500)
    np.random.seed(99)
    for positions in (np.arange(40, 90), np.array([499]), np.array([7, 7, 3]), np.array([], dtype=np.int64)):
        assert (sample_at(1, 2, positions, 500) == whole[positions]).all()
    # The order of a seed is a promise: a resumed run reads on where an older version stopped.
    assert sample_at(11, 3, np.arange(6), 45).tolist() == [43, 14, 37, 25, 42, 1]
    assert sample_at(2**32 - 1, 2**40, np.arange(3), 10**12).tolist() == [793226666390, 156265100982, 379102250664]


@pytest.mark.parametrize("num_samples", [2, 3, 7, 33])
def test_every_sample_stands_at_every_position_equally_often(num_samples: int) -> None:
    locations = np.stack([_epoch(0, epoch, num_samples) for epoch in range(1000)])
    cells = np.stack([np.bincount(column, minlength=num_samples) for column in locations.T])
    assert abs(_sigmas(cells.ravel(), (num_samples - 1) ** 2)) < 4


@pytest.mark.parametrize(
    ("num_samples", "num_epochs"), [(3, 1000), (4, 1000), (5, 2000), pytest.param(5, 4000, marks=pytest.mark.slow)]
)
def test_every_permutation_of_a_few_samples_is_equally_likely(num_samples: int, num_epochs: int) -> None:
    permutations = list(itertools.permutations(range(num_samples)))
    counted = Counter(tuple(_epoch(0, epoch, num_samples).tolist()) for epoch in range(num_epochs))
    counts = np.array([counted[permutation] for permutation in permutations])
    assert abs(_sigmas(counts, len(permutations) - 1)) < 4


@pytest.mark.parametrize("num_samples", [1000, 65_536, 99_991])
@pytest.mark.parametrize("lag", [1, 2, 64, 256])
def test_neighbours_and_batches_are_uncorrelated(num_samples: int, lag: int) -> None:
    order_N = _epoch(5, 1, num_samples)
    assert abs(_correlation(order_N[:-lag], order_N[lag:])) < 4
    steps, counts = np.unique(np.abs(order_N[lag:] - order_N[:-lag]), return_counts=True)
    assert counts[steps == 1].sum() < 2 + 4 * math.sqrt(2)  # of neighbours that stay neighbours, 2 are expected


@pytest.mark.parametrize("seeds", [((1, 2), (1, 3)), ((1, 2), (2, 2)), ((1, 2), (2, 1)), ((0, 0), (0, 1)), ((0, 1), (2**32, 1))])
def test_epochs_and_seeds_are_unrelated(seeds: tuple[tuple[int, int], tuple[int, int]]) -> None:
    first, second = (_epoch(*pair, 50_000) for pair in seeds)
    assert abs(_correlation(first, second)) < 4
    assert (first == second).sum() <= 5  # 1 is expected
    follows = np.empty(50_000, dtype=np.int64)  # which sample follows sample i, in each of both
    follows[first[:-1]] = first[1:]
    assert (follows[second[:-1]] == second[1:]).sum() <= 5


def test_positions_fill_a_batch_evenly_from_all_parts_of_the_data() -> None:
    order_N = _epoch(7, 0, 256 * 200)
    cells = np.stack([np.bincount(batch // 5120, minlength=10) for batch in order_N.reshape(200, 256)])
    # Ten tenths of the data in 200 batches: both margins are fixed, and hypergeometric counts spread a little less.
    assert abs(_sigmas(cells.ravel(), 199 * 9)) < 4


def test_a_billion_samples_cost_no_memory() -> None:
    positions_B = np.arange(987_654_321, 987_654_321 + 256)
    tracemalloc.start()
    order = Order("train", "full", seed=0, num_samples=10**9)
    assert len(set(order.at(0, positions_B).tolist())) == 256
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.slow
def test_a_batch_of_256_from_a_billion_takes_under_a_millisecond() -> None:
    positions_B, times = np.arange(987_654_321, 987_654_321 + 256), []
    for epoch in range(200):
        began = time.perf_counter()
        sample_at(0, epoch, positions_B, 10**9)
        times.append(time.perf_counter() - began)
    assert np.median(times) < 1e-3


def test_validation_and_none_are_read_in_the_stored_order() -> None:
    for split, shuffle in (("val", "full"), ("val", "window(4)"), ("train", "none")):
        assert Order(split, shuffle, seed=1, num_samples=9).at(2, np.arange(9)).tolist() == list(range(9))  # type: ignore[arg-type]


def _windows(num_samples: int, window: int, shards: list[int] | None = None, epoch: int = 0) -> Ints:
    order = Order("train", f"window({window})", seed=6, num_samples=num_samples, shard_sizes=shards)
    return order.at(epoch, np.arange(num_samples))


@pytest.mark.parametrize("window", [1, 2, 7, 100, 256, 520, 3000])
@pytest.mark.parametrize("shards", [None, [1, 260, 0, 37, 222], [520]])
def test_a_windowed_order_holds_every_sample_once_and_is_another_one_each_epoch(window: int, shards: list[int] | None) -> None:
    epochs = [_windows(520, window, shards, epoch) for epoch in range(2)]
    for order_N in epochs:
        assert sorted(order_N.tolist()) == list(range(520))
    if window > 1:
        assert (epochs[0] != epochs[1]).mean() > 0.5


def test_a_windowed_order_is_a_function_of_the_position() -> None:
    whole = _windows(3000, 100)
    order = Order("train", "window(100)", seed=6, num_samples=3000)
    order.at(5, np.arange(10))
    for positions in (np.arange(90, 210), np.array([2999, 0, 100]), np.array([], dtype=np.int64)):
        assert (order.at(0, positions) == whole[positions]).all()


def test_a_window_of_one_reads_whole_shards_in_random_order() -> None:
    sizes = [5, 1, 0, 4, 7]
    shard_N = np.repeat(np.arange(5), sizes)
    orders = set()
    for epoch in range(40):
        order_N = _windows(17, 1, sizes, epoch)
        row = [shard for shard, _ in itertools.groupby(shard_N[order_N].tolist())]
        assert sorted(row) == [0, 1, 3, 4]
        assert order_N.tolist() == [index for shard in row for index in np.flatnonzero(shard_N == shard)]
        orders.add(tuple(row))
    assert len(orders) > 12


def test_a_shard_is_read_in_two_neighbouring_windows_at_most() -> None:
    shard_N = np.repeat(np.arange(50), 100)
    windows_N, shards_read_N = np.arange(5000) // 130, shard_N[_windows(5000, 130, [100] * 50)]
    for shard in range(50):
        present = np.unique(windows_N[shards_read_N == shard])
        assert len(present) <= 2
        assert np.ptp(present) <= 1


def mixing(groups_N: Ints, order_N: Ints, batch: int) -> float:
    """From how many groups (shards, classes) the samples of a batch come: 1/Σ share², mean over the whole batches."""
    whole = groups_N[order_N[: len(order_N) // batch * batch]].reshape(-1, batch)
    return float(np.mean([1 / np.square(np.unique(row, return_counts=True)[1] / batch).sum() for row in whole]))


def test_mixing_grows_with_the_window_as_the_documentation_says() -> None:
    num_samples, shard, batch = 128_000, 2000, 256
    shard_N = np.arange(num_samples) // shard
    by_window = {
        window: mixing(shard_N, _windows(num_samples, window, [shard] * 64), batch) for window in (256, 8000, 32_000, 10**6)
    }
    full = mixing(shard_N, _epoch(6, 0, num_samples), batch)
    assert by_window[256] < 1.3
    assert 3.5 < by_window[8000] < 5
    assert 13 < by_window[32_000] < 17
    assert by_window[10**6] == pytest.approx(full, rel=0.02)


def test_a_permutation_of_another_key_is_another_one() -> None:
    tables = {tuple(permuted((purpose, 0, 0), np.arange(50), 50).tolist()) for purpose in range(20)}
    assert len(tables) == 20


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (0, 2), (4, 8), (10, 17), (64, 128), (7, 1000)])
def test_ranks_share_a_batch_as_array_split_does(world_size: int, start: int, stop: int) -> None:
    expected = [part.tolist() for part in np.array_split(np.arange(start, stop), world_size)]
    assert [list(range(*rank_part(start, stop, rank, world_size))) for rank in range(world_size)] == expected


SIZES, COUNTS = (50, 7, 12), (6, 4, 2)


@pytest.mark.parametrize("shuffle", ["full", "none", "window(5)"])
@pytest.mark.parametrize(("drop", "sizes"), [(True, [12] * 8), (False, [12] * 8 + [8])])
def test_a_mixed_batch_has_its_part_of_each_set_and_the_others_go_on_over_passes(
    shuffle: str, drop: bool, sizes: list[int]
) -> None:
    orders = [Order("train", shuffle, seed=4, num_samples=size) for size in SIZES]
    mixed = MixedOrder(orders, COUNTS, seed=4, drop=drop)
    assert mixed.num_samples == sum(sizes)
    streams = [list[int](), list[int](), list[int]()]
    for epoch in range(3):
        whole = mixed.at(epoch, np.arange(mixed.num_samples))
        for batch in np.split(whole, np.cumsum(sizes)[:-1]):
            numbers = np.searchsorted(np.cumsum(SIZES), batch, side="right")
            assert np.bincount(numbers).tolist() == [len(batch) - 6, 4, 2]
            for number, stream in enumerate(streams):
                stream += (batch[numbers == number] - sum(SIZES[:number])).tolist()
        for positions in (np.arange(5, 31), np.array([40, 3, 40]), np.array([], dtype=np.int64)):
            assert (mixed.at(epoch, positions) == whole[positions]).all()
    own = 48 if drop else 50
    assert streams[0] == [index for epoch in range(3) for index in orders[0].at(epoch, np.arange(50))[:own].tolist()]
    for number in (1, 2):
        passes = range(-(-len(streams[number]) // SIZES[number]))
        expected = [
            index for each in passes for index in orders[number].at((number << 40) + each, np.arange(SIZES[number])).tolist()
        ]
        assert streams[number] == expected[: len(streams[number])]


def test_which_set_a_slot_of_a_batch_is_of_is_drawn_anew_so_that_neighbors_are_any_pair() -> None:
    mixed = MixedOrder([Order("train", "none", seed=1, num_samples=600) for _ in range(2)], (4, 4), seed=1, drop=True)
    pairs = mixed.at(0, np.arange(1200)).reshape(-1, 2) // 600
    counts = np.bincount(2 * pairs[:, 0] + pairs[:, 1], minlength=4)
    assert abs(counts / 600 - [3 / 14, 4 / 14, 4 / 14, 3 / 14]).max() < 0.06


@pytest.mark.parametrize("batch", [6, 8])
def test_repeats_show_the_first_images_of_the_order_several_times_and_an_epoch_is_as_long(batch: int) -> None:
    order = Order("train", "full", seed=5, num_samples=48, repeats=3)
    plain = Order("train", "full", seed=5, num_samples=48).at(2, np.arange(48))
    views = np.concatenate([order.views(2, begin, begin + batch, 0, 1) for begin in range(0, 48, batch)])
    assert sorted(views.tolist()) == sorted((plain[:16, None] + REPEAT * np.arange(3)).ravel().tolist())
    assert order.num_shown == 16
    for step, images in enumerate(views.reshape(-1, batch) % REPEAT):
        assert {*images.tolist()} == {*plain[step * batch // 3 : -(-(step + 1) * batch // 3)].tolist()}
        assert (images[::2] != images[1::2]).all()  # neighbors, which MixUp mixes
        parts = [order.views(2, step * batch, (step + 1) * batch, rank, 4) for rank in range(4)]
        assert np.concatenate(parts).tolist() == views[step * batch : (step + 1) * batch].tolist()
        assert all(len({*(part % REPEAT).tolist()}) == len(part) for part in parts)


def test_validation_has_no_repeats() -> None:
    order = Order("val", "full", seed=5, num_samples=9, repeats=3)
    assert order.views(0, 0, 9, 0, 1).tolist() == list(range(9))
    assert order.num_shown == 9
