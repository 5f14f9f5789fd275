"""Blocks on disk: found by index, equal where they overlap, left out where they are damaged."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainables.teachers.cache import writer as writer_module
from trainables.teachers.cache.logits_format import LogitsFormat
from trainables.teachers.cache.store import Rows, RowStore
from trainables.teachers.cache.writer import CacheWriter

CPU = torch.device("cpu")

FORMAT = LogitsFormat(6, 2)
LOGITS = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))


def columns(samples: list[int]) -> Rows:
    encoded = FORMAT.encode(LOGITS[samples])
    return {"sample": np.array(samples, dtype=np.int32), **{name: tensor.numpy() for name, tensor in encoded.items()}}


def read(store: RowStore, samples: list[int], epoch: int = 0) -> torch.Tensor:
    out = {name: np.empty((len(samples), *shape), dtype=kind) for name, (kind, shape) in FORMAT.columns.items()}
    store.open(epoch).gather(np.array(samples), out)
    return FORMAT.decode({name: torch.from_numpy(values) for name, values in out.items()})


def decoded(samples: list[int]) -> torch.Tensor:
    return FORMAT.decode(FORMAT.encode(LOGITS[samples]))


def test_rows_of_several_blocks_are_gathered_in_the_requested_order(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.columns, 20)
    for samples in ([3, 1, 4], [15, 9], [2, 6, 5]):
        store.write(0, columns(samples))
    samples = [9, 4, 2, 15, 3, 6]
    assert torch.equal(read(store, samples), decoded(samples))
    assert store.open(0).missing(np.array([3, 0, 9, 19])).tolist() == [False, True, False, True]
    assert store.open(1).missing_N.all()


def test_the_same_block_twice_is_one_file_and_overlaps_are_equal(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.columns, 20)
    for samples in ([3, 1], [3, 1], [1, 7]):
        store.write(0, columns(samples))
    assert len(list(tmp_path.rglob("*.npy"))) == 2
    assert store.size(1)[0] == 4
    assert torch.equal(read(store, [7, 1, 3]), decoded([7, 1, 3]))


def test_other_files_are_ignored(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.columns, 20)
    store.write(0, columns([3]))
    (tmp_path / "epoch-00000.bak").mkdir()
    assert store.size(1)[0] == 1
    for name in ("notes.npy", ".1-00.npy.7.tmp"):
        (tmp_path / "epoch-00000" / name).write_bytes(b"no block")
    assert (~store.open(0).missing_N).sum() == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "other"])
def test_a_damaged_block_counts_as_missing(tmp_path: Path, damage: str) -> None:
    store = RowStore(tmp_path, FORMAT.columns, 20)
    store.write(0, columns([3, 1]))
    store.write(0, columns([5]))
    (block,) = tmp_path.rglob("2-*.npy")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes({"bit": bytes(content), "cut": bytes(content[:-9]), "empty": b"", "other": b"x" * 999}[damage])
    fresh = RowStore(tmp_path, FORMAT.columns, 20)
    assert np.flatnonzero(~fresh.open(0).missing_N).tolist() == [5]
    fresh.write(0, columns([3, 1]))  # the same content fixes the file
    assert np.flatnonzero(~fresh.open(0).missing_N).tolist() == [1, 3, 5]


def test_a_block_of_another_format_or_data_set_is_left_out(tmp_path: Path) -> None:
    RowStore(tmp_path, FORMAT.columns, 20).write(0, columns([3, 19]))
    assert RowStore(tmp_path, LogitsFormat(6, 3).columns, 20).open(0).missing_N.all()
    assert RowStore(tmp_path, FORMAT.columns, 10).open(0).missing_N.all()


def test_only_missing_rows_are_written_and_epochs_are_separate(tmp_path: Path) -> None:
    store = RowStore(tmp_path, FORMAT.columns, 20)
    writer = CacheWriter(store, CPU)
    for epoch, samples, missing in ((0, [1, 2], [True, False]), (0, [3, 4], [True, True]), (1, [5, 6], [False, True])):
        writer.add(epoch, np.array(samples), FORMAT.encode(LOGITS[samples]), np.array(missing))
    writer.flush()
    assert [np.flatnonzero(~store.open(epoch).missing_N).tolist() for epoch in (0, 1)] == [[1, 3, 4], [6]]
    assert torch.equal(read(store, [4, 1]), decoded([4, 1]))
    writer.close()


def test_a_disk_that_cannot_be_written_ends_the_writing_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = CacheWriter(RowStore(tmp_path / "file", FORMAT.columns, 20), CPU)
    for _ in range(3):
        writer.add(0, np.array([1, 2]), FORMAT.encode(LOGITS[:2]), np.array([True, True]))
        writer.flush()
    writer.close()


def test_a_thread_that_cannot_use_its_device_ends_the_job_and_does_not_keep_it_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(f"no {device}")

    monkeypatch.setattr(writer_module, "bind_thread", fail)
    writer = CacheWriter(RowStore(tmp_path, FORMAT.columns, 20), CPU)
    writer.add(0, np.array([1, 2]), FORMAT.encode(LOGITS[:2]), np.array([True, True]))
    with pytest.raises(RuntimeError, match="no cpu"):
        writer.flush()
    writer.close()


def test_a_store_holds_whatever_rows_are_declared(tmp_path: Path) -> None:
    store = RowStore(tmp_path, {"map": ("float16", (2, 3)), "mixed_with": ("int64", ()), "lam": ("float64", ())}, 20)
    rows = {"map": np.arange(12, dtype="float16").reshape(2, 2, 3), "mixed_with": np.array([7, 1]), "lam": np.array([0.25, 1.0])}
    store.write(3, {"sample": np.array([4, 0]), **rows})
    out = {name: np.empty_like(values) for name, values in rows.items()}
    store.open(3).gather(np.array([0, 4]), out)
    assert all(np.array_equal(out[name], values[::-1]) for name, values in rows.items())
