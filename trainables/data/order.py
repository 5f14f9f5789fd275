"""Which sample stands at which position of an epoch: a pure function of (seed, epoch, position), and a rank's share of it.

Shapes: B positions, N samples of the split, S blocks (shards, or runs of neighbours) of N samples in all.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainables.config.data import shuffle_window

Split = Literal["train", "val"]

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's step: 2⁶⁴ divided by the golden ratio."""
REPEAT = 1 << 40
"""A view of an image, by which it is augmented, is its index + REPEAT · the number of its repeat in the epoch, from 0."""
_ROUNDS = 10  # 4 are pseudorandom for large N (Luby & Rackoff 1988); a domain of a few values needs more to come near uniform
_SAMPLES, _BLOCKS, _WINDOW, _SLOTS = 1, 2, 3, 4  # what a key is for
_BLOCK_SAMPLES = 256  # of a source without shards


def sample_at(seed: int, epoch: int, positions_B: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """The samples (B,) at `positions_B` of an epoch that is shuffled as a whole; both lie in [0, `num_samples`).

    A permutation for each (seed, epoch), found position by position: memory and time depend on B alone. `seed` and `epoch`
    are in [0, 2**64). See `permuted`.
    """
    return permuted((_SAMPLES, seed, epoch), positions_B, num_samples)


def permuted(key: tuple[int, ...], values_B: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The images (B,) of `values_B` under a permutation of [0, `size`) that `key` chooses.

    The generalised Feistel cipher of Black & Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5: a value
    is a pair in [0, a) × [0, b) with a·b just above `size`, the halves take turns to be shifted by a keyed hash of the other,
    and what falls outside [0, `size`) goes round again. Round r's hash of x is output x of a SplitMix64 stream of its own.
    """
    # With a and b odd every shift of a row would be an even permutation, and so would be all that follows from them.
    a = 2 * math.ceil(math.sqrt(max(size, 1)) / 2)
    b = max(1, -(-size // a))
    keys_R = _stream(key, _ROUNDS)
    found_B = _feistel(keys_R, values_B.astype(np.uint64), a, b)
    while len(outside := np.flatnonzero(found_B >= size)):
        found_B[outside] = _feistel(keys_R, found_B[outside], a, b)
    return found_B.astype(np.int64)


def _feistel(keys_R: NDArray[np.uint64], values_B: NDArray[np.uint64], a: int, b: int) -> NDArray[np.uint64]:
    """One pass of the cipher over [0, a·b)."""
    golden, one, rows, columns = (np.uint64(value) for value in (GOLDEN, 1, a, b))
    high_B, low_B = values_B // columns, values_B % columns
    for number, key in enumerate(keys_R):
        if number % 2:
            low_B = (low_B + (mix64(high_B * golden + key) >> one)) % columns  # 63 bits, so that the sum does not wrap
        else:
            high_B = (high_B + (mix64(low_B * golden + key) >> one)) % rows
    return high_B * columns + low_B


def _stream(key: tuple[int, ...], count: int) -> NDArray[np.uint64]:
    """The first `count` numbers of the SplitMix64 stream whose start is hashed from `key`, word by word."""
    start = np.zeros(1, dtype=np.uint64)
    for word in key:
        start = mix64(start + np.uint64(word))
    return mix64(start + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN))


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step and finalizer, elementwise: a bijection of 64 bits that spreads every input bit.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Stafford's mix 13.
    """
    values = values + np.uint64(GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Order:
    """The order of one split, by `data.shuffle`; validation is always read as stored.

    `full`: `sample_at`. `none`: as stored. `window(n)`: blocks in random order one behind the other, and each stretch of n
    samples of that row shuffled in itself; blocks are the source's shards, or else 256 neighbours. This is a pure function of
    (seed, epoch, position) too, and holds 32 bytes a block. In training `repeats` n show each of the first n-th of the samples
    n times: Hoffer et al. 2019, "Augment your batch", and an epoch is as long as without.
    """

    repeats = 1

    def __init__(
        self,
        split: Split,
        shuffle: str,
        *,
        seed: int,
        num_samples: int,
        shard_sizes: Sequence[int] | None = None,
        repeats: int = 1,
    ) -> None:
        self.num_samples, self._seed = num_samples, seed
        self.repeats = repeats if split == "train" else 1
        self._shuffle = shuffle if split == "train" else "none"
        self._window = shuffle_window(self._shuffle) or 0
        if self._window:
            cuts = np.arange(0, num_samples + _BLOCK_SAMPLES, _BLOCK_SAMPLES).clip(max=num_samples)
            self._sizes_S: NDArray[np.int64] = np.diff(cuts) if shard_sizes is None else np.array(shard_sizes, dtype=np.int64)
            self._starts_S: NDArray[np.int64] = np.cumsum(self._sizes_S) - self._sizes_S
            self._row = self._lay_out(epoch=0)

    @property
    def num_shown(self) -> int:
        """How many samples an epoch shows: those at the positions before."""
        return math.ceil(self.num_samples / self.repeats)

    def views(self, epoch: int, begin: int, end: int, rank: int, world_size: int) -> NDArray[np.int64]:
        """A rank's part of the global batch [begin, end) of an epoch, see `REPEAT`.

        In a batch the first repeats come before the second ones. So neighbors, which may be mixed, are different images, and
        repeats of an image are on different ranks, as far as there are such.
        """
        slots_G = np.arange(begin, end)
        slots_G = slots_G[np.argsort(slots_G % self.repeats, kind="stable")]
        slots_B = slots_G[slice(*rank_part(0, end - begin, rank, world_size))]
        views_B: NDArray[np.int64] = self.at(epoch, slots_B // self.repeats) + REPEAT * (slots_B % self.repeats)
        return views_B

    def at(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples (B,) at `positions_B` of an epoch, in [0, num_samples)."""
        if self._window:
            return self._in_blocks(epoch, self._in_windows(epoch, positions_B))
        if self._shuffle == "none":
            return positions_B.copy()
        return sample_at(self._seed, epoch, positions_B, self.num_samples)

    def _in_windows(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions in the row of blocks: each window is a permutation of its own."""
        windows_B, found_B = positions_B // self._window, positions_B.copy()
        for window in np.unique(windows_B).tolist():
            here, first = windows_B == window, window * self._window
            size = min(self._window, self.num_samples - first)
            found_B[here] = first + permuted((_WINDOW, self._seed, epoch, window), positions_B[here] - first, size)
        return found_B

    def _in_blocks(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at positions in the row of blocks."""
        if self._row[0] != epoch:
            self._row = self._lay_out(epoch)
        _, row_S, ends_S = self._row
        slots_B = np.searchsorted(ends_S, positions_B, side="right")
        blocks_B = row_S[slots_B]
        samples_B: NDArray[np.int64] = self._starts_S[blocks_B] + positions_B - (ends_S[slots_B] - self._sizes_S[blocks_B])
        return samples_B

    def _lay_out(self, epoch: int) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """The epoch, its blocks in the order of their row, and where in the row each ends."""
        num_blocks = len(self._sizes_S)
        row_S = permuted((_BLOCKS, self._seed, epoch), np.arange(num_blocks), num_blocks)
        return epoch, row_S, np.cumsum(self._sizes_S[row_S])


class MixedOrder(Order):
    """The order of several sets that lie one behind the other: `counts` samples of each are in every batch.

    An epoch is one pass over the first set; the last batch of a pass may have fewer of it, unless `drop` leaves that out. The
    others go on where the batch before ended, in the next pass where one is over. Which slot of a batch is which set's is drawn
    by chance, so that neighbours are a random pair; a set's samples come in the order of its slots.
    """

    def __init__(self, orders: Sequence[Order], counts: Sequence[int], *, seed: int, drop: bool) -> None:
        self._orders, self._counts, self._seed, self.batch = orders, counts, seed, sum(counts)
        self._firsts = np.cumsum([0, *(order.num_samples for order in orders)]).tolist()
        own = orders[0].num_samples
        self._steps = own // counts[0] if drop else math.ceil(own / counts[0])
        self.num_samples = self._steps * self.batch - max(0, self._steps * counts[0] - own)

    def starts(self, epoch: int, step: int) -> list[tuple[Order, int, int]]:
        """The order of each set, and the pass and the position in it where a batch begins."""
        found = [(self._orders[0], epoch, step * self._counts[0])]
        for number, (order, count) in enumerate(zip(self._orders[1:], self._counts[1:], strict=True), 1):
            passed, position = divmod((epoch * self._steps + step) * count, order.num_samples)
            found.append((order, (number << 40) + passed, position))  # sets of one size are shuffled apart
        return found

    def at(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples (B,) at `positions_B` of an epoch, numbered through all sets."""
        samples_B, steps_B = np.empty_like(positions_B), positions_B // self.batch
        for step in np.unique(steps_B).tolist():
            here = steps_B == step
            samples_B[here] = self._in_batch(epoch, step, positions_B[here] - step * self.batch)
        return samples_B

    def _in_batch(self, epoch: int, step: int, slots_R: NDArray[np.int64]) -> NDArray[np.int64]:
        own = min(self._counts[0], self._orders[0].num_samples - step * self._counts[0])
        sets_G = np.repeat(np.arange(len(self._orders)), [own, *self._counts[1:]])
        sets_G = sets_G[permuted((_SLOTS, self._seed, epoch, step), np.arange(len(sets_G)), len(sets_G))]
        samples_R = np.empty_like(slots_R)
        for number, (order, passed, position) in enumerate(self.starts(epoch, step)):
            here = sets_G[slots_R] == number
            nth_G = np.cumsum(sets_G == number) - 1
            samples_R[here] = self._firsts[number] + _going_on(order, passed, position + nth_G[slots_R[here]])
        return samples_R


def _going_on(order: Order, passed: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """The samples (B,) at positions that go on in the passes after this one."""
    samples_B, passes_B = np.empty_like(positions_B), positions_B // order.num_samples
    for more in np.unique(passes_B).tolist():
        here = passes_B == more
        samples_B[here] = order.at(passed + more, positions_B[here] - more * order.num_samples)
    return samples_B


def rank_part(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's contiguous half-open part of [start, stop), sized as by `np.array_split`: larger parts first, some empty."""
    size, larger = divmod(stop - start, world_size)
    begin = start + rank * size + min(rank, larger)
    return begin, begin + size + (rank < larger)
