"""What a service remembers of its answers: rows of logits in one block of memory, the oldest overwritten first.

Shapes: N samples of a training split, S slots of the memory, n rows that come or go, K classes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
"""The place of a sample whose answer is neither there nor on its way."""
_SLOT_BYTES = 12
"""Of a slot beside its logits: an int32 for the page, an int64 for the sample."""


@dataclass
class Page:
    """Where the answers of one epoch are: `places_N` holds a slot, UNKNOWN, or what is below it: a note of the service's own."""

    number: int
    places_N: NDArray[np.int64]
    in_use: int = 0
    """Samples that are not UNKNOWN; where there is none, the page may go."""


class Memory:
    """Answers by page and sample. Not for several threads at once: the service has a lock.

    All is as large as it may become, and takes memory from the system only as it fills.
    """

    def __init__(self, num_bytes: int, num_samples: int, num_classes: int, dtype: np.dtype[Any]) -> None:
        """`num_bytes` at most for logits and what they belong to; 8 bytes a sample and page come on top."""
        num_slots = max(1, num_bytes // (num_classes * dtype.itemsize + _SLOT_BYTES))
        self._rows_SK = np.empty((num_slots, num_classes), dtype)
        self._pages_S = np.zeros(num_slots, dtype=np.int32)
        """The page's number; 0 where the slot is free."""
        self._samples_S = np.zeros(num_slots, dtype=np.int64)
        self._next, self._num_samples = 0, num_samples
        self._by_name: dict[Hashable, Page] = {}
        self._by_number: dict[int, tuple[Hashable, Page]] = {}
        self._opened = 1

    def page(self, name: Hashable) -> Page:
        """The page of that name."""
        if name not in self._by_name:
            page = Page(self._opened, np.full(self._num_samples, UNKNOWN, dtype=np.int64))
            self._opened += 1
            self._by_name[name], self._by_number[page.number] = page, (name, page)
        return self._by_name[name]

    def promise(self, page: Page, samples_n: NDArray[np.int64], note: int) -> None:
        """Samples, unknown or promised before, are on their way; `note`, below UNKNOWN, says by what."""
        page.in_use += int((page.places_N[samples_n] == UNKNOWN).sum())
        page.places_N[samples_n] = note

    def forget(self, page: Page, samples_n: NDArray[np.int64]) -> None:
        """These are unknown again."""
        page.places_N[samples_n] = UNKNOWN
        page.in_use -= len(samples_n)
        if not page.in_use and page.number in self._by_number:
            name, _ = self._by_number.pop(page.number)
            del self._by_name[name]

    def read(self, slots_n: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of these slots, copied."""
        rows_nK: NDArray[Any] = self._rows_SK[slots_n]
        return rows_nK

    def write(self, page: Page, samples_n: NDArray[np.int64], logits_nK: NDArray[Any]) -> None:
        """Keep the answers that were promised, in place of the oldest. Of more than there are slots the first are forgotten."""
        num_slots = len(self._pages_S)
        if len(samples_n) > num_slots:
            self.forget(page, samples_n[:-num_slots])
            samples_n, logits_nK = samples_n[-num_slots:], logits_nK[-num_slots:]
        slots_n = (self._next + np.arange(len(samples_n))) % num_slots
        self._next = (self._next + len(samples_n)) % num_slots
        self._vacate(slots_n)
        self._rows_SK[slots_n] = logits_nK
        self._pages_S[slots_n], self._samples_S[slots_n] = page.number, samples_n
        page.places_N[samples_n] = slots_n

    def _vacate(self, slots_n: NDArray[np.int64]) -> None:
        pages_n = self._pages_S[slots_n]
        for number in np.unique(pages_n[pages_n > 0]).tolist():
            self.forget(self._by_number[number][1], self._samples_S[slots_n[pages_n == number]])
        self._pages_S[slots_n] = 0
