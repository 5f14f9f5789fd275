"""Which shards an order needs next, found a stretch of positions at a time.

Shapes: B positions, S shards of the split.
"""

import copy
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainables.data.index import File
from trainables.data.order import Order

_STRETCH = 4096  # positions: their samples are found in milliseconds, and a shard holds about as many


class _Stretch(NamedTuple):
    epoch: int
    begin: int  # positions
    end: int
    shards: tuple[int, ...]  # in the order of their first use


class NextShards:
    """The shards that are needed from a position on, in the order of their first use. Callers lock."""

    def __init__(self, shards: Sequence[File], *, repeats: bool) -> None:
        """`repeats`: an epoch follows on another at once, as in training; validation comes again a while later."""
        self._repeats = repeats
        self._bytes_S = [shard.bytes for shard in shards]
        self._num_read = sum(shard.rows > 0 for shard in shards)
        self._ends_S = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
        self._order: Order | None = None
        self._followed: Order | None = None
        self._stretches: deque[_Stretch] = deque()
        self._at = (0, 0)  # where the next stretch begins

    def advance(self, order: Order, epoch: int, position: int) -> None:
        """What comes before this position is needed no more."""
        while self._stretches and (self._stretches[0].epoch, self._stretches[0].end) <= (epoch, position):
            self._stretches.popleft()
        known = self._stretches and (self._stretches[0].epoch, self._stretches[0].begin) <= (epoch, position)
        if order is not self._followed or not known:
            self._followed, self._order = order, copy.copy(order)  # an order remembers its last epoch: this one goes ahead of it
            self._stretches.clear()
            self._at = (epoch, position)

    def upcoming(self, max_bytes: int) -> list[int]:
        """The shards needed next: those of the present stretch, and of later ones up to about `max_bytes` in all.

        No more than one whole epoch is looked at, which may lie across the end of the present one.
        """
        found = dict.fromkeys(shard for stretch in self._stretches for shard in stretch.shards)
        while (
            self._order
            and self._is_more()
            and len(found) < self._num_read
            and sum(self._bytes_S[shard] for shard in found) < max_bytes
        ):
            self._extend(self._order)
            found |= dict.fromkeys(self._stretches[-1].shards)
        return list(found)

    def _is_more(self) -> bool:
        if not self._stretches:
            return True
        first = self._stretches[0]
        return self._at < (first.epoch + 1, first.begin if self._repeats else 0)

    def _extend(self, order: Order) -> None:
        epoch, begin = self._at
        end = min(begin + _STRETCH, order.num_samples)
        shards_B = np.searchsorted(self._ends_S, order.at(epoch, np.arange(begin, end)), side="right")
        shards, first_use = np.unique(shards_B, return_index=True)
        self._stretches.append(_Stretch(epoch, begin, end, tuple(shards[np.argsort(first_use)].tolist())))
        self._at = (epoch, end) if end < order.num_samples else (epoch + 1, 0)
