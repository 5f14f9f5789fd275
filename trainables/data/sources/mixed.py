"""Several sets of training images as one: that of `data.path`, then those of `data.more`.

Shapes: N samples of all sets, R samples of a read, H=W pixels, C=3 channels.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.config.data import MoreDataConfig
from trainables.data.decode import Sample
from trainables.data.interface import Source
from trainables.data.order import MixedOrder, Order, Split
from trainables.errors import DataError, NoLabelsError, first_three
from trainables.notices import notice


class MixedSource(Source):
    """The samples of `sets`, one set behind the other. Each reads, fetches and stores its own, as if it were alone.

    Classes are those of the first set; the labels of the others are theirs by the names of their classes.
    """

    def __init__(self, sets: tuple[Source, ...], paths: tuple[str, ...]) -> None:
        self._sets, self._paths = sets, paths
        self.classes = sets[0].classes
        self.labels_N = np.concatenate([_labels_by_name(each, self.classes) for each in sets])
        self._ends = list(accumulate(map(len, sets)))
        sizes = {each.size for each in sets}
        self.size = sizes.pop() if len(sizes) == 1 else None

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, in which each set does what it does there."""
        return MixedSource, (self._sets, self._paths)

    @property
    def sets(self) -> tuple[Source, ...]:
        return self._sets

    def order(self, data: DataConfig, split: Split, seed: int) -> MixedOrder:
        orders = [each.order(data, split, seed) for each in self._sets]
        return MixedOrder(orders, data.batch_parts, seed=seed, drop=data.last_batch == "drop")

    def name(self, index: int) -> str:
        """The sample's name, with the path of a further set before it."""
        number, own = self._locate(index)
        name = self._sets[number].name(own)
        return f"{self._paths[number]}: {name}" if number else name

    def read(self, index: int) -> Sample:
        number, own = self._locate(index)
        return self._sets[number].read(own)

    def read_batch(self, indices_R: NDArray[np.int64], out_RHWC: NDArray[np.uint8]) -> None:
        for each, rows_R, own_R in self._by_set(indices_R):
            pixels_RHWC = np.empty((len(own_R), *out_RHWC.shape[1:]), dtype=np.uint8)
            each.read_batch(own_R, pixels_RHWC)
            out_RHWC[rows_R] = pixels_RHWC

    def follow(self, order: Order, epoch: int, position: int) -> None:
        assert isinstance(order, MixedOrder)
        for each, start in zip(self._sets, order.starts(epoch, position // order.batch), strict=True):
            each.follow(*start)

    def close(self) -> None:
        for each in self._sets:
            each.close()

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of the set that has a sample, and its index there."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _by_set(self, indices_R: NDArray[np.int64]) -> Iterator[tuple[Source, NDArray[np.bool_], NDArray[np.int64]]]:
        """Each set that has some of these samples: which they are, and their indices there."""
        numbers_R = np.searchsorted(self._ends, indices_R, side="right")
        for number in np.unique(numbers_R).tolist():
            rows_R = numbers_R == number
            yield self._sets[number], rows_R, indices_R[rows_R] - (self._ends[number - 1] if number else 0)


def _labels_by_name(source: Source, classes: Sequence[str]) -> NDArray[np.int64]:
    """The labels of a set (N,) as those of these classes; -1 stays -1."""
    if source.classes == classes:
        return source.labels_N
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([*(numbers.get(name, -1) for name in source.classes), -1], dtype=np.int64)[source.labels_N]


def open_mixed(data: DataConfig, open_set: Callable[[DataConfig], Source]) -> MixedSource:
    """The training images of `data.path` and `data.more`, each opened by `open_set`. Notices say what a batch is made of.

    Raises DataError: one of them cannot be opened, or a set whose labels are to be used has classes that `data.path` has not.
    """
    own, *others = data.sets
    first = open_set(own)
    further = [_open_further(own.path, first.classes, more, each, open_set) for more, each in zip(data.more, others, strict=True)]
    sets, paths, counts = (first, *further), tuple(each.path for each in data.sets), data.batch_parts
    shown = ", ".join(f"{count} of {path}" for count, path in zip(counts, paths, strict=True))
    notice(f"data.more: each global batch of {data.global_batch_size} has {shown}")
    for source, path, count in zip(further, paths[1:], counts[1:], strict=True):
        if (times := len(first) / counts[0] * count / len(source)) > 1:
            notice(f"data.more: {path}: an epoch shows each of its images about {times:.2g} times, augmented alike")
    return MixedSource(sets, paths)


def _open_further(
    own_path: str, classes: Sequence[str], more: MoreDataConfig, data: DataConfig, open_set: Callable[[DataConfig], Source]
) -> Source:
    """A set of `data.more`, with labels where they are used. `data`: the set's; `classes`: those of `own_path`."""
    try:
        if not data.labels:
            return open_set(data)
        try:
            source = open_set(data)
        except NoLabelsError:
            if more.labels:
                raise
            reason = "it has no labels"
        else:
            unknown = sorted({*source.classes} - {*classes})
            if more.labels and unknown:
                raise DataError(
                    f"data.more: {own_path} has no class {first_three(unknown)}, and {more.path} has: write labels: false for "
                    "that, or leave labels out"
                )
            if more.labels:
                return source
            if {*source.classes} == {*classes}:
                notice(f"data.more: {more.path}: its labels are used: its classes are those of {own_path}")
                return source
            source.close()
            reason = f"its classes are not those of {own_path}"
        notice(f"data.more: {more.path}: {reason}: its images are used without labels")
        return open_set(data.model_copy(update={"labels": False}))
    except DataError as error:
        text = str(error).replace("data.path", "data.more").replace("data.labels", "labels")
        raise type(error)(text) from None
