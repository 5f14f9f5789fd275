"""What a node's cache counts: nothing is lost to processes that end or are killed, and the budget is everybody's."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainables.data.storage.cache import Cache, DiskFullError
from trainables.data.storage.cleaner import remove_unused

MIB = 2**20


def open_cache(base: Path, identity: str = "images", limit_mib: int = 64) -> Cache:
    return Cache(str(base), identity, limit_mib=limit_mib, grace_s=5)


def write(num_bytes: int) -> object:
    def fill(part: Path) -> None:
        with open(part, "r+b") as file:
            file.write(bytes(num_bytes))

    return fill


def test_what_a_killed_process_had_begun_to_write_does_not_count(tmp_path: Path) -> None:
    killed = open_cache(tmp_path)
    assert killed.ensure("shard", MIB, write(MIB))  # type: ignore[arg-type]
    (killed.folder.parent / "other.part").write_bytes(bytes(40 * MIB))
    killed._users.release()
    after = open_cache(tmp_path)
    assert after.num_bytes() == MIB
    assert [path.name for path in after.folder.iterdir()] == ["shard"]
    after.close()


def test_a_set_of_which_a_kill_left_no_files_is_removed(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.folder.rmdir()
    cache._users.release()
    assert remove_unused(str(cache.folder.parent))


def test_several_processes_together_write_no_more_than_the_budget(tmp_path: Path) -> None:
    caches = [open_cache(tmp_path, limit_mib=50) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(lambda number: caches[number].ensure(str(number), 20 * MIB, write(20 * MIB)), range(4)))  # type: ignore[arg-type]
    assert sorted(stored) == [False, False, True, True]
    assert caches[0].num_bytes() == 40 * MIB
    for cache in caches:
        cache.close()


def test_a_disk_that_is_full_for_a_moment_is_used_again(tmp_path: Path) -> None:
    cache, full = open_cache(tmp_path), [True]

    def write_once_full(part: Path) -> None:
        if full.pop():
            full.append(False)
            raise DiskFullError from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part.write_bytes(bytes(MIB))

    assert not cache.ensure("shard", MIB, write_once_full)
    assert cache.ensure("shard", MIB, write_once_full)
    assert cache.num_bytes() == MIB
    cache.close()


def test_a_file_that_cannot_be_written_is_not_counted(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    with pytest.raises(ValueError, match="origin"):
        cache.ensure("shard", MIB, lambda part: (_ for _ in ()).throw(ValueError("origin")))
    assert cache.num_bytes() == 0
    cache.close()
