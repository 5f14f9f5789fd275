"""A packed set is read as its source was; whatever is damaged is reported in one line, and never ends the process."""

import contextlib
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.trainables.data.image_folder import open_folder
from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import MakeFolder, photo
from trainables.config import DataConfig
from trainables.data.augment import AUGMENTS
from trainables.data.decode import decode_image, with_shorter_side
from trainables.data.identity import fingerprint
from trainables.data.index import INDEX, UNFINISHED, check_file, read_index
from trainables.data.loader.loader import Loader
from trainables.data.pack.modes import Mode
from trainables.data.source import open_source
from trainables.data.sources import shards
from trainables.data.sources.layout import LayoutSource
from trainables.data.sources.records import RecordsSource, open_records
from trainables.errors import DataError

SMALL_SHARDS = 4000  # bytes: about three photos


@pytest.fixture
def images(make_folder: MakeFolder) -> Path:
    return make_folder(train={"cat": 7, "dog": 5, "emu": 1}, val={"dog": 3, "cat": 2})


@pytest.fixture
def packed(images: Path, tmp_path: Path) -> Path:
    pack_here(images, tmp_path / "packed", shard_bytes=SMALL_SHARDS)
    return tmp_path / "packed"


def message(path: Path, act: Callable[[RecordsSource], object] = len) -> str:
    """The one line with which a damaged set is refused, when it is opened or at `act`."""
    with pytest.raises(DataError) as caught:
        act(open_records(str(path), "train"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_packed_folder_is_read_as_the_folder_is(images: Path, packed: Path, split: str) -> None:
    ours, folder = (open_source(DataConfig(path=str(path)), split) for path in (packed, images))  # type: ignore[arg-type]
    assert isinstance(ours, RecordsSource)
    assert isinstance(folder, LayoutSource)
    assert ours.classes == folder.classes == ("cat", "dog", "emu")
    assert ours.labels_N.tolist() == folder.labels_N.tolist()
    assert ours.labels_N.dtype == np.int64
    for index in range(len(folder)):
        assert bytes(ours.read(index)) == folder.read(index)
        assert ours.name(index) == folder.name(index)
        assert decode_image(ours.read(index)).size == (ours.widths_N[index], ours.heights_N[index])
    assert len(ours) == len(folder)


def test_samples_lie_in_several_shards_of_about_the_size_that_was_given(packed: Path) -> None:
    shards = read_index(packed).splits["train"].shards
    assert len(shards) > 2
    assert max(shard.bytes for shard in shards) < 2 * SMALL_SHARDS
    source = open_records(str(packed), "train")
    locations = [source.location(index) for index in range(len(source))]
    assert locations == [(number, row) for number, shard in enumerate(shards) for row in range(shard.rows)]


def test_pixels_are_read_as_height_width_and_color(images: Path, tmp_path: Path) -> None:
    pack_here(images, tmp_path / "raw", Mode(raw=20))
    source = open_records(str(tmp_path / "raw"), "train")
    pixels_HWC = source.read(0)
    expected = with_shorter_side(decode_image(open_folder(images, "train").read(0)), 20)
    assert isinstance(pixels_HWC, np.ndarray)
    assert (source.widths_N[0], source.heights_N[0]) == expected.size != (20, 20)
    assert np.array_equal(pixels_HWC, np.asarray(expected))


def _squares(root: Path) -> Path:
    """12 training and 2 validation images of 20 by 20 pixels, in files that lose nothing."""
    for split, count in (("train", 12), ("val", 2)):
        (root / split / "a").mkdir(parents=True)
        for number in range(count):
            photo(number, 20, 20).save(root / split / "a" / f"{number:02}.png")
    return root


def test_pixels_of_one_size_are_read_together_as_they_are_one_by_one(tmp_path: Path) -> None:
    pack_here(_squares(tmp_path / "squares"), tmp_path / "raw", Mode(raw=20), shard_bytes=6000)
    source = open_records(str(tmp_path / "raw"), "train")
    assert source.size == 20
    assert source.shard_sizes != [12]
    for indices in (range(12), [3, 4, 11, 0, 0, 1, 2], [5]):  # neighbours across shards, leaps, repetitions
        out_RHWC = np.empty((len(indices), 20, 20, 3), dtype=np.uint8)
        source.read_batch(np.array(indices), out_RHWC)
        for pixels_HWC, index in zip(out_RHWC, indices, strict=True):
            assert (pixels_HWC == source.read(index)).all()


def test_files_and_pixels_of_several_sizes_have_no_common_size(images: Path, packed: Path, tmp_path: Path) -> None:
    pack_here(images, tmp_path / "raw", Mode(raw=20))
    assert open_records(str(tmp_path / "raw"), "train").size is None
    assert open_records(str(packed), "train").size is None


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("workers", [0, 3])
def test_packed_pixels_give_the_batches_of_the_files_that_they_come_from(tmp_path: Path, augment: str, workers: int) -> None:
    pack_here(_squares(tmp_path / "squares"), tmp_path / "raw", Mode(raw=20), shard_bytes=6000)
    of_both = []
    for name in ("squares", "raw"):
        data = DataConfig.model_validate(
            {"path": str(tmp_path / name), "image_size": 20, "augment": augment, "global_batch_size": 5, "last_batch": "short"}
        )
        source = open_source(data, "train")
        loader = Loader(source, data, split="train", seed=3, rank=0, world_size=1, loader_workers=workers)
        of_both.append([batch.images_BCHW.clone() for batch in loader.epoch(1)])
        loader.close()
    assert [len(images_BCHW) for images_BCHW in of_both[0]] == [5, 5, 2]
    assert all(torch.equal(files, pixels) for files, pixels in zip(*of_both, strict=True))


def test_several_threads_read_at_once(images: Path, packed: Path) -> None:
    folder, source = open_folder(images, "train"), open_records(str(packed), "train")
    expected = [folder.read(index) for index in range(len(folder))]
    with ThreadPoolExecutor(8) as pool:
        for content in pool.map(lambda _: [source.read(index) for index in range(len(source))], range(8)):
            assert content == expected


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_source_goes_on_in_another_process(packed: Path, method: str) -> None:
    source = open_records(str(packed), "train")
    first = source.read(0)
    with get_context(method).Pool(1) as pool:
        assert pool.apply(source.read, (0,)) == first
        assert pool.apply(source.name, (12,)) == "train/emu/000.jpg"
    assert source.read(0) == first


def test_a_source_that_travels_is_small_compared_with_what_it_reads(packed: Path) -> None:
    source = open_records(str(packed), "train")
    source.read(0)
    content = pickle.dumps(source)
    assert len(content) < sum(shard.bytes for shard in read_index(packed).splits["train"].shards) / 3
    assert pickle.loads(content).read(3) == source.read(3)


def test_files_are_closed_with_their_source(packed: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    source = open_records(str(packed), "train")
    for index in range(len(source)):
        source.read(index)
    assert len(os.listdir("/dev/fd")) > before
    del source
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.processes
def test_a_low_limit_on_open_files_is_raised(packed: Path) -> None:
    code = (
        "import resource, sys; from trainables.data.sources.records import open_records;"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (9, hard));"
        "source = open_records(sys.argv[1], 'train');"
        "print(sum(len(source.read(index)) > 0 for index in range(len(source))));"
        "others = [open('/dev/null') for _ in range(9)]"
    )
    done = subprocess.run([sys.executable, "-c", code, str(packed)], capture_output=True, text=True, check=True)
    assert done.stdout == "13\n"


def test_where_the_limit_on_open_files_may_not_be_raised_fewer_stay_open(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (9, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    before = len(os.listdir("/dev/fd"))
    source = open_records(str(packed), "train")
    assert all(source.read(index) for index in range(len(source)))
    assert len(os.listdir("/dev/fd")) == before + 2


def test_files_that_were_opened_longest_ago_are_closed_where_there_are_too_many(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_records(str(packed), "train")
    expected, before = [source.read(index) for index in range(len(source))], len(os.listdir("/dev/fd"))
    del source
    monkeypatch.setattr(shards, "_max_open", lambda num_files: 1)
    source = open_records(str(packed), "train")
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(source.read, range(len(source)))) == expected
    assert len(source.shard_sizes) > 2
    assert len(os.listdir("/dev/fd")) == before - len(source.shard_sizes) + 1


def test_a_source_goes_to_another_process_without_its_rows(packed: Path) -> None:
    source = open_records(str(packed), "train")
    pickled = pickle.dumps(source)
    assert source.labels_N.tobytes() not in pickled
    again = pickle.loads(pickled)
    assert [again.read(index) for index in range(len(again))] == [source.read(index) for index in range(len(source))]
    assert fingerprint(again) == fingerprint(source)


# What is damaged


def test_an_index_that_is_not_one_is_refused(packed: Path) -> None:
    index = packed / INDEX
    whole = json.loads(index.read_bytes())

    def problem(**changes: object) -> str:
        index.write_text(json.dumps({**whole, **changes}))
        return message(packed)

    assert "has version 2, and this raydistill reads 1; update raydistill" in problem(version=2)
    assert "not the index of a packed set (format: " in problem(format="other")
    assert "(classes: " in problem(classes=7)
    assert "(version: " in problem(version="2\n")
    assert "(a b: " in problem(**{"a\nb": 1})
    assert "has no split val" in problem(splits={"train": whole["splits"]["train"]})
    outside = {**whole["splits"]["train"], "rows": {**whole["splits"]["train"]["rows"], "file": "../rows.arrow"}}
    assert "splits.train.rows.file" in problem(splits={"train": outside, "val": whole["splits"]["val"]})
    assert "does not agree with its index" in problem(classes=["cat"])
    for content in (b"", b"{", b"[]", b"\xff\xfe", b"null"):
        index.write_bytes(content)
        assert "is not the index of a packed set" in message(packed)
    index.unlink()
    (packed / UNFINISHED).mkdir()
    assert "is only partly packed; run the same `distill pack` again to finish it" in message(packed)
    shutil.rmtree(packed)
    assert "index.json cannot be read: No such file" in message(packed)


def test_an_image_folder_with_a_file_of_the_indexs_name_stays_an_image_folder(images: Path) -> None:
    (images / INDEX).write_text("{}")
    assert open_folder(images, "train").name(0).startswith("train/")


def test_a_shard_of_another_size_or_none_is_refused(packed: Path) -> None:
    shard = packed / "train-00001.arrow"
    size = shard.stat().st_size
    for length in (0, 8, size - 1, size + 8):
        os.truncate(shard, length)
        assert f"{shard} has {length:,} bytes, and its index says {size:,}; copy or pack it again" in message(packed)
    shard.unlink()
    assert f"{shard} cannot be read: No such file" in message(packed)
    shard.mkdir()
    message(packed)


def test_rows_that_are_not_those_of_the_index_are_refused(packed: Path) -> None:
    rows = packed / "train.rows.arrow"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1])
    assert f"{rows} is not the file that its index describes" in message(packed)
    rows.write_bytes(whole.replace(b"label", b"lebal"))
    assert f"{rows} is not the file that its index describes" in message(packed)
    rows.unlink()
    assert f"{rows} cannot be read" in message(packed)


def _with_rows(packed: Path, content: bytes) -> None:
    """Write rows together with their checksum: what only an adversary, or a mistake of ours, would do."""
    (packed / "train.rows.arrow").write_bytes(content)
    index = json.loads((packed / INDEX).read_bytes())
    index["splits"]["train"]["rows"] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (packed / INDEX).write_text(json.dumps(index))


def test_rows_that_point_outside_their_shard_are_refused(packed: Path) -> None:
    batch = pa.ipc.open_file(packed / "train.rows.arrow").get_batch(0)
    for column, values in (
        ("offset", [-1, 2**62, 10**6]),
        ("size", [-1, 2**62, 10**6]),
        ("label", [-1, 3]),
        ("width", [-1]),
        ("height", [-1]),
    ):
        for value in values:
            changed = batch.column(column).to_numpy().copy()
            changed[4] = value
            column_index = batch.schema.get_field_index(column)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch.set_column(column_index, batch.schema.field(column_index), pa.array(changed)))
            _with_rows(packed, sink.getvalue().to_pybytes())
            assert "does not agree with its index" in message(packed), (column, value)


def test_a_shard_that_is_cut_off_while_it_is_read_is_an_error_and_not_a_crash(packed: Path) -> None:
    source = open_records(str(packed), "train")
    source.read(0)
    os.truncate(packed / "train-00000.arrow", 100)
    with pytest.raises(DataError, match=r"train-00000.arrow was cut off while it was in use"):
        source.read(0)
    os.truncate(packed / "train-00001.arrow", 100)  # not opened before
    for _ in range(2):
        with pytest.raises(DataError, match=r"train-00001.arrow has 100 bytes, and its index says"):
            source.read(5)


def test_a_shard_that_is_replaced_under_a_running_job_does_not_disturb_it(images: Path, packed: Path) -> None:
    source = open_records(str(packed), "train")
    before = source.read(0)
    other = packed / "other"
    other.write_bytes(b"x" * 10)
    other.replace(packed / "train-00000.arrow")
    assert source.read(0) == before


@pytest.mark.parametrize("in_place", [True, False])
def test_a_shard_that_was_replaced_before_it_was_first_read_is_an_error(packed: Path, in_place: bool) -> None:
    source = open_records(str(packed), "train")
    shard, other = packed / "train-00001.arrow", packed / "other"
    written = shard if in_place else other
    written.write_bytes(bytes(shard.stat().st_size))
    os.utime(written, ns=(1, 1))
    written.replace(shard)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train-00001.arrow was replaced while it was in use; resume once"):
            source.read(5)


def test_a_disk_that_fails_is_one_line_that_names_the_shard(packed: Path) -> None:
    """The kernel's own error: nothing is mapped at the beginning of a process's memory, and reading it is EIO."""
    data = DataConfig(path=str(packed), global_batch_size=4, image_size=16)
    source = open_source(data, "train")
    source.read(0)
    (handle,) = [int(name) for name in os.listdir("/proc/self/fd") if _target(name) == str(packed / "train-00000.arrow")]
    failing = os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(failing, handle)
    os.close(failing)
    for workers in (0, 2):
        loader = Loader(source, data, split="train", seed=0, rank=0, world_size=1, loader_workers=workers)
        with pytest.raises(DataError, match=r"^data.path: \S+/train-00000.arrow cannot be read: Input/output error; ") as caught:
            list(loader.epoch(0))
        assert "\n" not in str(caught.value)
        loader.close()


def _target(handle: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{handle}")
    return ""


@pytest.mark.parametrize("name", ["train.rows.arrow", INDEX])
def test_a_disk_that_fails_under_the_small_files_is_one_line(packed: Path, name: str) -> None:
    (packed / name).unlink()
    (packed / name).symlink_to("/proc/self/mem")
    assert f"{name} cannot be read: Input/output error" in message(packed)


def test_shards_of_more_rows_than_memory_holds_are_refused_before_any_is_taken(packed: Path) -> None:
    index = json.loads((packed / INDEX).read_bytes())
    index["splits"]["train"]["shards"][0]["rows"] = 2**61
    (packed / INDEX).write_text(json.dumps(index))
    assert "does not agree with its index" in message(packed)


def test_the_name_of_a_sample_in_a_damaged_shard_is_its_place(packed: Path) -> None:
    source = open_records(str(packed), "train")
    shard = packed / "train-00000.arrow"
    shard.write_bytes(b"x" * shard.stat().st_size)
    assert source.name(1) == "train-00000.arrow[1]"


def test_every_files_checksum_finds_a_single_bit(packed: Path) -> None:
    for file in read_index(packed).files():
        assert check_file(packed, file) is None
        path = packed / file.file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert check_file(packed, file) == f"{path} does not match the checksum in its index"
        path.write_bytes(content[:-1])
        assert "bytes, and its index says" in str(check_file(packed, file))
        path.unlink()
        assert "cannot be read: No such file" in str(check_file(packed, file))


# The format


def test_the_documents_reader_reads_a_packed_set_with_pyarrow_alone(images: Path, packed: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "records.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 12
    command = [sys.executable, "-c", code, str(packed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env={**os.environ, "PYTHONPATH": ""})
    folder = open_folder(images, "train")
    expected = [
        f"{folder.name(index)} {folder.classes[folder.labels_N[index]]} {len(folder.read(index))}" for index in range(len(folder))
    ]
    assert done.stdout.splitlines() == expected


@pytest.mark.processes
def test_opening_and_reading_imports_no_pandas(packed: Path) -> None:
    code = (
        "import sys; from trainables.data.sources.records import open_records; source = open_records(sys.argv[1], 'train');"
        "source.read(0); source.name(0); assert 'pandas' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(packed)], check=True)


# In training


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_loader_gives_the_same_batches_of_a_packed_set_as_of_its_folder(images: Path, packed: Path, split: str) -> None:
    def batches(path: Path) -> list[tuple[object, ...]]:
        data = DataConfig(path=str(path), global_batch_size=4, image_size=16, augment="crop_flip", last_batch="short")
        source = open_source(data, split)  # type: ignore[arg-type]
        loader = Loader(source, data, split=split, seed=3, rank=0, world_size=1, loader_workers=2)  # type: ignore[arg-type]
        found = [
            tuple(part.tolist() for part in (batch.images_BCHW, batch.labels_B, batch.indices_B)) for batch in loader.epoch(1)
        ]
        loader.close()
        return found

    assert batches(packed) == batches(images)


def test_the_labels_of_a_packed_set_may_be_written_to(images: Path, packed: Path) -> None:
    def labels(path: Path) -> torch.Tensor:
        data = DataConfig(path=str(path), global_batch_size=4)
        source = open_source(data, "train")
        loader = Loader(source, data, split="train", seed=3, rank=0, world_size=1, loader_workers=0)
        with contextlib.closing(loader):
            return loader.labels_M

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = labels(packed)
    ours += 1
    assert torch.equal(ours, labels(images) + 1)


def test_a_shard_that_fails_while_a_loader_reads_it_ends_the_epoch_with_its_name(packed: Path) -> None:
    data = DataConfig(path=str(packed), global_batch_size=4, image_size=16)
    loader = Loader(open_source(data, "train"), data, split="train", seed=0, rank=0, world_size=1, loader_workers=2)
    os.truncate(packed / "train-00000.arrow", 10)
    with pytest.raises(DataError, match=r"train-00000.arrow has 10 bytes"):
        list(loader.epoch(0))
    loader.close()
