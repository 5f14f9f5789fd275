from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import MakeFolder
from tests.trainables.data.sources.shards import image_of, make_records
from tests.waiting import wait_until
from trainables.config import DataConfig
from trainables.data.identity import fingerprint
from trainables.data.index import INDEX, read_index
from trainables.data.loader.loader import Loader
from trainables.data.order import Order
from trainables.data.source import open_on_node, open_source
from trainables.data.sources.records import RecordsSource
from trainables.data.storage import remote_shards
from trainables.data.storage.cleaner import remove_unused
from trainables.data.storage.origin import Origin
from trainables.data.storage.remote import open_remote
from trainables.data.storage.remote_shards import RemoteShards, Upcoming
from trainables.errors import DataError
from trainables.locks import locked

ROWS, SHARDS, SIZE = 32, 32, 33_000  # a shard is 1.01 MiB


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_records(tmp_path_factory.mktemp("packed") / "set", shards=SHARDS, rows=ROWS, size=SIZE)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """A folder for this node's shards; no cleaner of it outlives the test for long."""
    yield tmp_path / "node"
    for folder in (tmp_path / "node").glob("raydistill-*/*/"):
        remove_unused(str(folder))


def _data(uri: str, node: Path, **more: Any) -> DataConfig:
    return DataConfig(path=uri, stage=str(node), **more)


def _shards(source: RecordsSource) -> RemoteShards:
    assert isinstance(source._shards, RemoteShards)
    return source._shards


def _order(source: RecordsSource, shuffle: str) -> Order:
    sizes = [ROWS] * SHARDS
    return Order("train", shuffle, seed=1, num_samples=len(source), shard_sizes=sizes)


def _bytes_of_shards(node: Path) -> int:
    total = 0
    for path in node.glob("raydistill-*/*/data/*"):
        if path.name != INDEX and "rows" not in path.name:
            with contextlib.suppress(FileNotFoundError):  # renamed or removed in this moment
                total += path.stat().st_size
    return total


_SERVER = """
import pathlib, sys, time
from pyarrow import fs
from moto.server import ThreadedMotoServer

def system(port):
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
    return fs.S3FileSystem(**keys, endpoint_override=endpoint, allow_bucket_creation=True)

filling = ThreadedMotoServer("127.0.0.1", 0, verbose=False)  # both serve what this process holds
filling.start()
s3 = system(filling.get_host_and_port()[1])
s3.create_dir("bucket")
for file in pathlib.Path(sys.argv[2]).iterdir():
    with s3.open_output_stream(f"bucket/set/{file.name}") as target:
        target.write(file.read_bytes())
ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False).start()
print("ready", flush=True)
time.sleep(100_000)
"""


class S3:
    """moto's S3 server as a process that can be killed and started again, with the same content from its first answer on."""

    def __init__(self, content: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.content = content
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-c", _SERVER, str(self.port), str(self.content)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def put(self, name: str, content: bytes) -> None:
        from pyarrow import fs

        system = fs.S3FileSystem(access_key="key", secret_key="secret", region="us-east-1", endpoint_override=self.endpoint)
        with system.open_output_stream(f"bucket/set/{name}") as file:
            file.write(content)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def s3(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    pytest.importorskip("moto.server")
    server = S3(packed)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield server
    server.kill()


def test_a_set_behind_a_uri_is_the_set_itself(packed: Path, node: Path) -> None:
    for split in ("train", "val"):
        source = open_source(_data(packed.as_uri(), node), split)
        assert isinstance(source, RecordsSource)
        assert isinstance(source._shards, RemoteShards)
        for index in range(0, len(source), 7):
            assert source.read(index) == image_of(split, index, SIZE)
        assert source.name(3) == f"{split}/3"
        assert source.labels_N.tolist() == [index % 2 for index in range(len(source))]
        assert fingerprint(source) == fingerprint(open_source(DataConfig(path=str(packed)), split))


def test_a_file_system_that_only_fsspec_knows_serves_too(packed: Path, node: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in packed.iterdir():
        memory.pipe(f"/set/{file.name}", file.read_bytes())
    source = open_remote(_data("memory://set", node), "train")
    assert source.read(100) == image_of("train", 100, SIZE)


def test_opening_fetches_no_shard(packed: Path, node: Path) -> None:
    source = open_remote(_data(packed.as_uri(), node), "train")
    assert len(source) == ROWS * SHARDS
    assert _bytes_of_shards(node) == 0


def test_naming_a_sample_fetches_no_shard(packed: Path, node: Path) -> None:
    source = open_remote(_data(packed.as_uri(), node), "train")
    assert source.name(2 * ROWS + 3) == "train-00002.arrow[3]"
    assert _bytes_of_shards(node) == 0
    source.read(2 * ROWS)
    assert source.name(2 * ROWS + 3) == f"train/{2 * ROWS + 3}"


@pytest.mark.parametrize("shuffle", ["window(64)", "none"])
def test_an_epoch_reads_every_sample_and_the_cache_keeps_its_bound(packed: Path, node: Path, shuffle: str) -> None:
    source = open_remote(_data(packed.as_uri(), node, cache_mib=8), "train")
    order, most = _order(source, shuffle), 0
    for epoch in range(2):
        for position in range(0, len(source), 16):
            source.follow(order, epoch, position)
            for index in order.at(epoch, np.arange(position, position + 16)).tolist():
                assert source.read(index) == image_of("train", index, SIZE)
            most = max(most, _bytes_of_shards(node))
    assert 2 << 20 < most <= 8 << 20


def test_what_comes_next_is_fetched_before_it_is_read(packed: Path, node: Path) -> None:
    source = open_remote(_data(packed.as_uri(), node, cache_mib=8), "train")
    source.follow(_order(source, "none"), 0, 0)
    wait_until(lambda: len(list(node.glob("raydistill-*/*/data/train-*"))) >= 7)
    time.sleep(0.3)
    there = sorted(path.name for path in node.glob("raydistill-*/*/data/train-*"))
    assert there == [f"train-{shard:05}.arrow" for shard in range(7)]  # and the eighth would be over 8 MiB


class Counting(Origin):
    """A server that notes which files were asked of it."""

    def __init__(self, uri: str, requests: list[str]) -> None:
        super().__init__(uri, retry_s=1)
        self._requests = requests

    def open(self, name: str) -> BinaryIO:
        self._requests.append(name)
        return super().open(name)


def test_the_workers_of_a_node_fetch_a_shard_once(packed: Path, node: Path) -> None:
    sources, requests = [open_remote(_data(packed.as_uri(), node), "train") for _ in range(3)], list[str]()
    for source in sources:
        _shards(source).origin = Counting(packed.as_uri(), requests)

    def read_all(source: RecordsSource) -> bool:
        source.follow(_order(source, "full"), 0, 0)
        return all(source.read(index) == image_of("train", index, SIZE) for index in range(len(source)))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(read_all, sources))
    assert sorted(requests) == [f"train-{shard:05}.arrow" for shard in range(SHARDS)]


def test_what_a_killed_worker_had_begun_to_fetch_takes_no_room(packed: Path, node: Path) -> None:
    source = open_remote(_data(packed.as_uri(), node, cache_mib=3), "train")
    begun = _shards(source).cache.folder.parent / "train-00009.arrow.part"
    begun.write_bytes(b"x" * 500_000)
    with locked(begun):
        open_remote(_data(packed.as_uri(), node, cache_mib=3), "train")
        assert begun.exists()
    open_remote(_data(packed.as_uri(), node, cache_mib=3), "train")
    assert not begun.exists()


def test_threads_that_fetch_ahead_end_with_the_source(packed: Path, node: Path) -> None:
    before = threading.enumerate()
    source = open_remote(_data(packed.as_uri(), node, cache_mib=8), "train")
    source.follow(_order(source, "none"), 0, 0)
    lanes = [thread for thread in threading.enumerate() if thread.name == "fetch" and thread not in before]
    assert lanes
    del source
    for lane in lanes:
        lane.join()


def test_shards_that_are_needed_are_known_across_the_end_of_an_epoch(packed: Path) -> None:
    shards = read_index(packed).splits["train"].shards
    order = Order("train", "window(64)", seed=1, num_samples=ROWS * SHARDS, shard_sizes=[ROWS] * SHARDS)
    expected: dict[int, None] = {}
    for epoch, begin in ((3, 960), (4, 0)):
        expected |= dict.fromkeys((order.at(epoch, np.arange(begin, ROWS * SHARDS)) // ROWS).tolist())
    ahead = Upcoming(shards, order, repeats=True)
    ahead.at = 3, 960
    first = ahead.shards(1)
    assert first == list(expected)[: len(first)]
    assert ahead.shards(1 << 40) == list(expected)
    ahead.at = 4, 0
    assert sorted(ahead.shards(1 << 40)) == list(range(SHARDS))


def test_a_shard_without_rows_is_never_needed(packed: Path) -> None:
    shards = read_index(packed).splits["train"].shards[:3]
    empty = shards[0].model_copy(update={"file": "empty.arrow", "rows": 0})
    ahead = Upcoming([shards[0], empty, *shards[1:]], Order("train", "none", seed=1, num_samples=3 * ROWS), repeats=True)
    for epoch in range(3):
        ahead.at = epoch, 40
        assert sorted(ahead.shards(1 << 40)) == [0, 2, 3]


def test_validation_that_ends_fetches_nothing_for_the_next_one(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shards, "_SPAN", 128)
    ahead = Upcoming(
        read_index(packed).splits["train"].shards, Order("val", "none", seed=1, num_samples=ROWS * SHARDS), repeats=False
    )
    for epoch in range(2):
        ahead.at = epoch, 0
        assert ahead.shards(1 << 40) == list(range(SHARDS))
        ahead.at = epoch, 992
        assert ahead.shards(1 << 40) == [31]


def test_an_order_that_the_cache_cannot_hold_is_refused_with_both_sizes_and_a_window_that_it_can(
    packed: Path, node: Path
) -> None:
    full = _data(packed.as_uri(), node, cache_mib=8)
    with pytest.raises(
        DataError, match=r"data.shuffle: full over file:\S+ needs a cache of 32\.\d MiB, more than the 8 MiB of"
    ) as error:
        open_on_node(full, "train")
    assert "\n" not in str(error.value)
    window = str(error.value).split("data.shuffle=")[1].split()[0]
    open_on_node(full.model_copy(update={"shuffle": window}), "train")
    open_on_node(full, "val")
    open_on_node(full.model_copy(update={"cache_mib": 40}), "train")


def test_validation_needs_room_in_addition_to_training(tmp_path: Path, node: Path) -> None:
    root = make_records(tmp_path / "set", shards=1, rows=ROWS, size=SIZE, val_rows=2 * ROWS)
    for cache_mib in (2, 3):
        with pytest.raises(DataError, match=r"data.shuffle: full over file:\S+ needs a cache of 3\.0\d MiB, more than the"):
            open_on_node(_data(root.as_uri(), node, cache_mib=cache_mib), "train")
    open_on_node(_data(root.as_uri(), node, cache_mib=3), "val")
    open_on_node(_data(root.as_uri(), node, cache_mib=4), "train")


def test_a_folder_for_temporary_files_that_cannot_be_used_is_not_called_the_stage(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    with pytest.raises(DataError, match=r"^data.path: the folder for \w+ files /proc/nowhere cannot .*; write data.stage=ram"):
        open_remote(DataConfig(path=packed.as_uri()), "train")


def test_a_folder_that_is_taken_away_is_one_line_and_ends_no_thread(packed: Path, node: Path) -> None:
    source = open_remote(_data(packed.as_uri(), node, cache_mib=8), "train")
    folder = _shards(source).cache.folder.parent
    folder.rename(folder.with_name("away"))  # at once: its cleaner may be making a file in it
    source.follow(_order(source, "none"), 0, 0)
    time.sleep(0.3)
    with pytest.raises(DataError, match=r"data.stage: \S+ cannot be used: No such file or directory; write another") as error:
        source.read(0)
    assert "\n" not in str(error.value)
    assert all(lane.is_alive() for lane in _shards(source)._threads)


def test_a_shard_that_was_cut_or_altered_is_fetched_again_and_then_an_error(
    packed: Path, node: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (packed / "train-00002.arrow").read_bytes()
    altered = content[:700] + bytes([content[700] ^ 1]) + content[701:]
    for damaged, problem in [(content[:-9], "bytes, and its index"), (altered, "does not match the checksum")]:
        copy = tmp_path / f"copy-{len(damaged)}"
        copy.mkdir()
        for file in packed.iterdir():
            (copy / file.name).write_bytes(damaged if file.name == "train-00002.arrow" else file.read_bytes())
        source = open_remote(_data(copy.as_uri(), node), "train")
        assert source.read(0) == image_of("train", 0, SIZE)
        refusal = rf"data.path: file:\S+train-00002.arrow .*{problem}.*; restore the file, or pack it again"
        with caplog.at_level(logging.WARNING, "raydistill"), pytest.raises(DataError, match=refusal) as error:
            source.read(2 * ROWS)
        assert "\n" not in str(error.value)
        assert "fetching it again" in caplog.text
        with pytest.raises(DataError, match="restore"):
            source.read(2 * ROWS + 1)


def test_a_loader_reads_ahead_from_a_set_behind_a_uri(tmp_path: Path, node: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(train={"a": 30, "b": 30}, val={"a": 10})
    pack_here(folder, tmp_path / "set", shard_bytes=4_000)
    data = DataConfig(path=(tmp_path / "set").as_uri(), stage=str(node), image_size=16, global_batch_size=8, shuffle="window(16)")
    near = data.model_copy(update={"path": str(tmp_path / "set"), "stage": "none"})
    for split in ("train", "val"):
        far, local = (
            Loader(open_on_node(each, split), each, split=split, seed=1, rank=0, world_size=1, loader_workers=2)
            for each in (data, near)
        )
        for one, other in zip(far.epoch(0), local.epoch(0), strict=True):
            assert one.indices_B.tolist() == other.indices_B.tolist()
            assert (one.images_BCHW == other.images_BCHW).all()
        assert any(thread.name == "fetch" for thread in threading.enumerate())
        far.close()
        local.close()


def test_s3_is_read_with_the_endpoint_and_the_keys_of_the_environment(s3: S3, node: Path) -> None:
    source = open_remote(_data("s3://bucket/set", node), "train")
    for index in (0, 500, 1023):
        assert source.read(index) == image_of("train", index, SIZE)
    with pytest.raises(DataError, match=r"data.path: s3://bucket/nothing/index.json cannot be read: ") as error:
        open_remote(_data("s3://bucket/nothing", node), "train")
    assert "\n" not in str(error.value)


def test_a_shard_that_is_good_again_the_second_time_does_no_harm(s3: S3, node: Path, packed: Path) -> None:
    good = (packed / "train-00005.arrow").read_bytes()
    s3.put("train-00005.arrow", good[:-100])
    source = open_remote(_data("s3://bucket/set", node), "train")

    class Fix(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            s3.put("train-00005.arrow", good)

    fix = Fix(level=logging.WARNING)
    logging.getLogger("raydistill").addHandler(fix)
    try:
        assert source.read(5 * ROWS) == image_of("train", 5 * ROWS, SIZE)
    finally:
        logging.getLogger("raydistill").removeHandler(fix)


def test_a_server_that_vanishes_stalls_the_epoch_and_does_not_end_it(s3: S3, node: Path) -> None:
    source = open_remote(_data("s3://bucket/set", node, cache_mib=6), "train")
    order, restart = _order(source, "window(64)"), None
    for position in range(0, len(source), 16):
        if position == 256:
            s3.kill()
            restart = threading.Timer(float(os.environ.get("RAYDISTILL_TEST_OUTAGE_S", "4")), s3.start)
            restart.start()
        source.follow(order, 0, position)
        for index in order.at(0, np.arange(position, position + 16)).tolist():
            assert source.read(index) == image_of("train", index, SIZE)
    assert restart is not None
    restart.join()


class Vanishing(Origin):
    """A server that refuses connections while it is down."""

    is_down = True

    def open(self, name: str) -> BinaryIO:
        if self.is_down:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return super().open(name)


def test_an_outage_while_shards_are_fetched_ahead_is_over_when_it_is_over(
    packed: Path, node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_shards, "_PREFETCH_RETRY_S", 0.1)
    source = open_remote(_data(packed.as_uri(), node, cache_mib=40), "train")
    server = Vanishing(packed.as_uri(), retry_s=0.1)
    _shards(source).origin = server
    with caplog.at_level(logging.WARNING, "raydistill"):
        source.follow(_order(source, "none"), 0, 0)
        wait_until(lambda: caplog.text.count("will retry: data.path") >= remote_shards._NUM_THREADS)
    server.is_down = False
    assert source.read(0) == image_of("train", 0, SIZE)
    wait_until(lambda: len(list(node.glob("raydistill-*/*/data/train-*.arrow"))) == SHARDS)


def test_a_shard_that_is_damaged_or_missing_is_fetched_ahead_once(
    packed: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_shards, "_PREFETCH_RETRY_S", 0.1)
    copy = shutil.copytree(packed, tmp_path / "copy")
    content = (copy / "train-00002.arrow").read_bytes()
    (copy / "train-00002.arrow").write_bytes(content[:-9])
    source = open_remote(_data(copy.as_uri(), node, cache_mib=40), "train")
    (copy / "train-00005.arrow").unlink()
    with caplog.at_level(logging.WARNING, "raydistill"):
        source.follow(_order(source, "none"), 0, 0)
        wait_until(lambda: "will retry" in caplog.text or _shards(source)._failed.keys() == {2, 5})
    assert "will retry" not in caplog.text
    for shard, problem in ((2, "bytes, and its index says"), (5, "cannot be read")):
        with pytest.raises(DataError, match=problem) as error:
            source.read(shard * ROWS)
        assert error.value is _shards(source)._failed[shard]


class Faltering(Origin):
    """A server whose connections break after every 100 kB."""

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, _Breaking(super().open(name)))


class _Breaking:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, 100_000
        self.seek, self.close = file.seek, file.close

    def __enter__(self) -> _Breaking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, size: int) -> bytes:
        if not self._left:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        content = self._file.read(min(size, self._left))
        self._left -= len(content)
        return content


def test_patience_begins_anew_with_every_byte_that_comes(tmp_path: Path) -> None:
    root = make_records(tmp_path / "set", shards=1, rows=10, size=SIZE)
    (shard,) = read_index(root).splits["train"].shards
    (tmp_path / shard.file).touch()
    Faltering(root.as_uri(), retry_s=0.8).fetch(shard, tmp_path / shard.file)  # three failures, half a second each
    assert (tmp_path / shard.file).read_bytes() == (root / shard.file).read_bytes()


class Altering(Origin):
    """A server whose first answer has a wrong byte."""

    num_opened = 0

    def open(self, name: str) -> BinaryIO:
        self.num_opened += 1
        content = bytearray(super().open(name).read())
        content[self.num_opened] ^= self.num_opened <= 1
        return io.BytesIO(content)


def test_bytes_that_arrive_wrong_are_fetched_again(tmp_path: Path) -> None:
    root = make_records(tmp_path / "set", shards=1, rows=10, size=SIZE)
    (shard,) = read_index(root).splits["train"].shards
    origin = Altering(root.as_uri(), retry_s=0.8)
    (tmp_path / shard.file).touch()
    origin.fetch(shard, tmp_path / shard.file)
    assert (tmp_path / shard.file).read_bytes() == (root / shard.file).read_bytes()
    assert origin.num_opened == 2


def test_a_server_that_stays_away_is_one_line_after_the_patience(s3: S3, node: Path) -> None:
    source = open_remote(_data("s3://bucket/set", node), "train", retry_s=1)
    source.read(0)
    s3.kill()
    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        errors = [read.exception() for read in [pool.submit(source.read, 900) for _ in range(3)]]
    assert all(isinstance(error, DataError) for error in errors)
    (line,) = {str(error) for error in errors}
    assert re.match(r"data.path: s3://bucket/set/train-00028.arrow cannot be read for \d+ s: .", line)
    assert "\n" not in line
    assert time.monotonic() - began < 40


def test_a_disk_that_others_fill_makes_room_of_old_shards_and_then_is_an_error(packed: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        source = open_remote(_data(packed.as_uri(), small, cache_mib=7), "train")
        for shard in range(6):
            source.read(shard * ROWS)
        (small / "others").write_bytes(b"x" * (1 << 20))
        for shard in range(10):
            assert source.read(shard * ROWS) == image_of("train", shard * ROWS, SIZE)
        for path in small.glob("raydistill-*/*/data/train-*.arrow"):
            path.unlink()
        with open(small / "others", "ab") as file:
            file.write(b"x" * ((os.statvfs(small).f_bavail * os.statvfs(small).f_frsize) - 300_000))
        with pytest.raises(DataError, match=r"data.stage: \S+ has no room for the 1.0\d MiB of file:\S+; free some"):
            source.read(11 * ROWS)
        del source
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
