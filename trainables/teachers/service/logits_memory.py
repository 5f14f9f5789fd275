"""The logits that a teacher service has in memory: rows of one block, the oldest overwritten first.

Shapes: N samples of a training split, S slots of the block, n rows that are written or read, K classes.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING = -1
"""The slot of a sample whose logits are neither in memory nor reserved."""
_INDEX_BYTES = 12
"""Of a slot besides its logits: an int32 for the epoch index, an int64 for the sample."""


@dataclass
class EpochIndex:
    """Where the logits of one epoch are: `slots_N` has a slot, MISSING, or below that the token of a reservation."""

    number: int
    slots_N: NDArray[np.int64]
    num_used: int = 0
    """Samples that are not MISSING; an index without any is dropped."""


class LogitsMemory:
    """Logits by epoch and sample. Not thread-safe: the service has a lock.

    The block is allocated whole, and takes memory from the system only as it fills.
    """

    def __init__(self, num_bytes: int, num_samples: int, num_classes: int, dtype: np.dtype[Any]) -> None:
        """`num_bytes`: the limit for logits and their slots; the epoch indices take 8 bytes a sample and epoch on top."""
        num_slots = max(1, num_bytes // (num_classes * dtype.itemsize + _INDEX_BYTES))
        self._logits_SK = np.empty((num_slots, num_classes), dtype)
        self._epochs_S = np.zeros(num_slots, dtype=np.int32)
        """The number of the epoch index; 0 where the slot is free."""
        self._samples_S = np.zeros(num_slots, dtype=np.int64)
        self._next_slot, self._num_samples = 0, num_samples
        self._by_name: dict[Hashable, EpochIndex] = {}
        self._by_number: dict[int, tuple[Hashable, EpochIndex]] = {}
        self._next_number = 1

    def epoch_index(self, name: Hashable) -> EpochIndex:
        """The index of that name; a new one where there is none."""
        if name not in self._by_name:
            index = EpochIndex(self._next_number, np.full(self._num_samples, MISSING, dtype=np.int64))
            self._next_number += 1
            self._by_name[name], self._by_number[index.number] = index, (name, index)
        return self._by_name[name]

    def reserve(self, index: EpochIndex, samples_n: NDArray[np.int64], token: int) -> None:
        """Mark samples, missing or reserved before, as expected; `token`, below MISSING, identifies by what."""
        index.num_used += int((index.slots_N[samples_n] == MISSING).sum())
        index.slots_N[samples_n] = token

    def release(self, index: EpochIndex, samples_n: NDArray[np.int64]) -> None:
        """Mark samples as missing."""
        index.slots_N[samples_n] = MISSING
        index.num_used -= len(samples_n)
        if not index.num_used and index.number in self._by_number:
            name, _ = self._by_number.pop(index.number)
            del self._by_name[name]

    def read(self, slots_n: NDArray[np.int64]) -> NDArray[Any]:
        """A copy: callers may keep it while slots are overwritten."""
        logits_nK: NDArray[Any] = self._logits_SK[slots_n]
        return logits_nK

    def write(self, index: EpochIndex, samples_n: NDArray[np.int64], logits_nK: NDArray[Any]) -> None:
        """Store the logits of reserved samples in place of the oldest; where there are more than slots, the first are dropped."""
        num_slots = len(self._epochs_S)
        if len(samples_n) > num_slots:
            self.release(index, samples_n[:-num_slots])
            samples_n, logits_nK = samples_n[-num_slots:], logits_nK[-num_slots:]
        slots_n = (self._next_slot + np.arange(len(samples_n))) % num_slots
        self._next_slot = (self._next_slot + len(samples_n)) % num_slots
        self._evict(slots_n)
        self._logits_SK[slots_n] = logits_nK
        self._epochs_S[slots_n], self._samples_S[slots_n] = index.number, samples_n
        index.slots_N[samples_n] = slots_n

    def _evict(self, slots_n: NDArray[np.int64]) -> None:
        epochs_n = self._epochs_S[slots_n]
        for number in np.unique(epochs_n[epochs_n > 0]).tolist():
            _, index = self._by_number[number]
            self.release(index, self._samples_S[slots_n[epochs_n == number]])
        self._epochs_S[slots_n] = 0
