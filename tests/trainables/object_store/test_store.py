import errno
import gc
import io
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.s3 import S3, SECRET
from trainables.errors import StorageError
from trainables.failures import kind_of
from trainables.object_store import retries
from trainables.object_store import store as module
from trainables.object_store.store import ObjectStore


def test_objects_are_put_listed_read_and_removed(s3: S3, tmp_path: Path) -> None:
    store = ObjectStore("s3://bucket/prefix")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 80_000)  # 20 MB: several parts
    store.put("small", b"1")
    store.put("folder/large", large)
    assert {name: entry.size for name, entry in store.entries().items()} == {"small": 1, "folder/large": 20_480_000}
    assert [*store.entries("folder")] == ["folder/large"]
    assert store.get("folder/large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == large.read_bytes()
    store.put("small", b"2")
    assert store.read("small") == b"2"
    store.delete("small")
    store.delete("small")
    assert store.read("small") is None
    assert not store.get("small", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_object_that_is_replaced_while_it_is_read_is_the_old_one_or_the_new_one(s3: S3, tmp_path: Path) -> None:
    store, ended = ObjectStore("s3://bucket"), threading.Event()
    contents = [bytes([letter]) * size for letter, size in ((65, 10), (66, 20))]
    store.put("x", contents[0])

    def replace() -> None:
        while not ended.is_set():
            for content in contents:
                ObjectStore("s3://bucket").put("x", content)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(30):
            assert store.read("x") in contents
    finally:
        ended.set()
        thread.join()


def test_a_storm_of_503_is_waited_out_and_one_that_does_not_end_is_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 0.01)
    s3.refuse(503, 3)
    ObjectStore("s3://bucket/prefix").put("x", b"1")
    s3.refuse(503, 10**6)
    with pytest.raises(StorageError, match=r"^s3://bucket/prefix/x cannot be written.*: ") as error:
        ObjectStore("s3://bucket/prefix", retry_s=0.1).put("x", b"2")
    assert "\n" not in str(error.value)
    s3.refuse(503, 0)
    assert ObjectStore("s3://bucket/prefix").read("x") == b"1"


def test_the_s3_client_itself_tries_as_often_as_is_set(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.refuse(503, 1)
    with pytest.raises(StorageError, match="SLOW_DOWN"):
        ObjectStore("s3://bucket", retry_s=0).put("x", b"1")
    monkeypatch.setattr(module, "CLIENT_ATTEMPTS", 2)
    s3.refuse(503, 1)
    ObjectStore("s3://bucket", retry_s=0).put("x", b"1")


def test_what_will_not_change_is_refused_at_once_without_a_secret(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"^s3://nowhere/x cannot be written: NO_SUCH_BUCKET"):
        ObjectStore("s3://nowhere").put("x", b"")
    s3.refuse(403, 10)
    with pytest.raises(StorageError, match="ACCESS_DENIED") as error:
        ObjectStore("s3://bucket").put("x", b"")
    assert SECRET not in str(error.value)


class Broken(io.BytesIO):
    """Of a disk that fails behind the first chunk that is read, and is full from the first one that is written."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(errno.EIO, "Input/output error")
        return super().read(size)

    def write(self, chunk: object, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_failing_disk_gave_of_a_file_is_no_object(s3: S3, tmp_path: Path) -> None:
    store = ObjectStore("s3://bucket", retry_s=0)
    broken = patch.object(module, "open", lambda *_: Broken(bytes(20 << 20)), create=True)
    with broken, pytest.raises(StorageError, match=r"x cannot be written: .*Input/output error"):
        store.put("x", tmp_path / "x")
    gc.collect()
    assert not store.entries()


def test_a_server_that_refuses_to_begin_an_object_and_recovers_has_no_part_of_it(s3: S3) -> None:
    store = ObjectStore("s3://bucket", retry_s=0)
    s3.refuse(403, 1)
    with pytest.raises(StorageError, match="x cannot be written: ACCESS_DENIED"):
        store.put("x", bytes(16 << 20))
    gc.collect()
    assert not store.entries()


def test_a_full_disk_here_is_not_the_servers_fault(s3: S3, tmp_path: Path) -> None:
    store = ObjectStore("s3://bucket")
    store.put("x", b"1")
    full = patch.object(module, "open", lambda *_: Broken(), create=True)
    with full, pytest.raises(OSError, match="No space left") as error:
        store.get("x", tmp_path / "x")
    assert kind_of(error.value) == "disk"
    assert not list(tmp_path.iterdir())


def test_missing_credentials_are_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3.refuse(403, 10**6)  # as a real store answers what is not signed; moto takes it
    with pytest.raises(StorageError, match="cannot be written: ACCESS_DENIED"):
        ObjectStore("s3://bucket").put("x", b"")
