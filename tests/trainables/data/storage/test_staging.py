import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainables.data.sources.shards import image_of, make_records
from tests.trainables.data.storage.small import file_system
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.index import INDEX, read_index
from trainables.data.source import open_on_node
from trainables.data.storage import free_space, staging
from trainables.data.storage.cache import Cache
from trainables.data.storage.cleaner import remove_unused
from trainables.data.storage.staging import stage_set
from trainables.errors import DataError
from trainables.locks import locked

GRACE_S = 0.3

_USER = f"""
import logging, sys, time
from trainables.data.storage.staging import stage_set
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
try:
    cache, _ = stage_set(sys.argv[1], sys.argv[2], grace_s={GRACE_S})
except Exception as error:
    print(type(error).__name__, error, flush=True)
    raise SystemExit(2)
print("ready", cache.folder, flush=True)
time.sleep(1000)
"""


class User:
    """A process that stages a set and then uses it until it is killed."""

    def __init__(self, source: Path, to: Path) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[4]), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _USER, str(source), str(to)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )

    def printed(self, word: str) -> str:
        """The first line that begins with `word`."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith(word):
                return line.strip()
        raise AssertionError(lines)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start_user() -> Iterator[Callable[[Path, Path], User]]:
    users: list[User] = []

    def start(source: Path, to: Path) -> User:
        users.append(User(source, to))
        return users[-1]

    yield start
    for user in users:
        user.kill()


def _own(base: Path) -> Path:
    return base / f"raydistill-{os.getuid()}"


def _gone(path: Path) -> bool:
    return wait_until(lambda: not path.exists())


def test_a_staged_set_is_the_set_itself(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    for split in ("train", "val"):
        source = open_on_node(DataConfig(path=str(root), stage=str(to)), split)
        assert [source.read(index) for index in range(len(source))] == [image_of(split, index) for index in range(len(source))]
        source.close()
    (folder,) = _own(to).glob("*/data")
    assert {file.name for file in folder.iterdir()} == {file.file for file in read_index(root).files()}
    assert remove_unused(str(folder.parent))


def test_a_staged_set_is_removed_a_while_after_its_last_user_and_not_before(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    first, second = (stage_set(str(root), str(to), grace_s=GRACE_S)[0] for _ in range(2))
    first.close()
    time.sleep(4 * GRACE_S)
    assert second.folder.exists()
    second.close()
    assert _gone(_own(to))
    assert root.exists()


def test_who_comes_within_the_grace_takes_the_copy_over(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    cache, _ = stage_set(str(root), str(to), grace_s=3.0)
    inode = (cache.folder / "train-00000.arrow").stat().st_ino
    for _ in range(3):
        cache.close()
        time.sleep(1.2)
        cache, _ = stage_set(str(root), str(to), grace_s=3.0)
        assert (cache.folder / "train-00000.arrow").stat().st_ino == inode
    cache.close()
    assert _gone(_own(to))


def test_the_copy_of_processes_that_were_all_killed_is_removed(tmp_path: Path, start_user: Callable[[Path, Path], User]) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    users = [start_user(root, to) for _ in range(2)]
    paths = {user.printed("ready") for user in users}
    assert len(paths) == 1
    users[0].kill()
    time.sleep(4 * GRACE_S)
    assert Path(paths.pop().split()[1]).exists()
    users[1].kill()
    assert _gone(_own(to))


def test_a_cleaner_is_no_child_of_the_worker_that_started_it_and_there_is_one(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    caches = [stage_set(str(root), str(to), grace_s=GRACE_S)[0] for _ in range(3)]
    (folder,) = _own(to).glob("*/")
    found = wait_until(lambda: [line for line in _processes() if str(folder) in line])
    assert len(found) == 1
    pid = int(found[0].split()[0])
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" not in status
    assert os.getsid(pid) != os.getsid(0)
    assert int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) < 20_000
    for cache in caches:
        cache.close()
    assert _gone(_own(to))


def _processes() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append(f"{entry.name} " + (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def test_two_processes_copy_once(tmp_path: Path, start_user: Callable[[Path, Path], User]) -> None:
    root, to = make_records(tmp_path / "set", shards=8, rows=40, size=50_000), tmp_path / "disk"
    users = [start_user(root, to) for _ in range(3)]
    copied = []
    for user in users:
        assert user.process.stdout is not None
        for line in user.process.stdout:
            copied += [line] if line.startswith("staged") else []
            if line.startswith("ready"):
                break
    assert len(copied) == 1
    assert "15." in copied[0]
    assert "MiB of" in copied[0]


def test_an_interrupted_copy_goes_on_from_the_shards_that_are_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    cache, index = stage_set(str(root), str(to), grace_s=30)
    copy = cache.folder
    inode_before = (copy / "train-00001.arrow").stat().st_ino
    (copy / "train-00002.arrow").unlink()
    (copy / "train-00003.arrow").write_bytes(b"short")
    (copy.parent / "train-00002.arrow.part").write_bytes(b"half a shard")
    with caplog.at_level(logging.INFO, "raydistill"):
        again, _ = stage_set(str(root), str(to))
    assert "staged 52.7 KiB of" in caplog.text  # two shards of 25 kB
    assert (copy / "train-00001.arrow").stat().st_ino == inode_before
    assert all((copy / file.file).read_bytes() == (root / file.file).read_bytes() for file in index.files())
    assert not list(copy.parent.glob("*.part"))
    cache.close()
    again.close()
    assert remove_unused(str(copy.parent))


def test_who_waits_for_a_copy_takes_it_up_where_the_copier_is_killed(
    tmp_path: Path, start_user: Callable[[Path, Path], User]
) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    shard, aside = root / "train-00003.arrow", tmp_path / "aside"
    shard.rename(aside)
    os.mkfifo(shard)  # reading it waits for ever
    copier = start_user(root, to)
    wait_until(lambda: list(_own(to).glob("*/data/train-00000.arrow")))
    waiting = start_user(root, to)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.process.wait(timeout=1)
    aside.rename(shard)
    copier.kill()
    path = Path(waiting.printed("ready").split()[1])
    assert (path / shard.name).read_bytes() == shard.read_bytes()


def test_whoever_copies_or_waits_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_PROGRESS_S", 0.0)
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    with caplog.at_level(logging.INFO, "raydistill"):
        cache, _ = stage_set(str(root), str(to), grace_s=GRACE_S)
    assert re.search(rf"staging {root} in {to}: [\d.]+ KiB of 122 KiB", caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO, "raydistill"), ThreadPoolExecutor(1) as pool:
        with locked(cache.folder.parent / "copying"):
            waiting = pool.submit(stage_set, str(root), str(to), grace_s=GRACE_S)
            wait_until(lambda: caplog.messages)
            assert re.match(rf"staging {root} in {to}: 12\d KiB of 122 KiB", caplog.messages[0])
        waiting.result()[0].close()
    cache.close()


def _group(folder: Path, version: int, limit: str, used: int, reclaimable: int = 0) -> None:
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if version == 1 else ''}inactive_file {reclaimable}\n")


@pytest.mark.parametrize(
    ("memberships", "version", "top"), [("0::{}", 2, ""), ("3:cpu,cpuacct:/other\n2:memory:{}", 1, "memory")], ids=["2", "1"]
)
def test_the_memory_that_is_free_is_that_of_the_processs_own_group_and_those_above(
    tmp_path: Path, memberships: str, version: int, top: str
) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    unlimited = "max" if version == 2 else str(2**63 - 4096)

    def free(path: str) -> float:
        own.write_text(memberships.format(path) + "\n")
        return free_space._container_bytes(own, root)

    assert free("/job/step") == float("inf")
    _group(root / top / "job" / "step", version, "1000", 300, reclaimable=50)
    assert free("/job/step") == 750
    _group(root / top / "job", version, "2000", 1900)
    assert free("/job/step") == 100
    _group(root / top, version, unlimited, 10**6)
    assert free("/job/step") == 100
    assert free("/elsewhere") > 1e12
    _group(root / top, version, "700", 600)
    assert free("/docker/0123") == free("/../../x") == 100  # inside of a container, whose own group is the root


def test_what_a_crash_left_is_removed_unless_it_is_in_use_or_this_very_set(tmp_path: Path) -> None:
    to, base = tmp_path / "disk", tmp_path / "disk" / f"raydistill-{os.getuid()}"
    (base / "crashed" / "data").mkdir(parents=True)
    (base / "crashed" / "data" / "shard").write_bytes(b"x" * 1000)
    (base / "crashed" / "users").touch()
    used, own = (Cache(str(to), name, grace_s=30) for name in ("used", "own"))
    assert sorted(path.name for path in base.glob("*/")) == ["own", "used"]
    used.close()
    own.close()
    assert all(remove_unused(str(base / name)) for name in ("used", "own"))
    assert not base.exists()


def test_unused_sets_are_evicted_and_sets_in_use_are_kept(tmp_path: Path) -> None:
    def bring(cache: Cache, name: str) -> bool:
        return cache.ensure(name, 600_000, lambda part: part.write_bytes(bytes(600_000)) and None)

    first, second = (Cache(str(tmp_path), name, limit_mib=1, grace_s=30) for name in ("first", "second"))
    assert bring(first, "a")
    assert not bring(second, "b")
    assert second.room_bytes() == (1 << 20) - 600_000
    first.close()
    assert bring(second, "b")
    assert not first.folder.exists()
    second.close()
    assert remove_unused(str(second.folder.parent))


def test_a_set_that_does_not_fit_is_refused_before_a_byte_is_copied(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    index = read_index(root)
    huge = index.splits["train"].shards[0].model_copy(update={"bytes": 1 << 60})
    train = index.splits["train"].model_copy(update={"shards": (huge,)})
    (root / INDEX).write_text(index.model_copy(update={"splits": {**index.splits, "train": train}}).model_dump_json())
    with pytest.raises(DataError, match=r"data.stage: 1.049e\+06 TiB of .*set do not fit into the .* that are free in") as error:
        stage_set(str(root), str(to), grace_s=GRACE_S)
    assert "\n" not in str(error.value)
    assert _gone(_own(to))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with file_system(tmp_path / "small", 2) as folder:
        yield folder


def test_a_disk_smaller_than_the_set_is_named_with_both_sizes(tmp_path: Path, small_disk: Path) -> None:
    root = make_records(tmp_path / "set", rows=100, size=10_000)
    with pytest.raises(
        DataError, match=r"3\.94 MiB of \S+ do not fit into the (1\.9\d|2) MiB that are free in \S+; write data.stage=none"
    ):
        stage_set(str(root), str(small_disk), grace_s=GRACE_S)


def test_a_disk_that_fills_up_in_the_middle_of_a_copy_is_cleaned_and_an_error(
    tmp_path: Path, start_user: Callable[[Path, Path], User], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, to = make_records(tmp_path / "set", rows=100, size=10_000), tmp_path / "disk"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))  # a write beyond is refused as on a full disk
    try:
        with pytest.raises(DataError, match=r"data.stage: others filled the disk before 3\.94 MiB of \S+ were copied") as error:
            stage_set(str(root), str(to), grace_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert _gone(_own(to))


def test_a_full_disk_under_two_processes_ends_both_with_the_error(
    tmp_path: Path, small_disk: Path, start_user: Callable[[Path, Path], User]
) -> None:
    root = make_records(tmp_path / "set", rows=100, size=4_000)
    (small_disk / "others").write_bytes(b"x" * 1_000_000)
    for user in [start_user(root, small_disk) for _ in range(2)]:
        assert "do not fit" in user.printed("DataError")
        assert user.process.wait(timeout=60) == 2


def test_a_shard_that_is_not_the_one_of_the_index_is_an_error_that_names_it(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    shard = root / "train-00002.arrow"
    content = shard.read_bytes()
    for damaged, problem in [
        (content[:-5], "bytes, and its index says"),
        (content + b"x", "at least .* bytes, and its index says"),
        (content[:500] + bytes([content[500] ^ 1]) + content[501:], "does not match the checksum in its index"),
    ]:
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"data.path: {shard} .*{problem}.*; restore the file, or pack it again"):
            stage_set(str(root), str(to), grace_s=GRACE_S)
    shard.unlink()
    with pytest.raises(DataError, match=rf"data.path: {shard} cannot be read: No such file"):
        stage_set(str(root), str(to), grace_s=GRACE_S)


def test_a_disk_that_fails_in_the_middle_of_a_copy_is_an_error_that_names_the_shard(tmp_path: Path) -> None:
    """The kernel's own error: nothing is mapped at the beginning of a process's memory, and reading it is EIO."""
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    shard = root / "train-00002.arrow"
    shard.unlink()
    shard.symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=rf"data.path: {shard} cannot be read: Input/output error") as error:
        stage_set(str(root), str(to), grace_s=GRACE_S)
    assert "\n" not in str(error.value)
    assert _gone(_own(to))


def test_a_folder_that_another_user_made_ready_is_refused(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    to.mkdir()
    (tmp_path / "elsewhere").mkdir()
    _own(to).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"is not a folder of this user"):
        stage_set(str(root), str(to))
    with pytest.raises(DataError, match=r"data.stage: /proc/nowhere cannot be used: .*; give another folder"):
        stage_set(str(root), "/proc/nowhere")


def test_a_worker_reads_the_copy_and_its_end_gives_it_up(tmp_path: Path) -> None:
    root, to = make_records(tmp_path / "set"), tmp_path / "disk"
    data = DataConfig(path=str(root), stage=str(to))
    sources = [open_on_node(data, split) for split in ("train", "val")]
    for shard in root.glob("*.arrow"):
        shard.unlink()  # of the set; the copy is whole
    assert [source.read(3) for source in sources] == [image_of("train", 3), image_of("val", 3)]
    (folder,) = _own(to).glob("*/")
    while sources:
        assert not remove_unused(str(folder))
        sources.pop()
    wait_until(lambda: remove_unused(str(folder)))  # for a moment its cleaner has the lock


def test_memory_is_staged_where_the_system_shares_it(tmp_path: Path) -> None:
    cache, _ = stage_set(str(make_records(tmp_path / "set")), "ram", grace_s=GRACE_S)
    assert cache.folder.is_relative_to("/dev/shm")
    cache.close()
    assert _gone(cache.folder)
