import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainables.data.photos import MakeFolder
from tests.trainables.data.storage.small import file_system
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.decode import UnreadableImageError
from trainables.data.interface import Source
from trainables.data.source import open_on_node, open_source
from trainables.data.storage import image_cache
from trainables.data.storage.cache import Cache
from trainables.data.storage.cleaner import remove_unused
from trainables.data.storage.image_cache import CachedSource, cached
from trainables.errors import DataError


@pytest.fixture
def folder(make_folder: MakeFolder) -> Iterator[Path]:
    """An image folder whose caches are removed at the end."""
    before = set(Path("/dev/shm").glob("raydistill-*/images-*"))
    yield make_folder(train={"a": 20, "b": 20}, val={"a": 4})
    for path in set(Path("/dev/shm").glob("raydistill-*/images-*")) - before:
        remove_unused(str(path))


def _config(folder: Path, cache_mib: int | None = 4) -> DataConfig:
    return DataConfig(path=str(folder), image_size=16, cache="memory", cache_mib=cache_mib)


def _contents(source: Source) -> list[bytes]:
    return [bytes(source.read(index)) for index in range(len(source))]


def _empty(folder: Path) -> None:
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"")


def test_what_was_read_once_is_not_read_again(folder: Path) -> None:
    expected = _contents(open_source(_config(folder), "train"))
    source = open_on_node(_config(folder), "train")
    assert _contents(source) == expected
    _empty(folder)
    assert _contents(source) == expected
    assert [source.name(3), len(source), source.classes] == ["train/a/003.jpg", 40, ("a", "b")]


def test_images_that_were_preprocessed_anew_in_place_are_read_anew(folder: Path) -> None:
    source = open_on_node(_config(folder), "train")
    before = _contents(source)
    for path in (folder / "train").rglob("*.jpg"):
        path.write_bytes(bytes(path.stat().st_size))
    again = open_on_node(_config(folder), "train")
    assert _contents(again) == [bytes(len(content)) for content in before]
    assert _contents(source) == before  # a job that runs meanwhile


def _read_in_child(source: Source, begin: int, end: int) -> list[bytes]:
    return [bytes(source.read(index)) for index in range(begin, end)]


def test_spawned_processes_share_what_any_of_them_has_read(folder: Path) -> None:
    expected = _contents(open_source(_config(folder), "train"))
    source = open_on_node(_config(folder), "train")
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        halves = pool.starmap(_read_in_child, [(source, 0, 20), (source, 20, 40)], chunksize=1)
        assert halves[0] + halves[1] == expected
        _empty(folder)
        assert pool.apply(_read_in_child, (source, 0, 40)) == expected
    assert _contents(source) == expected
    assert isinstance(pickle.loads(pickle.dumps(source)), CachedSource)


def test_threads_that_miss_the_same_samples_at_once_all_get_them(folder: Path) -> None:
    expected = _contents(open_source(_config(folder), "train"))
    source = open_on_node(_config(folder), "train")
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: _contents(source), range(16)):
            assert result == expected


def test_a_full_cache_says_so_once_and_reads_the_rest_from_the_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split, count in (("train", 30), ("val", 1)):
        (tmp_path / "set" / split / "a").mkdir(parents=True)
        for number in range(count):
            (tmp_path / "set" / split / "a" / f"{number:02}.jpg").write_bytes(os.urandom(100_000))
    source = open_on_node(_config(tmp_path / "set", cache_mib=1), "train")
    with caplog.at_level(logging.WARNING, "raydistill"):
        expected = _contents(source)
        assert _contents(source) == expected
    assert caplog.text.count("data.cache: its 1 MiB are full: further train images are read from") == 1
    _empty(tmp_path)
    stored = [content for content in _contents(source) if content]
    assert stored == expected[:10]


def test_an_unreadable_file_is_an_error_every_time(folder: Path) -> None:
    source = open_on_node(_config(folder), "train")
    (folder / "train" / "a" / "000.jpg").unlink()
    for _ in range(2):
        with pytest.raises(UnreadableImageError, match="No such file"):
            source.read(0)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, of 1 MiB."""
    with file_system(tmp_path / "small", 1) as small:
        yield small
        for path in small.glob("raydistill-*/*/"):
            remove_unused(str(path))


def test_memory_that_runs_out_is_no_error(small_memory: Path) -> None:
    """As where somebody else fills /dev/shm: what was not stored is read again."""
    cache, content = Cache(str(small_memory), "images", limit_mib=8), os.urandom(50_000)
    stored = [cache.put(str(index), content) for index in range(40)]
    assert 10 < sum(stored) < 21
    assert [(cache.folder / str(index)).exists() for index in range(40)] == stored
    assert {(path.stat().st_size) for path in cache.folder.iterdir()} == {50_000}


def test_a_cache_that_is_larger_than_the_memory_is_refused_with_both_sizes(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data.cache_mib=900000000 is more than the \S+ GiB that are free in /dev/shm; lower it"):
        open_on_node(_config(folder, cache_mib=900_000_000), "train")


def test_memory_that_cannot_be_allocated_is_reported_with_the_caches_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "RAM", "/proc/nowhere")
    with pytest.raises(DataError, match=r"^data.cache: /proc/nowhere cannot be used: .*; leave data.cache out"):
        open_on_node(_config(folder), "train")


def test_both_splits_share_one_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number in range(9):
            (tmp_path / split / "a" / f"{number}.jpg").write_bytes(os.urandom(100_000))
    train, val = (open_on_node(_config(tmp_path, cache_mib=1), split) for split in ("train", "val"))
    assert len(_contents(train)) == len(_contents(val)) == 9
    assert len(list(train.cache.folder.iterdir())) == 9
    assert len(list(val.cache.folder.iterdir())) == 1
    assert "further val images" in caplog.text


def test_a_folder_with_other_files_has_a_cache_of_its_own(folder: Path, make_folder: Callable[..., Path]) -> None:
    first = open_on_node(_config(folder), "train")
    _contents(first)
    (folder / "train" / "a" / "000.jpg").rename(folder / "train" / "a" / "999.jpg")
    second = open_on_node(_config(folder), "train")
    assert _contents(second) == _contents(open_source(_config(folder), "train"))


def test_the_cache_is_removed_a_while_after_its_last_user(folder: Path) -> None:
    source = cached(_config(folder), "train", open_source(_config(folder), "train"), grace_s=0.3)
    root = source.cache.folder
    _contents(source)
    assert root.exists()
    del source
    wait_until(lambda: not root.exists())


@pytest.mark.parametrize(("path", "instead"), [("digits", "it is in memory as it is"), ("s3://b/set", "data.stage=ram")])
def test_what_needs_no_cache_is_refused_one(path: str, instead: str) -> None:
    with pytest.raises(DataError, match=f"data.cache: {path} is not a folder of image files: .*{instead}"):
        open_on_node(DataConfig(path=path, cache="memory"), "train")


def test_only_packed_sets_are_staged(folder: Path) -> None:
    for path in ("digits", str(folder)):
        with pytest.raises(DataError, match=f"data.stage: {path} is not a packed set; pack it with `distill pack`"):
            open_on_node(DataConfig(path=path, stage="ram"), "train")
