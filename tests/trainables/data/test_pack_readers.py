"""Every layout that can be packed gives the same images, names and labels as the library that it was made with."""

import gzip
import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainables.data.packed import contents, names, noticed, packed, refusal, write_tar
from tests.trainables.data.photos import MakeFolder, encoded, photo
from trainables.config import DataConfig
from trainables.data.pack.modes import Mode
from trainables.data.pack.readers import READERS, find_reader
from trainables.data.pack.readers.protobuf import WireError, example_features, parse_datum
from trainables.data.source import open_source
from trainables.errors import DataError

JPEGS = [encoded(photo(seed), "JPEG") for seed in range(6)]


def test_a_path_without_a_known_layout_is_refused_with_those_that_are(tmp_path: Path) -> None:
    layouts = "CIFAR, ImageNet as downloaded, LMDB, Parquet, TFRecord, WebDataset, list of images, image folder"
    assert f"does not exist; give one of these layouts: {layouts}" in refusal(tmp_path / "no")
    (tmp_path / "text").write_text("")
    assert f"is of no layout that can be packed: {layouts}" in refusal(tmp_path)
    assert "is a single file; give the folder with the files of both splits" in refusal(tmp_path / "text")
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    assert f"its folder {tmp_path}/cifar-10-batches-bin is (CIFAR): give that one" in refusal(tmp_path)


def test_a_split_without_files_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tars"
    root.mkdir()
    write_tar(root / "restraint.tar", [("0.jpg", JPEGS[0]), ("0.cls", b"0")])
    assert "no tars for training; put one of these words into their paths: train, training" in refusal(root)
    (root / "restraint.tar").rename(root / "train.tar")
    assert "no tars for validation; put one of these words into their paths: val, valid, validation, dev, test" in refusal(root)


def test_folders_with_a_splits_word_among_others_are_refused_with_how_to_rename_them(tmp_path: Path) -> None:
    for split in ("training_set", "test_set"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat/0.jpg").write_bytes(JPEGS[0])
    moves = f"mv {tmp_path}/training_set {tmp_path}/train && mv {tmp_path}/test_set {tmp_path}/val"
    assert moves in refusal(tmp_path)
    (tmp_path / "training_set").rename(tmp_path / "train_val_set")
    (tmp_path / "test_set").rename(tmp_path / "other")
    assert "mv " not in refusal(tmp_path)


# Image folders


def test_an_image_folder_keeps_unreadable_files_out_and_lists_them(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 3, "b": 2}, val={"a": 1})
    (root / "train" / "a" / "001.jpg").write_bytes(b"no image")
    (root / "train" / "b" / "gone.jpg").symlink_to(tmp_path / "nowhere")
    train, _ = packed(root)
    assert find_reader(root) == "image folder"
    assert names(train) == ["train/a/000.jpg", "train/a/002.jpg", "train/b/000.jpg", "train/b/001.jpg"]
    assert train.labels_N.tolist() == [0, 0, 1, 1]
    report = (tmp_path / "images-packed" / "unreadable.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in report] == [
        {"split": "train", "name": "train/a/001.jpg", "reason": "not an image"},
        {"split": "train", "name": "train/b/gone.jpg", "reason": "cannot be read: No such file or directory"},
    ]


def test_a_large_file_is_read_whole(make_folder: MakeFolder) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1})
    large = encoded(photo(1, 900, 900), "BMP")
    assert len(large) > 2 * 2**20
    (root / "train" / "a" / "large.bmp").write_bytes(large)
    assert contents(packed(root)[0])[1] == large


# CIFAR


def write_cifar10(root: Path, size: int = 4) -> np.ndarray:
    """A tiny CIFAR-10; returns the training images (5·size, 32, 32, 3)."""
    root.mkdir()
    noise = np.random.default_rng(0)
    images = noise.integers(0, 256, (6 * size, 32, 32, 3), dtype=np.uint8)
    labels = noise.integers(0, 10, 6 * size)
    for number, file in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        part = range(number * size, number * size + size)
        (root / file).write_bytes(b"".join(bytes([labels[i]]) + images[i].transpose(2, 0, 1).tobytes() for i in part))
    (root / "batches.meta.txt").write_text("\n".join(f"class{n}" for n in range(10)) + "\n\n")
    return images[: 5 * size]


def test_cifar_10s_binary_files_become_pixels(tmp_path: Path) -> None:
    images = write_cifar10(tmp_path / "cifar")
    train, val = packed(tmp_path / "cifar")
    assert (len(train), len(val)) == (20, 4)
    assert train.classes == tuple(f"class{n}" for n in range(10))
    assert all((train.read(index) == images[index]).all() for index in range(20))
    assert train.name(5) == "data_batch_2.bin[1]"
    raw = (tmp_path / "cifar" / "data_batch_2.bin").read_bytes()
    assert train.labels_N[5] == raw[3073]


def test_cifar_100_has_its_fine_labels(tmp_path: Path) -> None:
    root = tmp_path / "cifar100"
    root.mkdir()
    for file in ("train.bin", "test.bin"):
        (root / file).write_bytes(b"".join(bytes([7, fine]) + bytes(3072) for fine in (3, 99)))
    (root / "fine_label_names.txt").write_text("\n".join(f"fine{n}" for n in range(100)))
    train, _ = packed(root)
    assert train.labels_N.tolist() == [3, 99]
    assert train.classes[99] == "fine99"


def test_a_damaged_cifar_file_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "cifar"
    write_cifar10(root)
    file = root / "data_batch_3.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "data_batch_3.bin is truncated (12,291 bytes, not a multiple of 3073); download it again" in refusal(root)
    file.write_bytes(bytes([10]) + whole[1:])
    assert "data_batch_3.bin: there are labels without a class name: 10" in refusal(root)
    file.unlink()
    assert "cannot be read: No such file" in refusal(root)


def python2_batch(labels: list[int], data: bytes) -> bytes:
    """A batch as Python 2's pickle wrote those of cifar-10-python.tar.gz, with its texts as raw bytes."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R(K\1K" + bytes([len(labels)])
    array += b"M\x00\x0c\x86cnumpy\ndtype\nU\2u1K\0K\1\x87R(K\3U\1|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89"
    array += b"T" + struct.pack("<i", len(data)) + data + b"tb"
    return b"\x80\2}(U\6labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eU\4data" + array + b"u."


def write_cifar_python(root: Path, pixels: np.ndarray) -> None:
    """A CIFAR-10 for Python with 4 images a batch."""
    root.mkdir()
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"ant", b"bee"]}))
    for number, file in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        (root / file).write_bytes(python2_batch([0, 1, 1, 0], pixels[4 * number : 4 * number + 4].tobytes()))


def test_cifars_batches_for_python_are_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    write_cifar_python(tmp_path / "cifar", pixels)
    train, val = packed(tmp_path / "cifar")
    assert (len(train), len(val), train.classes, train.labels_N[:4].tolist()) == (20, 4, ("ant", "bee"), [0, 1, 1, 0])
    assert all((train.read(n) == pixels[n].reshape(3, 32, 32).transpose(1, 2, 0)).all() for n in range(20))


def test_a_pickle_in_cifars_place_runs_no_code(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (ran,)

    write_cifar_python(tmp_path / "cifar", np.zeros((24, 3072), dtype=np.uint8))
    for content in ({"data": Runs()}, {"data": np.zeros(3, dtype=object)}, {"labels": [0], "data": np.zeros((1, 3072))}, [1]):
        (tmp_path / "cifar" / "data_batch_2").write_bytes(pickle.dumps(content))
        assert "data_batch_2 is damaged, or not a CIFAR batch (" in refusal(tmp_path / "cifar")
    as_text = pickle.dumps({"labels": [0], "data": np.full((1, 3072), 255, dtype=np.uint8)}, protocol=0)
    (tmp_path / "cifar" / "data_batch_2").write_bytes(as_text)
    assert "data_batch_2 is damaged, or not a CIFAR batch (" in refusal(tmp_path / "cifar")
    assert not ran.exists()


def test_cifar_100_for_python_has_its_fine_labels(tmp_path: Path) -> None:
    root = tmp_path / "cifar"
    root.mkdir()
    (root / "meta").write_bytes(pickle.dumps({"fine_label_names": ["x", "y"], "coarse_label_names": ["z"]}))
    for file in ("train", "test"):
        batch = {"fine_labels": [1, 0], "coarse_labels": [0, 0], "data": np.arange(6144).reshape(2, 3072).astype(np.uint8)}
        (root / file).write_bytes(pickle.dumps(batch))
    train, _ = packed(root)
    assert (train.classes, train.labels_N.tolist(), train.name(1)) == (("x", "y"), [1, 0], "train[1]")
    (root / "train").write_bytes((root / "test").read_bytes()[:3000])
    assert f"{root}/train is truncated (" in refusal(root)


def test_cifars_pixels_can_become_jpegs(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    train, _ = packed(tmp_path / "cifar", Mode(max_side=24))
    assert contents(train)[0].startswith(b"\xff\xd8")
    assert (train.widths_N == 24).all()


# WebDataset


def write_webdataset(root: Path, labels: Callable[[int], str] = str) -> None:
    root.mkdir()
    for number, file in enumerate(("imagenet-train-000.tar", "imagenet-train-001.tar", "imagenet-val-000.tar")):
        members = []
        for key in range(2):
            members += [
                (f"n0/{number}{key}.cls", labels(key).encode() + b"\n"),
                (f"n0/{number}{key}.jpg", JPEGS[2 * number + key]),
            ]
            members += [(f"n0/{number}{key}.json", b"{}")]
        write_tar(root / file, [("n0/" + "long" * 60 + ".txt", b""), *members])


def test_webdataset_tars_are_read_by_their_members_names(tmp_path: Path) -> None:
    write_webdataset(tmp_path / "wds")
    train, val = packed(tmp_path / "wds")
    assert contents(train) == JPEGS[:4]
    assert contents(val) == JPEGS[4:]
    assert train.labels_N.tolist() == [0, 1, 0, 1]
    assert train.classes == ("0", "1")
    assert names(train)[2] == "imagenet-train-001.tar/n0/10.jpg"


def test_webdatasets_classes_may_be_names_and_numbers_need_not_begin_at_0(tmp_path: Path) -> None:
    write_webdataset(tmp_path / "names", lambda key: ("zebra", "ant")[key])
    assert packed(tmp_path / "names")[0].classes == ("ant", "zebra")
    write_webdataset(tmp_path / "numbers", lambda key: ("10", "9")[key])
    train, _ = packed(tmp_path / "numbers")
    assert train.classes == ("10", "9")
    assert train.labels_N.tolist() == [0, 1, 0, 1]


def test_tars_that_are_damaged_or_incomplete_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "wds"
    write_webdataset(root)
    file = root / "imagenet-train-001.tar"
    whole = file.read_bytes()
    for length in (0, 100, 512, 1300, len(JPEGS[0]) + 2000):
        file.write_bytes(whole[:length])
        assert re.search(rf"{file} is truncated \(.+\); download it again", refusal(root))
    file.write_bytes(whole[: 512 * 3] + b"x" * 512 + whole[512 * 4 :])
    assert f"{file} is damaged, or not a tar (at byte 1536); use another copy" in refusal(root)
    write_tar(file, [("a/1.jpg", JPEGS[0]), ("a/2.jpg", JPEGS[0]), ("a/2.cls", b"1")])
    assert "the sample a/1 has no .cls and no .json with its class" in refusal(root)
    write_tar(file, [("2.cls", b"1")])
    assert "the sample 2 has no image" in refusal(root)
    write_tar(file, [("2.cls", b"7"), ("2.jpg", JPEGS[0])])
    file.rename(root / "x-val.tar")
    assert "validation has labels that train does not have: 7" in refusal(root)
    for name in ("x-val.tar.gz", "x-val.TGZ"):
        (root / name).write_bytes(gzip.compress((root / "x-val.tar").read_bytes()))
        (root / "x-val.tar").rename(tmp_path / "x-val.tar")
        assert f"{root}/{name} is compressed, so its samples cannot be read individually: run `" in refusal(root)
        (root / name).unlink()
        (tmp_path / "x-val.tar").rename(root / "x-val.tar")
    (root / "x-val.tar").rename(root / "x-val.TAR")
    assert "validation has labels that train does not have: 7" in refusal(root)


@pytest.mark.parametrize(("kind", "write"), [("WebDataset", write_webdataset), ("TFRecord", lambda root: write_tfrecords(root))])
def test_a_file_of_many_samples_that_has_gone_is_an_error_and_drops_none(
    tmp_path: Path, kind: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "set")
    reader = READERS[kind](tmp_path / "set")
    locations = reader.listing().splits["train"].locations
    for path in (tmp_path / "set").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError):
        list(reader.read(locations))


# TFRecord


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, bytes | int | float]) -> bytes:
    """A serialized tf.Example, written from the specification."""

    def feature(value: bytes | int | float) -> bytes:
        if isinstance(value, bytes):
            return message(1, message(1, value))
        return (
            message(3, message(1, varint(value))) if isinstance(value, int) else message(2, message(1, struct.pack("<f", value)))
        )

    entries = (message(1, message(1, name.encode()) + message(2, feature(value))) for name, value in features.items())
    return message(1, b"".join(entries))


def tfrecord(records: list[bytes]) -> bytes:
    def masked(content: bytes) -> bytes:
        crc = google_crc32c.value(content)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    heads = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(head + masked(head) + record + masked(record) for head, record in zip(heads, records, strict=True))


def imagenet_example(label: int, jpeg: bytes) -> bytes:
    synset = f"n{label:08}".encode()
    return example(
        {
            "image/height": 32,
            "image/encoded": jpeg,
            "image/class/label": label,
            "image/class/synset": synset,
            "image/object/bbox/xmin": 0.5,
            "image/filename": synset + b"_1.JPEG",
        }
    )


def write_tfrecords(root: Path) -> None:
    root.mkdir()
    for number, file in enumerate(("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")):
        (root / file).write_bytes(tfrecord([imagenet_example(label, JPEGS[2 * number + label - 1]) for label in (1, 2)]))


def test_imagenets_tfrecords_are_read_without_tensorflow(tmp_path: Path) -> None:
    write_tfrecords(tmp_path / "tf")
    train, val = packed(tmp_path / "tf")
    assert contents(train) == JPEGS[:4]
    assert contents(val) == JPEGS[4:]
    assert train.classes == ("n00000001", "n00000002")
    assert train.labels_N.tolist() == [0, 1, 0, 1]
    assert val.name(1) == "validation-00000-of-00001/n00000002_1.JPEG"


def test_tfds_names_of_features_are_known_too(tmp_path: Path) -> None:
    root = tmp_path / "tfds"
    root.mkdir()
    for file in ("x-train.tfrecord-00000-of-00001", "x-test.tfrecord-00000-of-00001"):
        (root / file).write_bytes(tfrecord([example({"image": JPEGS[0], "label": 0})]))
    train, _ = packed(root)
    assert contents(train) == JPEGS[:1]
    assert train.name(0) == "x-train.tfrecord-00000-of-00001/12"


def test_a_damaged_tfrecord_is_refused_or_left_out(tmp_path: Path) -> None:
    root = tmp_path / "tf"
    write_tfrecords(root)
    file = root / "train-00000-of-00002"
    whole = file.read_bytes()
    for length in (5, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert str(file) in refusal(root)
    file.write_bytes(b"x" + whole[1:])
    assert "is damaged, or not a TFRecord file (at byte 0)" in refusal(root)
    file.write_bytes(tfrecord([b"\x07"]))
    assert "the record at byte 12 is no tf.Example" in refusal(root)
    file.write_bytes(tfrecord([example({"image/encoded": JPEGS[0]})]))
    assert "has no image/class/label or label" in refusal(root)
    inside = whole.index(JPEGS[0]) + 200
    file.write_bytes(whole[:inside] + bytes([whole[inside] ^ 1]) + whole[inside + 1 :])
    train, _ = packed(root)
    assert contents(train) == JPEGS[1:4]
    assert "a damaged record: its checksum is another" in (tmp_path / "tf-packed" / "unreadable.jsonl").read_text()


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_compressed_tfrecords_are_refused_with_the_line_that_makes_them_readable(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    root = tmp_path / "a set"
    write_tfrecords(root)
    file = root / "train-00000-of-00002"
    file.write_bytes(compress(file.read_bytes()))
    line = re.search("run `(.+)`", refusal(root))
    assert line
    subprocess.run(line[1].replace("python ", f"{sys.executable} "), shell=True, check=True)
    assert contents(packed(root)[0]) == JPEGS[:4]


def test_a_tfrecord_that_is_named_as_compressed_is_one_too(tmp_path: Path) -> None:
    root = tmp_path / "tf"
    root.mkdir()
    for split in ("train", "val"):
        (root / f"{split}.tfrecord.gz").write_bytes(gzip.compress(tfrecord([imagenet_example(1, JPEGS[0])])))
    assert f"run `gunzip {root}/train.tfrecord.gz`" in refusal(root)


@pytest.mark.parametrize("file", ["train.tfrecord", "train.tar", "train.parquet", "train.lmdb"])
def test_a_file_that_is_another_than_its_name_says_is_named_by_what_it_is(tmp_path: Path, file: str) -> None:
    root = tmp_path / "set"
    root.mkdir()
    (root / file).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n" + bytes(500))
    (root / file.replace("train", "val")).write_bytes(b"")
    assert f"{root}/{file} is a Git LFS pointer, not the file itself: run `git lfs pull`" in refusal(root)
    (root / file).write_bytes(b"<!DOCTYPE html>" + bytes(500))
    assert "is a web page, not a" in refusal(root)


def test_archives_are_refused_with_the_line_that_unpacks_them(tmp_path: Path, make_folder: MakeFolder) -> None:
    source = make_folder(train={"a": 1, "b": 1}, val={"a": 1})
    for kind, suffix in (("zip", ".zip"), ("gztar", ".tar.gz")):
        archive = Path(shutil.make_archive(str(tmp_path / "my flowers"), kind, tmp_path, source.name))
        match = re.search(r"is an archive: run `(.+)` and give (.+), or the folder in it", refusal(archive))
        assert match
        if shutil.which("unzip") or suffix != ".zip":
            subprocess.run(match[1], shell=True, check=True)
            assert f"its folder {match[2]}/{source.name} is (image folder): give that one" in refusal(Path(match[2]))
            shutil.rmtree(match[2])
    shutil.rmtree(source)
    assert f"my flowers.tar.gz is the first of several archives: run `mkdir -p '{tmp_path}/my flowers' && " in refusal(tmp_path)


def test_the_parser_agrees_with_protobufs_own() -> None:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="datum.proto", package="t", syntax="proto2")
    datum = file.message_type.add(name="Datum")
    kinds = {"channels": 5, "height": 5, "width": 5, "data": 12, "label": 5, "encoded": 8}
    for number, name in ((1, "channels"), (2, "height"), (3, "width"), (4, "data"), (5, "label"), (7, "encoded")):
        datum.field.add(name=name, number=number, type=kinds[name], label=1)
    floats = datum.field.add(name="float_data", number=6, type=2, label=3)
    floats.options.packed = False
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Datum"))(
        channels=3, height=2, width=300, data=b"x" * 1800, label=-5, encoded=False, float_data=[1.0, 2.0]
    )
    parsed = parse_datum(memoryview(made.SerializeToString()))
    assert (parsed.channels, parsed.height, parsed.width, parsed.label, parsed.encoded) == (3, 2, 300, -5, False)
    assert bytes(parsed.data) == b"x" * 1800


def test_mutated_messages_give_features_or_an_error_and_nothing_else() -> None:
    noise = np.random.default_rng(0)
    whole = imagenet_example(3, JPEGS[0][:200])
    assert example_features(memoryview(whole))["image/class/label"] == 3
    assert example_features(memoryview(example({"n": -1})))["n"] == -1
    for _ in range(3000):
        mutated = bytearray(whole[: noise.integers(1, len(whole) + 1)])
        for position in noise.integers(0, len(mutated), 3):
            mutated[position] = noise.integers(0, 256)
        for parse in (example_features, parse_datum):
            try:
                parse(memoryview(mutated))
            except WireError:
                continue


# Parquet


def write_parquet(root: Path, class_names: list[str] | None = None, labels: tuple[int | str | None, ...] = (0, 1)) -> None:
    (root / "data").mkdir(parents=True, exist_ok=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.string() if isinstance(labels[0], str) else pa.int64()
    schema = pa.schema([("id", pa.int64()), ("img", image), ("label", kind)])
    if class_names:
        features = {"img": {"_type": "Image"}, "id": {"_type": "Value"}, "label": {"names": class_names, "_type": "ClassLabel"}}
        schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    files = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    for number, file in enumerate(files):
        images = [{"bytes": JPEGS[2 * number + i], "path": None if number else f"{i}.jpg"} for i in range(2)]
        table = pa.table({"id": [1, 2], "img": pa.array(images, image), "label": pa.array(labels, kind)}, schema=schema)
        pq.write_table(table, root / "data" / f"{file}.parquet", row_group_size=1)


def test_hugging_faces_parquet_files_keep_their_class_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "hf", ["zebra", "ant"])
    train, val = packed(tmp_path / "hf")
    assert contents(train) == JPEGS[:4]
    assert contents(val) == JPEGS[4:]
    assert train.classes == ("zebra", "ant")
    assert train.labels_N.tolist() == [0, 1, 0, 1]
    assert names(train)[1:3] == ["data/train-00000-of-00002.parquet[1] 1.jpg", "data/train-00001-of-00002.parquet[0]"]


def test_parquet_without_names_has_its_labels_as_classes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "numbers", labels=(7, 3))
    assert packed(tmp_path / "numbers")[0].classes == ("3", "7")
    write_parquet(tmp_path / "texts", labels=("zebra", "ant"))
    assert packed(tmp_path / "texts")[0].labels_N.tolist() == [1, 0, 1, 0]


KINDS = {
    "large_string": lambda values: pa.array(values, pa.large_string()),
    "string_view": lambda values: pa.array(values, pa.string_view()),
    "dictionary": lambda values: pa.array(values).dictionary_encode(),
    "uint8": lambda values: pa.array([("ant", "zebra").index(value) for value in values], pa.uint8()),
    "bool": lambda values: pa.array([value == "zebra" for value in values]),
    "double": lambda values: pa.array([0.5 for _ in values]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "image", [pa.large_binary(), pa.binary_view(), pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())])]
)
def test_parquets_labels_and_images_are_of_any_fitting_type(tmp_path: Path, kind: str, image: pa.DataType) -> None:
    (tmp_path / "pq").mkdir()
    for file in ("train", "val"):
        images = pa.array([{"bytes": jpeg} if pa.types.is_struct(image) else jpeg for jpeg in JPEGS[:2]], image)
        pq.write_table(pa.table({"image": images, "label": KINDS[kind](["zebra", "ant"])}), tmp_path / "pq" / f"{file}.parquet")
    if kind == "double":
        assert "the column label is of type double, not a class (integers or text)" in refusal(tmp_path / "pq")
    else:
        train, _ = packed(tmp_path / "pq")
        assert (train.labels_N.tolist(), contents(train)) == ([1, 0], JPEGS[:2])


def test_unlabelled_rows_are_left_out_and_an_unlabelled_split_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "hf", ["zebra", "ant"], labels=(0, -1))
    assert f"{tmp_path}/hf: 2 train samples have the label -1 (unlabeled) and are skipped" in noticed(tmp_path / "hf")
    write_parquet(tmp_path / "none", labels=(-1, -1))
    assert "all 4 train samples have the label -1" in refusal(tmp_path / "none")


def test_the_parquet_columns_that_are_chosen_of_several_are_notices(tmp_path: Path) -> None:
    (tmp_path / "pq").mkdir()
    columns = {"thumb": JPEGS[:2], "image": JPEGS[2:4], "coarse_label": [0, 0], "fine_label": [1, 0]}
    features = {"image": {"_type": "Image"}, "fine_label": {"_type": "ClassLabel", "names": ["x", "y"]}}
    table = pa.table(columns)
    for file, metadata in (("train", {"info": {"features": features}}), ("val", {"info": {"features": features}})):
        pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), tmp_path / "pq" / f"{file}.parquet")
    assert contents(packed(tmp_path / "pq")[0]) == JPEGS[2:4]
    for file in ("train", "val"):
        pq.write_table(table, tmp_path / "pq" / f"{file}.parquet")
    lines = noticed(shutil.copytree(tmp_path / "pq", tmp_path / "plain"))
    assert "Parquet: the column fine_label is the class; not used: coarse_label" in lines
    assert "Parquet: the column image is the image; not used: thumb" in lines


def test_parquets_image_is_the_column_of_that_name_whatever_the_order_and_none_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "pq").mkdir()
    columns = {"mask": JPEGS[:2], "img": JPEGS[2:4], "label": [0, 1]}
    for features in ({}, {name: {"_type": "Image"} for name in ("mask", "img")}):
        table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        for file in ("train", "val"):
            pq.write_table(table, tmp_path / "pq" / f"{file}.parquet")
        assert contents(packed(tmp_path / "pq")[0]) == JPEGS[2:4]
        for file in ("train", "val"):
            pq.write_table(table.rename_columns(["mask", "scan", "label"]), tmp_path / "pq" / f"{file}.parquet")
        assert "has 2 columns of images, mask, scan: name the right one image" in refusal(tmp_path / "pq")


def test_parquet_that_has_no_labels_or_other_ones_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "hf"
    write_parquet(root, ["zebra", "ant"], labels=(0, 7))
    assert "there are labels without a class name: 7" in refusal(root)
    write_parquet(root, labels=(0, None))
    assert "the column label is empty in 1 rows; give labelled images" in refusal(root)
    write_parquet(root)
    pq.write_table(pa.table({"label": [0]}), root / "data" / "train-00001-of-00002.parquet")
    assert "no column of images" in refusal(root)
    pq.write_table(pa.table({"img": [b""]}), root / "data" / "train-00001-of-00002.parquet")
    assert "no class column" in refusal(root)
    (root / "data" / "train-00001-of-00002.parquet").write_bytes(b"PAR1")
    assert "is truncated (" in refusal(root)


@pytest.mark.parametrize("other", ["train-00001-of-00002", "test-00000-of-00001"])
@pytest.mark.parametrize("names", [["ant", "zebra"], None])
def test_parquet_files_that_name_their_classes_otherwise_are_refused(tmp_path: Path, other: str, names: list[str] | None) -> None:
    write_parquet(tmp_path / "elsewhere", names)
    write_parquet(tmp_path / "hf", ["zebra", "ant"])
    file = tmp_path / "hf" / "data" / f"{other}.parquet"
    shutil.copy(tmp_path / "elsewhere" / "data" / file.name, file)
    first = tmp_path / "hf" / "data" / "train-00000-of-00002.parquet"
    assert f"{file} has other class names than {first}; give the files of one data set" in refusal(tmp_path / "hf")


def test_a_damaged_row_group_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "hf"
    write_parquet(root, ["zebra", "ant"])
    file = root / "data" / "train-00000-of-00002.parquet"
    whole = file.read_bytes()
    column = pq.ParquetFile(file).metadata.row_group(0).column(1)
    at = column.data_page_offset
    file.write_bytes(whole[:at] + b"\xff" * 40 + whole[at + 40 :])
    assert contents(packed(root)[0]) == JPEGS[1:4]
    assert "a damaged row group: " in (tmp_path / "hf-packed" / "unreadable.jsonl").read_text()


# LMDB


def write_lmdb(root: Path, train: dict[bytes, bytes], val: dict[bytes, bytes]) -> Path:
    for name, items in (("ilsvrc12_train_lmdb", train), ("ilsvrc12_val_lmdb", val)):
        (root / name).mkdir(parents=True, exist_ok=True)
        with lmdb.open(str(root / name), map_size=2**24) as environment, environment.begin(write=True) as transaction:
            for key, value in items.items():
                transaction.put(key, value)
    return root


def datum(label: int, data: bytes, *shape: int) -> bytes:
    """A serialized Caffe Datum of pixels of this shape, or of an encoded image."""
    sizes = b"".join(varint(number << 3) + varint(size) for number, size in enumerate(shape, 1))
    return sizes + message(4, data) + varint(5 << 3) + varint(label) + (b"" if shape else varint(7 << 3) + b"\x01")


def test_caffes_encoded_datums_keep_their_files(tmp_path: Path) -> None:
    items = {f"{n:08}_{n}.jpg".encode(): datum(n % 2, JPEGS[n]) for n in range(6)}
    train, val = packed(write_lmdb(tmp_path / "caffe", items, dict(list(items.items())[:2])))
    assert contents(train) == JPEGS
    assert train.labels_N.tolist() == [0, 1] * 3
    assert names(val) == ["ilsvrc12_val_lmdb/00000000_0.jpg", "ilsvrc12_val_lmdb/00000001_1.jpg"]


def test_caffes_planes_of_blue_green_red_become_pixels(tmp_path: Path) -> None:
    pixels_HWC = np.asarray(photo(1, 20, 10))
    gray_HW = np.asarray(photo(2, 20, 10).convert("L"))
    bgr = np.ascontiguousarray(pixels_HWC[..., ::-1].transpose(2, 0, 1)).tobytes()
    items = {b"0": datum(0, bgr, 3, 10, 20), b"1": datum(0, gray_HW.tobytes(), 1, 10, 20), b"2": datum(0, bytes(800), 4, 10, 20)}
    train, _ = packed(write_lmdb(tmp_path / "caffe", items, items))
    assert len(train) == 2
    assert (train.read(0) == pixels_HWC).all()
    assert (train.read(1) == gray_HW[..., None]).all()
    assert "4 × 10 × 20 pixels are no image" in (tmp_path / "caffe-packed" / "unreadable.jsonl").read_text()


def test_datums_of_pixels_and_of_files_in_one_set_all_become_pixels(tmp_path: Path) -> None:
    pixels_HWC = np.asarray(photo(1, 20, 10))
    bgr = np.ascontiguousarray(pixels_HWC[..., ::-1].transpose(2, 0, 1)).tobytes()
    items = {b"0": datum(0, bgr, 3, 10, 20), b"1": datum(1, encoded(photo(1, 20, 10), "PNG"))}
    train, _ = packed(write_lmdb(tmp_path / "caffe", items, items))
    assert all((train.read(index) == pixels_HWC).all() for index in range(2))


def test_image_files_under_their_class_or_with_their_label(tmp_path: Path) -> None:
    by_class = {b"zebra/1.jpg": JPEGS[0], b"ant/2.jpg": JPEGS[1], b"__len__": b"2"}
    train, _ = packed(write_lmdb(tmp_path / "classes", by_class, by_class))
    assert (train.classes, train.labels_N.tolist(), contents(train)) == (("ant", "zebra"), [0, 1], [JPEGS[1], JPEGS[0]])
    two_columns = {
        b"image-000000001": JPEGS[0],
        b"label-000000001": b"5",
        b"image-000000002": JPEGS[1],
        b"label-000000002": b"3",
        b"num-samples": b"2",
    }
    train, _ = packed(write_lmdb(tmp_path / "two_columns", two_columns, two_columns))
    assert (train.classes, train.labels_N.tolist()) == (("3", "5"), [1, 0])


def test_an_environment_may_be_a_single_file(tmp_path: Path) -> None:
    root = tmp_path / "files"
    root.mkdir()
    for name in ("train.lmdb", "valid.mdb"):
        with (
            lmdb.open(str(root / name), subdir=False, map_size=2**24) as environment,
            environment.begin(write=True) as transaction,
        ):
            transaction.put(b"ant/1.jpg", JPEGS[0])
            transaction.put(b"bee/1.jpg", JPEGS[1])
    train, val = packed(root)
    assert (names(train)[0], names(val)[1], contents(train)) == ("train.lmdb/ant/1.jpg", "valid.mdb/bee/1.jpg", JPEGS[:2])
    folder = write_lmdb(tmp_path / "folders", {b"ant/1.jpg": JPEGS[0]}, {})
    assert "data.mdb is a single file; give the folder with the files of both splits" in refusal(
        folder / "ilsvrc12_train_lmdb" / "data.mdb"
    )


def test_lmdbs_indices_stay_and_its_numeric_class_names_are_sorted_as_an_image_folders(tmp_path: Path) -> None:
    indexed = {f"{key}-{n:09}".encode(): value for n in range(12) for key, value in (("image", JPEGS[0]), ("label", b"%d" % n))}
    assert packed(write_lmdb(tmp_path / "indexed", indexed, indexed))[0].classes[:3] == ("0", "1", "2")
    named = {f"{n}/1.jpg".encode(): JPEGS[0] for n in range(12)}
    root = write_lmdb(tmp_path / "named", named, named)
    assert f"{root}: classes in the order 0, 1, 10, 11, 2 … (sorted as text, as ImageFolder sorts its folders)" in noticed(root)


def test_classes_whose_names_begin_as_labels_do_are_kept(tmp_path: Path) -> None:
    items = {f"{name}/1.jpg".encode(): JPEGS[0] for name in ("label-maker", "num-pad", "__init__", "label-7")}
    train, _ = packed(write_lmdb(tmp_path / "classes", {**items, b"__keys__": b"[]", b"num-samples": b"4"}, items))
    assert train.classes == ("__init__", "label-7", "label-maker", "num-pad")


def test_an_lmdb_is_listed_without_copying_its_images(tmp_path: Path) -> None:
    large = datum(0, JPEGS[0] + bytes(4 * 2**20))
    root = write_lmdb(tmp_path / "caffe", {b"0": large}, {b"0": large, b"1": datum(0, JPEGS[1])})
    tracemalloc.start()
    try:
        listing = READERS["LMDB"](root).listing()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(listing.splits["val"].locations) == 2
    assert most < 2**20


def test_pickled_values_are_refused_because_a_pickle_runs_code(tmp_path: Path) -> None:
    items = {b"0": pickle.dumps((JPEGS[0], 3))}
    text = refusal(write_lmdb(tmp_path / "pickles", items, items))
    assert "its values are Python pickles, and reading a pickle runs whatever code it names" in text


def test_an_lmdb_of_no_known_layout_or_damaged_is_refused(tmp_path: Path) -> None:
    root = write_lmdb(tmp_path / "other", {b"0": b"\x01\x02\x03"}, {b"0": b"x"})
    assert "b'0' is of no known layout" in refusal(root)
    root = write_lmdb(tmp_path / "unlabelled", {b"0": JPEGS[0]}, {b"0": JPEGS[0]})
    assert "the label of b'0' is not to be found" in refusal(root)
    root = write_lmdb(tmp_path / "empty", {}, {})
    assert "holds no train images" in refusal(root)
    (root / "ilsvrc12_train_lmdb" / "data.mdb").write_bytes(b"no environment" * 1000)
    assert "is damaged, or not an LMDB environment" in refusal(root)


def test_every_reader_is_named_once() -> None:
    assert len(set(READERS.values())) == len(READERS)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("bloodmnist.npz", "NumPy arrays"),
        ("train-images-idx3-ubyte.gz", "MNIST's IDX arrays"),
        ("t10k-labels.idx1-ubyte", "MNIST's IDX arrays"),
        ("train_32x32.mat", "MATLAB arrays"),
        ("camelyon.h5", "HDF5"),
        ("mini-imagenet.pkl", "a pickle"),
    ],
)
def test_files_of_arrays_are_refused_by_name(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).write_bytes(b"\0")
    for root in (tmp_path, tmp_path / file):
        with pytest.raises(DataError, match=f"{file} is {says}, which cannot be read: save images as files"):
            open_source(DataConfig(path=str(root)), "train")


def test_a_table_of_unknown_columns_is_named_where_there_are_images(tmp_path: Path) -> None:
    (tmp_path / "imgs").mkdir()
    photo(1).save(tmp_path / "imgs" / "1.jpg")
    (tmp_path / "labels.csv").write_text("id,breed\n1,poodle\n")
    with pytest.raises(DataError, match=r"if .*labels.csv is the list of its images, write path,label as its first line"):
        find_reader(tmp_path)
