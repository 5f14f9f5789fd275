import contextlib
import errno
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.trainables.data.loader.loader_processes import loader_processes
from tests.trainables.data.loader.numbered_sources import BusySource, FailingSource, NumberedSource, SlowSource, TwinsSource
from tests.trainables.data.photos import MakeFolder
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.augment import AUGMENTS
from trainables.data.interface import Source
from trainables.data.loader.loader import Batch, Loader
from trainables.data.order import REPEAT, Split, sample_at
from trainables.data.source import open_source
from trainables.data.sources.memory import open_synthetic
from trainables.device.device_batches import on_device
from trainables.device.tensor_format import to_pixels
from trainables.errors import DataError

WORLD_SIZES = (1, 2, 3, 5, 8)
CPU, PAGE_BYTES = torch.device("cpu"), mmap.ALLOCATIONGRANULARITY
PROCESS = pytest.param("process", marks=pytest.mark.processes)
in_both = pytest.mark.parametrize("where", ["threads", PROCESS])
"""Threads of the training process, or of a loader process: `data.loader`."""
with_workers = pytest.mark.parametrize(
    ("workers", "where"), [(0, "threads"), (2, "threads"), pytest.param(2, "process", marks=pytest.mark.processes)]
)


def _loader(source: Source, data: DataConfig, split: Split = "train", rank: int = 0, world: int = 1, workers: int = 0) -> Loader:
    return Loader(source, data, split=split, seed=11, rank=rank, world_size=world, loader_workers=workers)


def _order(epoch: int, num_samples: int) -> list[int]:
    """The training order that a loader of `_loader` follows."""
    return sample_at(11, epoch, np.arange(num_samples), num_samples).tolist()


def _ranks(
    source: Source, data: DataConfig, world: int, split: Split = "train", epoch: int = 0, start: int = 0
) -> list[list[Batch]]:
    """Each rank's batches of an epoch."""
    return [list(_loader(source, data, split, rank, world).epoch(epoch, start)) for rank in range(world)]


def _global_order(ranks: list[list[Batch]]) -> list[list[int]]:
    """The samples of each global batch in order: the ranks' parts one after the other."""
    return [[index for batch in step for index in batch.indices_B.tolist()] for step in zip(*ranks, strict=True)]


def _tiny(num_samples: int) -> Source:
    return open_synthetic("train", num_samples, 3, 2)


def _data(batch: int, **changes: object) -> DataConfig:
    return DataConfig(image_size=2, global_batch_size=batch).model_copy(update=changes)


def _loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.fixture(autouse=True)
def _no_thread_outlives_a_test() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while (_loader_threads() or loader_processes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _loader_threads()
    assert not loader_processes()


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("num_samples", [1, 2, 7, 8, 17])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_validation_reads_every_sample_once_for_any_world_size_and_length(world: int, num_samples: int, batch: int) -> None:
    ranks = _ranks(_tiny(num_samples), _data(batch), world, "val")
    assert [index for step in _global_order(ranks) for index in step] == list(range(num_samples))
    assert {len(batches) for batches in ranks} == {-(-num_samples // batch)}
    assert ranks[0][-1].position == num_samples


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_training_reads_every_sample_once_in_an_order_that_no_world_size_changes(world: int) -> None:
    source, data = _tiny(45), _data(8, last_batch="short")
    order = _order(3, 45)
    ranks = _ranks(source, data, world, epoch=3)
    assert _global_order(ranks) == [order[begin : begin + 8] for begin in range(0, 45, 8)]
    for step in zip(*ranks, strict=True):
        total = sum(len(batch.labels_B) for batch in step)
        assert [len(batch.labels_B) for batch in step] == [len(part) for part in np.array_split(np.arange(total), world)]
        assert len({batch.position for batch in step}) == 1


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("start", [0, 16])
def test_repeats_are_cropped_differently_alike_on_any_number_of_workers_and_from_the_middle_of_an_epoch(
    world: int, start: int
) -> None:
    source = open_synthetic("train", 45, 3, 8)
    data = DataConfig(image_size=8, global_batch_size=8, augment="pad_crop_flip", repeats=3, last_batch="short")

    def shown(ranks: list[list[Batch]]) -> dict[int, Any]:
        return {
            view: pixels.tolist()
            for batches in ranks
            for batch in batches
            for view, pixels in zip(batch.views_B.tolist(), batch.images_BCHW, strict=True)
        }

    loader = _loader(source, data)
    assert (loader.steps_per_epoch, loader.samples_per_epoch) == (6, 45)
    whole = shown([list(loader.epoch(3))])
    assert {view % REPEAT for view in whole} == {*_order(3, 45)[:15]}
    once = shown([list(_loader(source, data.model_copy(update={"repeats": 1})).epoch(3))])
    assert all(whole[view] == once[view] for view in whole if view < REPEAT)
    assert sum(whole[view] == once[view % REPEAT] for view in whole if view >= REPEAT) < 3  # of 30, drawn alike by chance
    later = shown(_ranks(source, data, world, epoch=3, start=start))
    assert len(later) == 45 - start
    assert all(whole[view] == pixels for view, pixels in later.items())


def test_an_unreadable_image_that_repeats_counts_once() -> None:
    loader = _loader(TwinsSource(6), _data(6, repeats=3, max_bad=0.2, last_batch="short"))
    epoch = next(epoch for epoch in range(9) if 0 in (order := _order(epoch, 6)[:2]) and 1 not in order)
    assert [len(batch.labels_B) for batch in loader.epoch(epoch)] == [3]
    assert loader.skipped == {0: "0.jpg (not an image)"}


def test_batches_have_the_shapes_and_types_of_the_contract_even_when_empty() -> None:
    for batches in _ranks(_tiny(3), _data(2), 5, "val"):
        for batch in batches:
            size = len(batch.labels_B)
            assert (batch.images_BCHW.dtype, batch.images_BCHW.shape) == (torch.uint8, (size, 3, 2, 2))
            assert batch.images_BCHW.is_contiguous(memory_format=torch.channels_last)
            assert (batch.labels_B.dtype, batch.indices_B.dtype, batch.indices_B.shape) == (torch.int64, torch.int64, (size,))
            assert batch.labels_B.tolist() == [index % 3 for index in batch.indices_B.tolist()]


def test_drop_leaves_out_the_incomplete_last_batch_of_training_alone() -> None:
    source = _tiny(45)
    train, val = _loader(source, _data(8)), _loader(source, _data(8), "val")
    assert (train.steps_per_epoch, train.samples_per_epoch) == (5, 40)
    assert (val.steps_per_epoch, val.samples_per_epoch) == (6, 45)
    assert [batch.position for batch in train.epoch(0)] == [8, 16, 24, 32, 40]
    short = _loader(source, _data(8, last_batch="short"))
    assert (short.steps_per_epoch, short.samples_per_epoch) == (6, 45)
    assert [len(batch.labels_B) for batch in short.epoch(0)] == [8, 8, 8, 8, 8, 5]


def test_a_batch_larger_than_the_data_says_what_to_write() -> None:
    with pytest.raises(DataError, match=r"global_batch_size: 46 is more than the 45 .* at most 45, or data.last_batch=short"):
        _loader(_tiny(45), _data(46))
    assert _loader(_tiny(45), _data(46), "val").steps_per_epoch == 1
    assert _loader(_tiny(45), _data(46, last_batch="short")).steps_per_epoch == 1


def test_a_resize_below_the_crop_is_refused() -> None:
    with pytest.raises(DataError, match=r"val_resize 7 is below data\.image_size 8"):
        _loader(_tiny(45), DataConfig(image_size=8, val_resize=7, global_batch_size=4))


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("last_batch", ["drop", "short"])
def test_resuming_at_any_position_on_any_world_size_gives_the_rest(world: int, last_batch: str) -> None:
    source, data = _tiny(45), _data(8, last_batch=last_batch)
    whole = _ranks(source, data, 2, epoch=1)
    order, positions = _global_order(whole), [batch.position for batch in whole[0]]
    for step, position in enumerate(positions):
        rest = _ranks(source, data, world, epoch=1, start=position)
        assert _global_order(rest) == order[step + 1 :]
        assert [batch.position for batch in rest[0]] == positions[step + 1 :]


def test_resuming_with_another_batch_size_neither_repeats_nor_loses_a_sample() -> None:
    source = _tiny(45)
    before = [batch.indices_B.tolist() for batch in _loader(source, _data(8)).epoch(0)][:2]
    after = [batch.indices_B.tolist() for batch in _loader(source, _data(5, last_batch="short")).epoch(0, start=16)]
    assert [index for batch in before + after for index in batch] == _order(0, 45)


@pytest.mark.processes
@pytest.mark.parametrize("augment", AUGMENTS)
def test_pixels_do_not_depend_on_threads_or_world_size_or_resuming(make_folder: MakeFolder, augment: str) -> None:
    root = make_folder(train={"a": 9, "b": 8}, val={"a": 1})
    data = _data(6, path=str(root), image_size=16, augment=augment, last_batch="short")
    source = open_source(data, "train")

    def pixels(world: int, workers: int, epoch: int = 2, start: int = 0, where: str = "threads") -> dict[int, bytes]:
        found = {}
        for rank in range(world):
            loader = _loader(source, data.model_copy(update={"loader": where}), "train", rank, world, workers)
            for batch in loader.epoch(epoch, start):
                for index, image in zip(batch.indices_B.tolist(), batch.images_BCHW, strict=True):
                    found[index] = image.numpy().tobytes()
            loader.close()
        return found

    expected = pixels(1, 0)
    assert len(expected) == 17
    for world, workers in ((1, 1), (1, 3), (2, 0), (3, 2)):
        assert pixels(world, workers) == expected
    resumed = pixels(2, 2, start=6)
    assert len(resumed) == 11
    assert resumed.items() <= expected.items()
    assert (pixels(1, 0, epoch=3) == expected) == (augment == "none")
    assert pixels(1, 2, where="process") == expected


@pytest.mark.parametrize(
    ("workers", "where"),
    [(0, "threads"), (1, "threads"), (3, "threads"), pytest.param(3, "process", marks=pytest.mark.processes)],
)
def test_batches_come_in_order_for_any_number_of_threads(workers: int, where: str) -> None:
    source, data = SlowSource(40), _data(6, last_batch="short", prefetch_batches=3, loader=where)
    loader = _loader(source, data, "train", workers=workers)
    assert [index for batch in loader.epoch(0) for index in batch.indices_B.tolist()] == _order(0, 40)
    assert source.num_reads == 40
    loader.close()


@in_both
def test_stored_pixels_and_read_pixels_are_the_same(where: Any) -> None:
    data = DataConfig(path="digits", global_batch_size=50, loader=where)
    source = open_source(data, "val")
    loader = _loader(source, data, "val", workers=2)
    for batch in loader.epoch(0):
        for index, image in zip(batch.indices_B.tolist(), batch.images_BCHW, strict=True):
            assert (image.numpy() == np.asarray(source.read(index)).transpose(2, 0, 1)).all()
    loader.close()


def test_digits_are_resized_where_the_models_see_another_size() -> None:
    data = DataConfig(path="digits", global_batch_size=355, image_size=16)
    (batch,) = _loader(open_source(data, "val"), data, "val").epoch(0)
    assert batch.images_BCHW.shape == (355, 3, 16, 16)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:400])


@with_workers
def test_an_unreadable_image_in_the_middle_is_left_out_named_and_counted(
    make_folder: MakeFolder, workers: int, where: Any
) -> None:
    root = make_folder(train={"a": 5, "b": 5}, val={"a": 3, "b": 4})
    data = DataConfig(path=str(root), image_size=16, global_batch_size=4, max_bad=0.3, loader=where)
    source = open_source(data, "val")
    whole = list(_loader(source, data, "val").epoch(0))
    _truncate(root / "val" / "a" / "001.jpg")
    (root / "val" / "b" / "003.jpg").write_text("<html>")
    loader = _loader(source, data, "val", workers=workers)
    for epoch in (0, 1):
        batches = list(loader.epoch(epoch))
        assert [batch.indices_B.tolist() for batch in batches] == [[0, 2, 3], [4, 5]]
        assert [batch.labels_B.tolist() for batch in batches] == [[0, 0, 1], [1, 1]]
        assert [batch.position for batch in batches] == [4, 7]
        assert (batches[0].images_BCHW == whole[0].images_BCHW[[0, 2, 3]]).all()
        assert (batches[1].images_BCHW == whole[1].images_BCHW[:2]).all()
        assert list(loader.skipped) == [1, 6]
        assert re.match(r"val/a/001.jpg \(.*truncated.*\)$", loader.skipped[1])
        assert loader.skipped[6] == "val/b/003.jpg (not an image)"
    loader.close()


def test_a_batch_of_nothing_but_unreadable_images_is_empty(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 2}, val={"a": 8})
    for number in range(2):
        _truncate(root / "val" / "a" / f"{number:03}.jpg")
    data = DataConfig(path=str(root), image_size=16, global_batch_size=2, max_bad=0.25)
    first, second, *_ = list(_loader(open_source(data, "val"), data, "val").epoch(0))
    assert first.images_BCHW.shape == (0, 3, 16, 16)
    assert first.labels_B.tolist() == first.indices_B.tolist() == []
    assert second.indices_B.tolist() == [2, 3]


@with_workers
def test_more_unreadable_images_than_the_share_are_an_error_that_names_the_first(
    make_folder: MakeFolder, workers: int, where: Any
) -> None:
    root = make_folder(train={"a": 20}, val={"a": 8})
    for number in range(4):
        _truncate(root / "val" / "a" / f"{number:03}.jpg")
    data = DataConfig(path=str(root), image_size=16, global_batch_size=4, max_bad=0.5, loader=where)
    loader = _loader(open_source(data, "val"), data, "val", workers=workers)
    assert sum(len(batch.labels_B) for batch in loader.epoch(0)) == 4
    loader.close()
    strict = data.model_copy(update={"max_bad": 0.49})
    loader = _loader(open_source(strict, "val"), strict, "val", workers=workers)
    with pytest.raises(
        DataError, match=r"4 unreadable .* more than the 3 of 8 that data.max_bad=0.49 .* val/a/000.jpg \("
    ) as caught:
        list(loader.epoch(0))
    assert "\n" not in str(caught.value)
    loader.close()


def test_unreadable_images_of_one_name_are_counted_each() -> None:
    loader = _loader(TwinsSource(10), _data(5, max_bad=0.2), "val")
    assert [len(batch.labels_B) for batch in loader.epoch(0)] == [3, 5]
    assert loader.skipped == {0: "0.jpg (not an image)", 1: "0.jpg (not an image)"}
    with pytest.raises(DataError, match="2 unreadable images in one epoch, more than the 1 of 10"):
        list(_loader(TwinsSource(10), _data(5, max_bad=0.1), "val").epoch(0))


@pytest.mark.parametrize(
    ("max_bad", "num_samples", "allowed"),
    [(0.001, 8, 1), (0.001, 1999, 1), (0.001, 2000, 2), (0.001, 1_281_167, 1281), (0.29, 100, 29), (0, 10**6, 0)],
)
def test_a_small_split_may_have_one_unreadable_image_unless_none_is_allowed(
    max_bad: float, num_samples: int, allowed: int
) -> None:
    assert _loader(_tiny(num_samples), _data(1, max_bad=max_bad)).max_bad == allowed


@with_workers
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            OSError(errno.EIO, os.strerror(errno.EIO)),
            DataError,
            r"data\.path: 13 cannot be read: Input/output error; fix its disk",
        ),
        (DataError("shard 3 was replaced"), DataError, "^shard 3 was replaced$"),
        (ZeroDivisionError("a bug in a source"), RuntimeError, "reading 13: ZeroDivisionError: a bug in a source"),
        (MemoryError("no room"), MemoryError, "^no room$"),
    ],
)
def test_what_a_thread_dies_of_reaches_the_consumer_at_once(
    workers: int, where: str, error: Exception, kind: type[Exception], message: str
) -> None:
    source = FailingSource(error)
    loader = _loader(source, _data(8, loader=where), "val", workers=workers)
    with pytest.raises(kind, match=message) as caught:
        list(loader.epoch(0))
    assert "\n" not in str(caught.value)
    assert source.num_reads < 60
    loader.close()


@in_both
def test_a_thread_that_ends_itself_is_an_error_and_not_the_end_of_the_training_process(where: str) -> None:
    loader = _loader(FailingSource(SystemExit(0)), _data(8, loader=where), "val", workers=2)
    with pytest.raises(RuntimeError, match="a loader thread died of SystemExit: 0"):
        list(loader.epoch(0))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_fails_under_a_folder_of_files_ends_the_epoch(
    make_folder: MakeFolder, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(train={"a": 12}, val={"a": 1})

    def fail(handle: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    data = DataConfig(path=str(root), image_size=16, global_batch_size=4)
    loader = _loader(open_source(data, "train"), data, workers=workers)
    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(DataError, match=r"train/a/\d+.jpg cannot be read: Input/output error; fix its disk"):
        list(loader.epoch(0))
    monkeypatch.undo()
    loader.close()


@pytest.mark.parametrize(
    ("workers", "prefetch", "where"),
    [(0, 3, "threads"), (2, 0, "threads"), (2, 3, "threads"), pytest.param(2, 3, "process", marks=pytest.mark.processes)],
)
def test_a_batch_holds_until_the_one_after_the_next_is_requested(workers: int, prefetch: int, where: str) -> None:
    loader = _loader(NumberedSource(600), _data(10, prefetch_batches=prefetch, loader=where), workers=workers)
    before = None
    for step, batch in enumerate(loader.epoch(0)):
        time.sleep(0.01 if step < 10 else 0)  # the threads read on meanwhile, as far as they may
        for one_batch, number in ((before, step - 1), (batch, step)):
            if one_batch is not None:
                assert (
                    one_batch.indices_B.tolist() == one_batch.labels_B.tolist() == _order(0, 600)[10 * number : 10 * number + 10]
                )
                assert (one_batch.images_BCHW == (one_batch.indices_B % 251)[:, None, None, None]).all()
        before = batch
    loader.close()


@pytest.mark.parametrize(
    ("workers", "prefetch", "where"),
    [(0, 3, "threads"), (2, 0, "threads"), (2, 3, "threads"), pytest.param(2, 3, "process", marks=pytest.mark.processes)],
)
def test_a_batch_stays_as_it_is_while_anything_refers_to_one_of_its_tensors(workers: int, prefetch: int, where: str) -> None:
    loader = _loader(NumberedSource(600), _data(10, prefetch_batches=prefetch, loader=where), workers=workers)
    images = [batch.images_BCHW[-1].numpy() for batch in loader.epoch(0)]  # a view of a part, as an array
    for step, image_CHW in enumerate(images):
        assert (image_CHW == _order(0, 600)[10 * step + 9] % 251).all()
    batches = list(loader.epoch(0))
    assert [index for batch in batches for index in batch.indices_B.tolist()] == _order(0, 600)
    assert all((batch.images_BCHW == (batch.labels_B % 251)[:, None, None, None]).all() for batch in batches)
    loader.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_share_no_memory_with_a_batch(dtype: torch.dtype) -> None:
    (batch,) = _loader(_tiny(8), _data(8)).epoch(0)
    images_BCHW = to_pixels(batch.images_BCHW, dtype, torch.channels_last)
    before = images_BCHW.clone()
    batch.images_BCHW.zero_()
    assert torch.equal(images_BCHW, before)


@pytest.mark.parametrize("where", ["threads", pytest.param("process", marks=pytest.mark.slow)])
def test_thousands_of_batches_take_the_memory_of_a_few(where: Any) -> None:
    source = open_synthetic("train", 2 * 5000, 3, 128)
    data = DataConfig(image_size=128, global_batch_size=2, prefetch_batches=3, loader=where)
    loader = _loader(source, data, workers=2)
    images_mib = 2 * 128 * 128 * 3 / 2**20
    assert 5 * images_mib < loader.batches_mib < 5 * images_mib * 1.05  # whole pages
    locations, process, before = set(), psutil.Process(), 0
    for step, batch in enumerate(loader.epoch(0)):
        locations.add((batch.images_BCHW.data_ptr(), batch.labels_B.data_ptr(), batch.views_B.data_ptr()))
        before = process.memory_info().rss if step == 500 else before
    assert step == 4999
    assert len(locations) == 5
    assert process.memory_info().rss - before < 2 * 2**20  # one batch kept in a hundred would be 4.2 MiB
    loader.close()


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_a_ranks_buffers_are_as_large_as_its_share(world: int) -> None:
    data = DataConfig(image_size=16, global_batch_size=64, prefetch_batches=2)
    loader = _loader(open_synthetic("train", 640, 3, 16), data, world=world, workers=1)
    num_bytes = -(-64 // world) * (16 * 16 * 3 + 16)
    assert loader.batches_mib * 2**20 == 4 * -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    loader.close()


@in_both
def test_all_epochs_read_into_the_same_memory(where: Any) -> None:
    data = DataConfig(image_size=16, global_batch_size=32, loader=where)
    loader = _loader(open_synthetic("train", 320, 3, 16), data, workers=1)
    locations = [{batch.images_BCHW.data_ptr() for batch in loader.epoch(epoch)} for epoch in range(3)]
    assert len(set.union(*locations)) == len(locations[0]) == 4
    first_of_closed = {next(loader.epoch(epoch)).images_BCHW.data_ptr() for epoch in range(20)}
    assert first_of_closed <= locations[0]  # what a closed epoch had read ahead is free again
    loader.close()


@in_both
def test_an_iterator_that_is_closed_early_leaves_no_thread_working(where: str) -> None:
    source = SlowSource(4000)
    loader = _loader(source, _data(400, loader=where), workers=2)
    batches = loader.epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    reads = source.num_reads
    time.sleep(0.05)
    assert source.num_reads == reads < 800
    assert len(list(loader.epoch(1, start=3600))) == 1
    loader.close()
    assert not _loader_threads()


@in_both
def test_threads_work_no_further_ahead_than_configured(where: str) -> None:
    source = SlowSource(200)
    loader = _loader(source, _data(10, prefetch_batches=2, loader=where), workers=2)
    batches = loader.epoch(0)
    for reads_allowed in (30, 40, 50):
        next(batches)
        wait_until(lambda reads_allowed=reads_allowed: source.num_reads >= reads_allowed)  # type: ignore[misc]
        time.sleep(0.05)
        assert source.num_reads == reads_allowed
    loader.close()


@in_both
def test_closing_a_loader_in_the_middle_of_an_epoch_does_not_hang(where: str) -> None:
    source = SlowSource(4000)
    loader = _loader(source, _data(400, prefetch_batches=4, loader=where), workers=2)
    batches = loader.epoch(0)
    next(batches)
    loader.close()
    batches.close()  # type: ignore[attr-defined]
    loader.close()
    assert source.num_reads < 5 * 400
    assert not _loader_threads()


@in_both
def test_a_new_epoch_ends_the_one_before(where: str) -> None:
    source = SlowSource(2000)
    loader = _loader(source, _data(200, prefetch_batches=8, loader=where), workers=2)
    old = loader.epoch(0)
    next(old)
    new = loader.epoch(1)
    with pytest.raises(CancelledError):
        list(old)
    assert [index for batch in new for index in batch.indices_B.tolist()] == _order(1, 2000)
    assert source.num_reads < 2000 + 9 * 200  # which the old one had set to work
    loader.close()


_INTERRUPTED = """
import atexit, signal, sys, threading
from tests.trainables.data.loader.numbered_sources import SlowSource
from tests.trainables.data.loader.test_loader import _data, _loader
from tests.waiting import wait_until
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started the tests in the background ignores it
source = SlowSource(100_000)
atexit.register(lambda: print(source.num_reads))  # runs once all threads are joined
def report_start():
    wait_until(lambda: source.num_reads > 100)  # the consumer has set all to work, and waits
    print("ready", flush=True)
threading.Thread(target=report_start, daemon=True).start()
for batch in _loader(source, _data(2000, prefetch_batches=8, loader=sys.argv[1]), workers=2).epoch(0):
    pass
"""


@pytest.mark.processes
@pytest.mark.parametrize("where", ["threads", "process"])
def test_ctrl_c_ends_a_waiting_consumer_and_leaves_what_was_set_to_work_unread(where: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[4]), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, where],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=100)
    finally:
        child.kill()
        child.wait()
    assert errors.strip().endswith("KeyboardInterrupt")
    assert int(output) < 2000


def _gpu_loader(source: Source, data: DataConfig, split: Split = "train", workers: int = 2) -> Loader:
    device = torch.device("cuda")
    return Loader(source, data, split=split, seed=11, rank=0, world_size=1, loader_workers=workers, device=device)


@pytest.mark.gpu
@in_both
def test_pinned_batches_stay_pinned_when_an_image_is_left_out(make_folder: MakeFolder, where: Any) -> None:
    root = make_folder(train={"a": 2}, val={"a": 4})
    _truncate(root / "val" / "a" / "001.jpg")
    data = DataConfig(path=str(root), image_size=16, global_batch_size=4, loader=where)
    loader = _gpu_loader(open_source(data, "val"), data, "val")
    (batch,) = loader.epoch(0)
    assert batch.images_BCHW.is_pinned()
    assert batch.labels_B.is_pinned()
    assert batch.views_B.is_pinned()
    assert batch.indices_B.tolist() == [0, 2, 3]
    loader.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("workers", "prefetch", "where"),
    [(0, 2, "threads"), (2, 0, "threads"), (2, 2, "threads"), (2, 0, "process"), (2, 2, "process")],
)
def test_a_batch_is_not_written_over_while_a_gpu_fetches_it(workers: int, prefetch: int, where: str) -> None:
    device = torch.device("cuda")
    loader = _gpu_loader(NumberedSource(4000), _data(20, prefetch_batches=prefetch, loader=where), workers=workers)
    fetched = []
    for batch in on_device(loader.epoch(0), device):
        torch.cuda._sleep(2_000_000)  # a slow step: the copy after the next stands in a queue behind it
        batch.wait()
        fetched.append((batch.images_BCHW.clone(), batch.indices_B.clone()))
    for images_BCHW, indices_B in fetched:
        assert (images_BCHW == (indices_B % 251)[:, None, None, None]).all()
    assert [index for _, indices_B in fetched for index in indices_B.tolist()] == _order(0, 4000)
    loader.close()


@in_both
def test_the_loader_reports_what_an_image_costs_a_thread_and_how_much_of_it_is_waiting_for_the_source(where: str) -> None:
    loader = _loader(SlowSource(32), _data(8, loader=where), workers=2)
    list(loader.epoch(0))
    loader.costs.clear()  # the first batch waits for the start of a process
    assert loader.costs.summary() == {}
    list(loader.epoch(1))
    costs = loader.costs.summary()
    assert costs["loader/read_ms"] >= 2
    assert costs["loader/read_ms"] <= costs["loader/image_ms"]
    assert costs["loader/cpu_ms"] < costs["loader/read_ms"]  # it sleeps
    assert 1.9 < costs["loader/read_wait_ms"] <= costs["loader/read_ms"]  # a sleep is never shorter, however busy the machine
    assert costs["loader/threads"] == 2
    assert costs["loader/batch_ms"] == pytest.approx(8 * costs["loader/image_ms"] / 2)
    assert 0 < costs["loader/wait_ms"] < 2 * costs["loader/batch_ms"]  # nobody computes meanwhile: each batch is waited for
    loader.close()


@in_both
def test_time_inside_the_source_that_is_computing_or_waiting_for_a_core_is_no_wait_for_the_source(where: str) -> None:
    shares = []
    with contextlib.closing(_loader(BusySource(32), _data(8, loader=where), workers=8)) as loader:  # more threads than cores
        for epoch in range(20):  # of which one at least should be free of what other tenants of the machine take
            list(loader.epoch(epoch))
            costs = loader.costs.summary()
            blocked_ms = costs["loader/image_ms"] - costs["loader/cpu_ms"] - costs["loader/core_wait_ms"]
            shares.append(min(costs["loader/read_wait_ms"], blocked_ms) / costs["loader/read_ms"])
            loader.costs.clear()
            if shares[-1] < 0.5:
                break
    assert min(shares) < 0.5
