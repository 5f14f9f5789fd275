"""The order of samples in an epoch, a pure function of (seed, epoch, position), and each rank's part of it.

Shapes: B positions, N samples of the split, S blocks (shards, or runs of neighbors) with N samples in total, G slots of a global
batch, R slots of it that are looked up.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainables.config.data import shuffle_window

Split = Literal["train", "val"]

GOLDEN = 0x9E3779B97F4A7C15
"""The increment of SplitMix64: 2⁶⁴ divided by the golden ratio."""
REPEAT = 1 << 40
"""A view, which seeds an image's augmentation, is the image's index + REPEAT · the number of its repeat in the epoch, from 0."""
_ROUNDS = 10  # 4 are pseudorandom for large N (Luby & Rackoff 1988); small domains need more to be close to uniform
_SAMPLES, _BLOCKS, _WINDOW, _SLOTS = 1, 2, 3, 4  # first word of a key: what it permutes
_BLOCK_SAMPLES = 256  # for a source without shards


def sample_at(seed: int, epoch: int, positions_B: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Return the samples (B,) at `positions_B` of a fully shuffled epoch; both lie in [0, `num_samples`).

    Each (seed, epoch), both in [0, 2**64), gives a permutation that is evaluated per position (see `permuted`): memory and time
    depend on B only.
    """
    return permuted((_SAMPLES, seed, epoch), positions_B, num_samples)


def permuted(key: tuple[int, ...], values_B: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Map `values_B` (B,) by the permutation of [0, `size`) that `key` selects.

    This is the generalized Feistel cipher of Black & Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5: a
    value is a pair in [0, a) × [0, b) with a·b just above `size`, each half in turn is shifted by a keyed hash of the other, and
    values outside [0, `size`) are encrypted again. The hash of x in round r is output x of that round's SplitMix64 stream.
    """
    # with a and b odd, every shift would be an even permutation, and so would every product of shifts
    a = 2 * math.ceil(math.sqrt(max(size, 1)) / 2)
    b = max(1, -(-size // a))
    keys_R = _stream(key, _ROUNDS)
    found_B = _feistel(keys_R, values_B.astype(np.uint64), a, b)
    while len(outside := np.flatnonzero(found_B >= size)):
        found_B[outside] = _feistel(keys_R, found_B[outside], a, b)
    return found_B.astype(np.int64)


def _feistel(keys_R: NDArray[np.uint64], values_B: NDArray[np.uint64], a: int, b: int) -> NDArray[np.uint64]:
    """Apply the cipher once over [0, a·b)."""
    golden, one, rows, columns = (np.uint64(value) for value in (GOLDEN, 1, a, b))
    high_B, low_B = values_B // columns, values_B % columns
    for number, key in enumerate(keys_R):
        if number % 2:
            low_B = (low_B + (mix64(high_B * golden + key) >> one)) % columns  # 63 bits, so that the sum does not wrap
        else:
            high_B = (high_B + (mix64(low_B * golden + key) >> one)) % rows
    return high_B * columns + low_B


def _stream(key: tuple[int, ...], count: int) -> NDArray[np.uint64]:
    """Return the first `count` numbers of the SplitMix64 stream whose start is a hash of the words of `key`."""
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
    """The order of one split, as `data.shuffle` sets it; validation is always read as stored.

    `full`: `sample_at`. `none`: as stored. `window(n)`: the blocks (shards, or else 256 neighbors) are concatenated in random
    order, and each window of n samples in this sequence is shuffled; this too is a pure function of (seed, epoch, position), and
    needs 32 bytes per block. In training, `repeats` n shows the first 1/n of the samples n times each (Hoffer et al. 2019,
    "Augment your batch"); the length of an epoch does not change.
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
            self._sequence = self._shuffle_blocks(epoch=0)

    @property
    def num_shown(self) -> int:
        """Number of samples that an epoch shows, at positions [0, `num_shown`)."""
        return math.ceil(self.num_samples / self.repeats)

    def views(self, epoch: int, begin: int, end: int, rank: int, world_size: int) -> NDArray[np.int64]:
        """Return a rank's views (see `REPEAT`) of the global batch [begin, end) of an epoch.

        In a batch, all first repeats come before the second ones. So neighbors, which may be mixed, are different images, and
        repeats of an image are on different ranks, if the batch has room for that.
        """
        slots_G = np.arange(begin, end)
        slots_G = slots_G[np.argsort(slots_G % self.repeats, kind="stable")]
        slots_B = slots_G[slice(*rank_part(0, end - begin, rank, world_size))]
        views_B: NDArray[np.int64] = self.at(epoch, slots_B // self.repeats) + REPEAT * (slots_B % self.repeats)
        return views_B

    def at(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples (B,) at `positions_B` of an epoch, in [0, num_samples)."""
        if self._window:
            return self._in_blocks(epoch, self._in_windows(epoch, positions_B))
        if self._shuffle == "none":
            return positions_B.copy()
        return sample_at(self._seed, epoch, positions_B, self.num_samples)

    def _in_windows(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions to positions in the block sequence, with a permutation per window."""
        windows_B, found_B = positions_B // self._window, positions_B.copy()
        for window in np.unique(windows_B).tolist():
            here, first = windows_B == window, window * self._window
            size = min(self._window, self.num_samples - first)
            found_B[here] = first + permuted((_WINDOW, self._seed, epoch, window), positions_B[here] - first, size)
        return found_B

    def _in_blocks(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at positions in the block sequence."""
        if self._sequence[0] != epoch:
            self._sequence = self._shuffle_blocks(epoch)
        _, shuffled_S, ends_S = self._sequence
        slots_B = np.searchsorted(ends_S, positions_B, side="right")
        blocks_B = shuffled_S[slots_B]
        samples_B: NDArray[np.int64] = self._starts_S[blocks_B] + positions_B - (ends_S[slots_B] - self._sizes_S[blocks_B])
        return samples_B

    def _shuffle_blocks(self, epoch: int) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch, its block sequence, and the position at which each block of the sequence ends."""
        num_blocks = len(self._sizes_S)
        shuffled_S = permuted((_BLOCKS, self._seed, epoch), np.arange(num_blocks), num_blocks)
        return epoch, shuffled_S, np.cumsum(self._sizes_S[shuffled_S])


class MixedOrder(Order):
    """The order of several concatenated sets: every batch has `counts` samples of each.

    An epoch is one pass over the first set; its last batch may have fewer of them, unless `drop` skips it. The other sets
    continue where the previous batch ended, and start the next pass when one is over. The slots of a batch are assigned to sets
    at random, so that neighbors are a random pair; each set fills its slots in order.
    """

    def __init__(self, orders: Sequence[Order], counts: Sequence[int], *, seed: int, drop: bool) -> None:
        self._orders, self._counts, self._seed, self.batch = orders, counts, seed, sum(counts)
        self._firsts = np.cumsum([0, *(order.num_samples for order in orders)]).tolist()
        own = orders[0].num_samples
        self._steps = own // counts[0] if drop else math.ceil(own / counts[0])
        self.num_samples = self._steps * self.batch - max(0, self._steps * counts[0] - own)

    def starts(self, epoch: int, step: int) -> list[tuple[Order, int, int]]:
        """Return each set's order, and the pass and the position in it at which a batch begins."""
        found = [(self._orders[0], epoch, step * self._counts[0])]
        for number, (order, count) in enumerate(zip(self._orders[1:], self._counts[1:], strict=True), 1):
            passed, position = divmod((epoch * self._steps + step) * count, order.num_samples)
            found.append((order, (number << 40) + passed, position))  # sets of equal size are shuffled differently
        return found

    def at(self, epoch: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples (B,) at `positions_B` of an epoch, as indices into the concatenated sets."""
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
            samples_R[here] = self._firsts[number] + _at_wrapped(order, passed, position + nth_G[slots_R[here]])
        return samples_R


def _at_wrapped(order: Order, passed: int, positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the samples (B,) at positions that may extend into the passes after `passed`."""
    samples_B, passes_B = np.empty_like(positions_B), positions_B // order.num_samples
    for more in np.unique(passes_B).tolist():
        here = passes_B == more
        samples_B[here] = order.at(passed + more, positions_B[here] - more * order.num_samples)
    return samples_B


def rank_part(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's half-open part of [start, stop), sized as by `np.array_split`: larger parts first, some may be empty."""
    size, larger = divmod(stop - start, world_size)
    begin = start + rank * size + min(rank, larger)
    return begin, begin + size + (rank < larger)
