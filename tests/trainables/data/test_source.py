"""Images without labels, and what is held out for validation where a source has no validation split."""

import contextlib
import pickle
import shutil
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainables.data.pack.test_imagenet import write_tars as write_imagenet_tars
from tests.trainables.data.packed import pack_here, write_tar
from tests.trainables.data.photos import MakeFolder, encoded, photo
from tests.trainables.data.test_pack_readers import example, tfrecord, write_cifar10
from trainables.config import DataConfig
from trainables.data.identity import check_same_data, data_identity
from trainables.data.interface import Source
from trainables.data.loader.loader import Batch, Loader
from trainables.data.pack.layout_reader import is_held_out
from trainables.data.source import open_on_node, open_source
from trainables.errors import DataError
from trainables.notices import notices_to

JPEGS = [encoded(photo(seed, 12, 10), "JPEG") for seed in range(40)]


def config(path: Path | str, **data: object) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), "labels": False, "image_size": 8, **data})


def opened(path: Path | str, **data: object) -> tuple[Source, Source]:
    """Train and val, without labels, as a worker opens them."""
    train, val = (open_on_node(config(path, **data), split) for split in ("train", "val"))  # type: ignore[arg-type]
    for source in (train, val):
        assert source.classes == ()
        assert (source.labels_N.dtype, source.labels_N.tolist()) == (np.int64, [-1] * len(source))
    return train, val


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def contents(source: Source) -> list[bytes]:
    return [np.asarray(source.read(index)).tobytes() for index in range(len(source))]


def noticed(path: Path | str, **data: object) -> list[str]:
    lines: list[str] = []
    with notices_to(lines.append):
        opened(path, **data)
    return lines


def refusal(path: Path | str, **data: object) -> str:
    with pytest.raises(DataError) as caught:
        open_source(config(path, **data), "val")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_photos(root: Path, num_images: int = 40) -> Path:
    """Images at three depths, with what people's folders hold besides."""
    for number in range(num_images):
        path = root / ("", "2023", "2024/May: trip")[number % 3] / f"IMG {number:02}.{'JPG' if number % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEGS[number])
    for file in (".DS_Store", "._IMG 00.jpg", ".thumbs/IMG 00.jpg", "2023/notes.txt"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_bytes(b"no image")
    return root


# Folders


def test_any_folder_of_images_is_read_to_any_depth_and_each_image_is_on_one_side(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    train, val = opened(root)
    every = {str(path.relative_to(root)) for path in root.rglob("IMG*") if ".thumbs" not in path.parts}
    assert sorted(names(train) + names(val)) == sorted(every)
    assert len(every) == 40
    assert contents(val) == [(root / name).read_bytes() for name in names(val)]
    total = len(val)
    del train, val  # what is open already is listed no more
    assert noticed(root) == [
        f"{root}: 1 file left out: 1 .txt; convert images of other formats to PNG; rename JPEG files so that they end in .jpg",
        f"data.val_share: {total} of 40 images are held out for validation, by a hash of their paths",
    ]


def test_an_image_stays_on_its_side_when_others_are_added_or_the_folder_moves(tmp_path: Path) -> None:
    before = names(opened(write_photos(tmp_path / "photos", 20))[1])
    shutil.move(tmp_path / "photos", tmp_path / "moved")
    after = names(opened(write_photos(tmp_path / "moved"))[1])
    assert [name for name in after if int(name[-6:-4]) < 20] == before != after


def test_the_share_is_that_of_a_hash_of_names() -> None:
    held_out = [{number for number in range(20_000) if is_held_out(f"{number}.jpg", share)} for share in (0.1, 0.3)]
    assert held_out[0] < held_out[1]
    assert [round(len(numbers) / 20_000, 2) for numbers in held_out] == [0.1, 0.3]


def test_folders_train_and_val_are_the_splits_and_class_folders_mean_nothing(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 2, "dog": 1}, valid={"bird": 2})
    assert [names(source) for source in opened(root)] == [
        ["train/cat/000.jpg", "train/cat/001.jpg", "train/dog/000.jpg"],
        ["valid/bird/000.jpg", "valid/bird/001.jpg"],
    ]
    assert noticed(root) == [f"{root}: its labels are not used"]
    (root / "extra").mkdir()
    (root / "extra" / "1.jpg").write_bytes(JPEGS[0])
    assert f"{root}: not used, since train and valid are the splits: extra" in noticed(root)
    assert "has a validation split of its own: leave out val_share" in refusal(root, val_share=0.1)


def test_a_train_folder_without_val_is_split_with_labels_too_where_a_share_is_written(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 10, "dog": 10})
    assert "has no validation folder; its images belong in val/CLASS/; to hold out some" in refusal(root, labels=True)
    assert len(open_source(config(root / "train", labels=True, val_share=1), "val")) == 20  # all, to evaluate them
    with pytest.raises(DataError, match="holds no train images; write a"):
        open_source(config(root / "train", labels=True, val_share=1), "train")
    with_labels = [open_source(config(root, labels=True, val_share=0.4), split) for split in ("train", "val")]  # type: ignore[arg-type]
    assert [names(source) for source in with_labels] == [names(source) for source in opened(root, val_share=0.4)]
    for source in with_labels:
        assert source.classes == ("cat", "dog")
        assert [source.classes[label] for label in source.labels_N] == [name.split("/")[1] for name in names(source)]


def test_a_class_of_which_all_images_would_be_held_out_is_refused(make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 0, "dog": 10})
    held_out = next(f"{number}.jpg" for number in range(99) if is_held_out(f"train/cat/{number}.jpg", 0.4))
    _with(root / "train" / "cat" / held_out, JPEGS[0])
    assert "including all of cat; write a smaller one" in refusal(root, labels=True, val_share=0.4)


def test_a_folder_whose_meaning_is_not_clear_is_refused(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "set" / "train").parent
    write_photos(root / "more")
    assert f"has a folder train, and other images (more): give {root}/train to use that folder alone" in refusal(root)
    (root / "train").rename(root / "val")
    assert "has a folder val and no folder train: rename it, or move the other images to train/" in refusal(root)


def test_too_few_images_no_images_and_links_that_go_round_are_refused(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos", 2)
    assert "at a val_share of 0.001, 0 of its 2 images are held out for validation" in refusal(root, val_share=0.001)
    (root / "again").symlink_to(root)
    assert f"data.path: {root}/again is a link to {root}, in which it lies" in refusal(root)
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    assert refusal(tmp_path / "empty").startswith(f"data.path: {tmp_path}/empty holds no images, files whose names end in .jpg")
    assert "is an archive: run `mkdir -p" in refusal(_with(tmp_path / "empty" / "images.tar.gz", b"").parent)
    assert "does not exist" in refusal(tmp_path / "none")


def test_arrow_files_of_hugging_face_are_refused_with_what_writes_parquet(tmp_path: Path) -> None:
    (tmp_path / "set" / "train").mkdir(parents=True)
    _with(tmp_path / "set" / "train" / "data-00000-of-00001.arrow", b"x")
    _with(tmp_path / "set" / "train" / "dataset_info.json", b"{}")
    assert "write each split as Parquet (datasets.load_from_disk(FOLDER)[SPLIT].to_parquet(" in refusal(
        tmp_path / "set", labels=True
    )


def test_lists_next_to_folders_of_both_splits_are_a_notice(make_folder: MakeFolder) -> None:
    root = make_folder(train={"patient1": 2, "patient2": 2}, val={"patient1": 1})
    _with(root / "train.csv", b"Path,Sex,Edema\ntrain/patient1/0.jpg,F,1\n")
    lines: list[str] = []
    with notices_to(lines.append):
        open_source(config(root, labels=True), "train")
    assert f"{root}: the folders in its splits are the classes; the lists train.csv are not used" in lines


def _with(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_folders_that_are_linked_twice_are_one_line(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    (root / "link").symlink_to(root / "2024")
    assert any(line.endswith("are one folder: its images count twice, and those of 1 more folders") for line in noticed(root))


def test_a_folder_without_classes_is_refused_naming_the_key_that_reads_it(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    assert "for images without labels write data.labels: false" in refusal(root, labels=True)
    (root / "train").mkdir()
    assert "for images without labels write data.labels: false" in refusal(root, labels=True)


# Lists


@pytest.mark.parametrize("file", ["list.txt", "train.txt", "test.lst", "list.csv"])
@pytest.mark.parametrize("label", ["", " cat", "\tcat"])
def test_a_list_has_a_path_a_line_perhaps_with_a_label(tmp_path: Path, file: str, label: str) -> None:
    root = write_photos(tmp_path / "photos")
    paths = names(opened(root)[0])
    absolute = [str(root / paths[0]), *(f"photos/{path}" for path in paths[1:])]
    _with(tmp_path / file, "".join(f"{path}{label}\r\n" for path in absolute).encode())
    found = [name for source in opened(tmp_path / file) for name in names(source)]
    assert sorted(found) == sorted(f"photos/{path}" for path in paths)
    assert (f"{tmp_path / file}: its labels are not used" in noticed(tmp_path / file)) == bool(label)


def test_paths_with_commas_and_spaces_are_paths(tmp_path: Path) -> None:
    for number, name in enumerate(("Rome, Italy 1.jpg", "b c.jpg", "d.jpg")):
        _with(tmp_path / name, JPEGS[number])
    _with(tmp_path / "list.txt", b"Rome, Italy 1.jpg\n\nb c.jpg\nd.jpg some_cat\n")
    train, val = opened(tmp_path / "list.txt", val_share=0.5)
    assert sorted(names(train) + names(val)) == ["Rome, Italy 1.jpg", "b c.jpg", "d.jpg"]


def test_files_that_a_list_misses_are_refused_by_count_name_and_line(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    _with(tmp_path / "list.txt", b"photos/IMG 00.jpg\n\nphotos/gone.jpg\nphotos/IMG 03.JPG\n")
    says = "1 of its 3 files are missing, such as photos/gone.jpg, the first in line 3; restore them"
    assert says in refusal(tmp_path / "list.txt")
    _with(root / "list.txt", b"")
    assert "is a file, and no list of images, whose first row names one" in refusal(root / "list.txt")


def test_with_labels_every_line_of_a_list_needs_one(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    lines = [f"photos/IMG {number:02}.{'JPG' if number % 2 else 'jpg'}" for number in range(0, 40, 3)]
    path = _with(tmp_path / "list.txt", "\n".join(f"{line} {number % 2}" for number, line in enumerate(lines)).encode())
    assert open_source(config(path, labels=True, val_share=0.3), "val").classes == ("0", "1")
    assert "to hold out some of the training images write data.val_share: 0.1" in refusal(path, labels=True)
    assert len(open_source(config(path, labels=True, val_share=1), "val")) == len(lines)
    _with(path, f"{lines[0]} cat\n{lines[1]}\n".encode())
    assert f"row 2 ({lines[1]}) has no class" in refusal(path, labels=True, val_share=0.5)
    _with(path, "\n".join(lines).encode())
    assert "has no class column" in refusal(path, labels=True, val_share=0.5)


# Other layouts


def write_tars(root: Path, *, labels: bool = False) -> Path:
    """As img2dataset writes them: tars that name no split, captions, and a table of urls next to them."""
    root.mkdir()
    for tar in range(2):
        members = []
        for number in range(20 * tar, 20 * tar + 20):
            key = f"{number:09}"
            members += [(f"{key}.jpg", JPEGS[number]), (f"{key}.txt", b"a cat"), (f"{key}.json", b'{"caption": "a cat"}')]
            members += [(f"{key}.cls", b"%d" % (number % 2))] * labels
        write_tar(root / f"{tar:05}.tar", members)
        pq.write_table(pa.table({"url": ["http://a"], "caption": ["a cat"]}), root / f"{tar:05}.parquet")
    return root


def test_tars_need_neither_labels_nor_splits(tmp_path: Path) -> None:
    root = write_tars(tmp_path / "tars")
    train, val = opened(root)
    assert sorted(contents(train) + contents(val)) == sorted(JPEGS)
    assert "no tars for training; put one of these words into their paths" in refusal(root, labels=True)
    assert "for images without labels write data.labels: false" in refusal(root, labels=True, val_share=0.2)
    assert f"{tmp_path}/labelled: its labels are not used" in noticed(write_tars(tmp_path / "labelled", labels=True))


def test_lists_of_both_splits_in_a_folder_are_read_as_with_labels(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    _with(root / "train.csv", b"path,label\nIMG 00.jpg,cat\n2023/IMG 01.JPG,dog\n")
    assert len(opened(root)[0]) + len(opened(root)[1]) == 40
    _with(root / "val.csv", b"path,label\nIMG 06.jpg,cat\n")
    assert [names(source) for source in opened(root)] == [["IMG 00.jpg", "2023/IMG 01.JPG"], ["IMG 06.jpg"]]


def test_images_next_to_a_table_about_them_are_a_folder(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    pq.write_table(pa.table({"url": ["http://a"]}), root / "00000.parquet")
    assert len(opened(root)[0]) + len(opened(root)[1]) == 40


def write_parquet(root: Path) -> None:
    root.mkdir()
    pq.write_table(pa.table({"image": [{"bytes": content, "path": None} for content in JPEGS]}), root / "data.parquet")


def write_lmdb(root: Path) -> None:
    root.mkdir()
    with lmdb.open(str(root / "images.mdb"), subdir=False, map_size=2**24) as environment, environment.begin(write=True) as to:
        for number, content in enumerate(JPEGS):
            to.put(b"%05d" % number, content)


def write_tfrecords(root: Path) -> None:
    root.mkdir()
    _with(root / "images.tfrecord", tfrecord([example({"image/encoded": content}) for content in JPEGS]))


@pytest.mark.parametrize("write", [write_photos, write_tars, write_parquet, write_lmdb, write_tfrecords])
@pytest.mark.parametrize("share", [None, 0.3])
def test_a_packed_set_has_the_split_that_its_source_has(tmp_path: Path, write: object, share: float | None) -> None:
    write(tmp_path / "set")  # type: ignore[operator]
    pack_here(tmp_path / "set", tmp_path / "packed", labels=False, val_share=share)
    packed = opened(tmp_path / "packed")
    assert sorted(contents(packed[0]) + contents(packed[1])) == sorted(JPEGS)
    for source, side in zip(packed, (False, True), strict=True):
        assert {is_held_out(name, share or 0.1) for name in names(source)} == {side}
    if write in (write_photos, write_tars, write_tfrecords):
        assert [*map(contents, opened(tmp_path / "set", val_share=share))] == [*map(contents, packed)]
    else:
        assert f"distill pack {tmp_path}/set {tmp_path}/set-packed --no-labels" in refusal(tmp_path / "set")


def test_sources_with_labels_are_read_without_them(tmp_path: Path, make_folder: MakeFolder) -> None:
    write_cifar10(tmp_path / "cifar")
    write_imagenet_tars(tmp_path / "imagenet")
    for path in (tmp_path / "cifar", tmp_path / "imagenet"):
        assert f"{path}: its labels are not used" in noticed(path)
    for name in ("digits", "synthetic"):
        assert noticed(name) == [f"data.labels: false: the labels of {name} are not used"]
        assert "has a validation split of its own" in refusal(name, val_share=0.1)


def test_a_packed_set_with_labels_is_read_without_them_wherever_it_lies(tmp_path: Path, make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 3, "dog": 2}, val={"cat": 1})
    packed = tmp_path / "packed"
    pack_here(root, packed)
    assert noticed(packed) == ["data.labels: false: the labels of the packed set are not used"]
    for path, more in ((packed, {"stage": str(tmp_path / "node")}), (packed.as_uri(), {"stage": str(tmp_path / "far")})):
        train, val = opened(path, shuffle="none", **more)
        other = pickle.loads(pickle.dumps(train))
        assert (other.classes, other.labels_N.tolist()) == ((), [-1] * 5)
        for source in (train, val, other):
            source.close()


def test_a_packed_set_without_labels_says_what_to_write(tmp_path: Path) -> None:
    pack_here(write_photos(tmp_path / "photos"), tmp_path / "packed", labels=False)
    assert "the packed set has no labels: for images without labels write data.labels: false" in refusal(
        tmp_path / "packed", labels=True
    )
    assert "has a validation split of its own" in refusal(tmp_path / "packed", val_share=0.2)


# Several sets


def mixed(path: Path | str, more: list[dict[str, object]], **data: object) -> tuple[Source, list[str]]:
    """The training images of several sets, with labels where they have them, and the notices."""
    lines: list[str] = []
    sets = [{"share": 0.25, **each, "path": str(each["path"])} for each in more]
    with notices_to(lines.append):
        return open_on_node(config(path, labels=True, more=sets, **data), "train"), lines


def test_a_further_set_keeps_its_labels_where_its_classes_are_the_same_and_has_none_elsewhere(
    tmp_path: Path, make_folder: MakeFolder
) -> None:
    root = make_folder(train={"cat": 3, "dog": 2}, val={"cat": 1})
    same, other, packed = tmp_path / "same", tmp_path / "other", tmp_path / "packed"
    shutil.copytree(root / "train/cat", same / "train/dog")
    shutil.copytree(root / "train/dog", same / "train/cat")  # without validation images
    shutil.copytree(root / "train/dog", other / "train/emu")
    shutil.copytree(root / "train/dog", other / "train/cat")
    pack_here(root, packed)
    write_photos(tmp_path / "photos", 20)
    sets: list[dict[str, object]] = [{"path": same}, {"path": other}, {"path": tmp_path / "photos"}]
    source, lines = mixed(root, sets, global_batch_size=4)
    assert source.labels_N.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, *[-1] * 4, *[-1] * 20]
    assert [*map(len, source.sets)] == [5, 5, 4, 20]  # nothing of them is held out
    assert f"data.more: {same}: its labels are used: its classes are those of {root}" in lines
    assert f"data.more: {other}: its classes are not those of {root}: its images are used without labels" in lines
    assert f"data.more: {tmp_path}/photos: it has no labels: its images are used without labels" in lines
    assert f"data.more: each global batch of 4 has 1 of {root}, 1 of {same}, 1 of {other}, 1 of {tmp_path}/photos" in lines
    assert contents(source)[5] == contents(source)[3]
    assert (source.name(4), source.name(5)[: len(f"{same}: train/cat/")]) == (names(source.sets[0])[4], f"{same}: train/cat/")
    source, _ = mixed(packed, [{"path": packed, "labels": False}], global_batch_size=4, stage=str(tmp_path / "node"))
    copy = pickle.loads(pickle.dumps(source))
    for each in (source, copy):
        assert (each.classes, each.labels_N.tolist()) == (("cat", "dog"), [0, 0, 0, 1, 1, *[-1] * 5])
        each.close()


def test_labels_that_a_further_set_is_to_have_are_mapped_by_name_or_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    root, part = make_folder(train={"cat": 3, "dog": 2}, val={"cat": 1}), tmp_path / "part"
    shutil.copytree(root / "train/dog", part / "train/dog")
    source, _ = mixed(root, [{"path": part, "labels": True}], global_batch_size=4)
    assert source.labels_N.tolist() == [0, 0, 0, 1, 1, 1, 1]
    for name, message in (
        ("digits", f"data.more: {root} has no class 0, 1, 2 and 7 more, and digits has: write labels: false for that"),
        (
            write_photos(tmp_path / "photos"),
            f"data.more: {tmp_path}/photos.* has no class column: .*for images without labels write labels: false",
        ),
        (tmp_path / "absent", f"data.more: {tmp_path}/absent does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            mixed(root, [{"path": name, "labels": True}])


def test_validation_images_of_a_further_set_are_not_looked_at(tmp_path: Path, make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 3, "dog": 2}, val={"cat": 1})
    more = shutil.copytree(root, tmp_path / "more")
    (more / "val" / "cat").rename(more / "val" / "zebra")
    assert len(mixed(root, [{"path": more}])[0]) == 10
    (more / "train").rename(more / "other")
    with pytest.raises(DataError, match=f"data.more: {more} has no folder train"):
        mixed(root, [{"path": more, "labels": True}])


def test_what_a_set_cannot_be_stored_as_is_refused_by_its_path(tmp_path: Path, make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 3, "dog": 2}, val={"cat": 1})
    pack_here(root, tmp_path / "packed")
    with pytest.raises(DataError, match=rf"data\.stage: {root} is not a packed set"):
        mixed(tmp_path / "packed", [{"path": root}], stage="ram")
    with pytest.raises(DataError, match=r"data.stage: digits is not a packed set; pack it with `distill pack`"):
        open_on_node(DataConfig(path="digits", stage="ram"), "train")


def test_batches_of_several_sets_are_the_same_on_one_worker_and_on_two(tmp_path: Path, make_folder: MakeFolder) -> None:
    root = make_folder(train={"cat": 6, "dog": 5}, val={"cat": 1})
    pack_here(root, tmp_path / "packed")
    more, order = [{"path": (tmp_path / "packed").as_uri(), "share": 0.5}], {"shuffle": "window(5)", "last_batch": "short"}
    settings = config(tmp_path / "packed", labels=True, more=more, global_batch_size=4, max_bad=0, stage=str(tmp_path), **order)

    def batches(rank: int, world_size: int, start: int = 0, loader: str = "threads") -> list[Batch]:
        data = settings.model_copy(update={"loader": loader, "loader_workers": 2})
        source, where = open_on_node(data, "train"), {"rank": rank, "world_size": world_size}
        with contextlib.closing(Loader(source, data, split="train", seed=3, loader_workers=2, **where)) as reading:
            assert (reading.steps_per_epoch, reading.samples_per_epoch) == (6, 23)
            return [batch._replace(images_BCHW=batch.images_BCHW.clone()) for batch in reading.epoch(1, start)]

    whole = batches(0, 1, loader="process")
    assert [(len(batch.labels_B), batch.position) for batch in whole] == [(4, 4 * n) for n in range(1, 6)] + [(3, 23)]
    assert sorted(i for batch in whole for i in batch.indices_B.tolist() if i < 11) == list(range(11))
    for one, *halves in zip(whole, batches(0, 2), batches(1, 2), strict=True):
        for name in ("images_BCHW", "labels_B", "indices_B"):
            assert torch.cat([getattr(half, name) for half in halves]).equal(getattr(one, name))
    assert [batch.indices_B.tolist() for batch in batches(0, 1, 8)] == [batch.indices_B.tolist() for batch in whole[2:]]


# What training makes of them


def test_a_batch_without_labels_has_the_label_minus_one(tmp_path: Path) -> None:
    data = config(write_photos(tmp_path / "photos"), global_batch_size=4, val_resize=8)
    source = open_on_node(data, "train")
    loader = Loader(source, data, split="train", seed=0, rank=0, world_size=1, loader_workers=0)
    batch = next(iter(loader.epoch(0)))
    assert (batch.labels_B.tolist(), batch.images_BCHW.shape) == ([-1] * 4, (4, 3, 8, 8))
    source.close()


def test_another_share_is_other_data(tmp_path: Path) -> None:
    root = write_photos(tmp_path / "photos")
    before, same, other = (data_identity(*opened(root, val_share=share)) for share in (0.2, 0.2, 0.5))
    assert check_same_data("runs/a", before, same, accept=False) == []
    with pytest.raises(DataError, match="was trained on other data: train had"):
        check_same_data("runs/a", before, other, accept=False)
