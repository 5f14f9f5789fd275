"""Blocks on disk: found by index, equal where they overlap, left out where they are damaged."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from trainables.methods.contract import ModelOutputs
from trainables.teachers.cache.store import CacheWriter, RowStore
from trainables.teachers.rows import RowFormat, Rows

FORMAT = RowFormat(6, 2)
LOGITS = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))


def rows(samples: list[int]) -> Rows:
    return FORMAT.to_host(np.array(samples), FORMAT.encode(ModelOutputs(LOGITS[samples])))()


def read(store: RowStore, samples: list[int], epoch: int = 0) -> bytes:
    return store.open(epoch).read(np.array(samples)).tobytes()


def test_rows_of_several_blocks_are_gathered_in_the_requested_order(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.row, 20)
    for samples in ([3, 1, 4], [15, 9], [2, 6, 5]):
        store.write(0, rows(samples))
    samples = [9, 4, 2, 15, 3, 6]
    assert read(store, samples) == rows(samples).tobytes()
    assert store.open(0).missing_N[[3, 0, 9, 19]].tolist() == [False, True, False, True]
    assert store.open(1).missing_N.all()


def test_the_same_block_twice_is_one_file_and_overlaps_are_equal(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.row, 20)
    for samples in ([3, 1], [3, 1], [1, 7]):
        store.write(0, rows(samples))
    assert len(list(tmp_path.rglob("*.arrow"))) == 2
    assert store.size(1)[0] == 4
    assert read(store, [7, 1, 3]) == rows([7, 1, 3]).tobytes()


def test_other_files_are_ignored(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.row, 20)
    store.write(0, rows([3]))
    (tmp_path / "epoch-00000.bak").mkdir()
    assert store.size(1)[0] == 1
    for name in ("notes.arrow", ".1-00.arrow.7.tmp"):
        (tmp_path / "epoch-00000" / name).write_bytes(b"no block")
    assert (~store.open(0).missing_N).sum() == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "other"])
def test_a_damaged_block_counts_as_missing(tmp_path: Path, damage: str) -> None:
    store = RowStore(tmp_path, FORMAT.row, 20)
    store.write(0, rows([3, 1]))
    store.write(0, rows([5]))
    (block,) = tmp_path.rglob("2-*.arrow")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes({"bit": bytes(content), "cut": bytes(content[:-9]), "empty": b"", "other": b"x" * 999}[damage])
    fresh = RowStore(tmp_path, FORMAT.row, 20)
    assert np.flatnonzero(~fresh.open(0).missing_N).tolist() == [5]
    fresh.write(0, rows([3, 1]))  # the same content fixes the file
    assert np.flatnonzero(~fresh.open(0).missing_N).tolist() == [1, 3, 5]


def test_only_missing_rows_are_written_and_epochs_are_separate(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.row, 20)
    writer = CacheWriter(store)
    for epoch, samples, missing in ((0, [1, 2], [True, False]), (0, [3, 4], [True, True]), (1, [5, 6], [False, True])):
        writer.add(epoch, partial(rows, samples), np.array(missing))
    writer.flush()
    assert [np.flatnonzero(~store.open(epoch).missing_N).tolist() for epoch in (0, 1)] == [[1, 3, 4], [6]]
    assert read(store, [4, 1]) == rows([4, 1]).tobytes()
    writer.close()


def test_a_disk_that_cannot_be_written_ends_the_writing_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = CacheWriter(RowStore(tmp_path / "file", FORMAT.row, 20))
    for _ in range(3):
        writer.add(0, partial(rows, [1, 2]), np.array([True, True]))
        writer.flush()
    writer.close()


def test_what_else_goes_wrong_while_rows_are_written_is_raised(tmp_path: Path) -> None:
    def fail() -> Rows:
        raise RuntimeError("no device")

    writer = CacheWriter(RowStore(tmp_path, FORMAT.row, 20))
    writer.add(0, fail, np.array([True, True]))
    with pytest.raises(RuntimeError, match="no device"):
        writer.flush()


def test_a_store_holds_whatever_rows_are_declared(tmp_path: Path) -> None:
    row = np.dtype([("sample", "int32"), ("map", "float16", (2, 3)), ("mixed_with", "int64"), ("lam", "float64")])
    store, written = RowStore(tmp_path, row, 20), np.zeros(2, row)
    written["sample"], written["map"], written["lam"] = [4, 0], np.arange(12).reshape(2, 2, 3), [0.25, 1.0]
    store.write(3, written)
    found = store.open(3).read(np.array([0, 4]))
    assert all(np.array_equal(found[name], written[name][::-1]) for name in row.names or ())
