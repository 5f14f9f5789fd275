"""What a record decodes to is what its source decodes to: to the bit as it is, within a bound when it is compressed again."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import MakeFolder, encoded, photo
from tests.trainables.data.test_decode import FILES
from trainables.data.augment import validation_view
from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.index import UNREADABLE, check_file
from trainables.data.pack.modes import Mode, check_header
from trainables.data.pack.shard import write_shard
from trainables.data.pack.shard_plan import plan_pack
from trainables.data.sources.records import RecordsSource, open_records
from trainables.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")
EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


def large_photo() -> Image.Image:
    """Smooth enough that JPEG's own loss is small, as a photograph's is."""
    return photo(7, 40, 30).resize((500, 375), Image.Resampling.BICUBIC)


LARGE = {
    "jpeg": encoded(large_photo(), "JPEG", quality=95),
    "jpeg progressive": encoded(large_photo(), "JPEG", progressive=True, quality=95),
    "jpeg gray": encoded(large_photo().convert("L"), "JPEG", quality=95),
    "jpeg cmyk": encoded(large_photo().convert("CMYK"), "JPEG", quality=95),
    "jpeg rotated by exif": encoded(large_photo(), "JPEG", exif=EXIF, quality=95),
    "png": encoded(large_photo(), "PNG"),
    "png palette": encoded(large_photo().quantize(64), "PNG"),
    "png alpha": encoded(large_photo().convert("RGBA"), "PNG"),
    "png 16 bit": encoded(Image.fromarray(np.asarray(large_photo().convert("L")).astype(np.uint16)), "PNG"),
    "webp": encoded(large_photo(), "WEBP", quality=95),
}
KINDS = {**{f"small {kind}": content for kind, content in FILES.items()}, **LARGE}


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of every kind that PIL reads; the file's name does not say which."""
    root = tmp_path_factory.mktemp("kinds") / "images"
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
        for number, content in enumerate(KINDS.values()):
            (root / split / "a" / f"{number:02}.jpg").write_bytes(content)
    return root


def packed(source: Path, dest: Path, mode: Mode) -> RecordsSource:
    pack_here(source, dest, mode)
    return open_records(str(dest), "train")


def by_pil(kind: str) -> Image.Image:
    return decode_image(KINDS[kind])


def psnr_db(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> float:
    error = ((ours.astype(np.float64) - theirs) ** 2).mean()
    return float("inf") if not error else 10 * np.log10(255**2 / error)


def test_as_they_are_bytes_are_untouched_and_sizes_are_those_of_the_header(every_kind: Path, tmp_path: Path) -> None:
    source = packed(every_kind, tmp_path / "packed", Mode())
    assert len(source) == len(KINDS)
    for index, (kind, content) in enumerate(KINDS.items()):
        assert source.read(index) == content, kind
        assert (source.widths_N[index], source.heights_N[index]) == by_pil(kind).size, kind


def test_raw_pixels_are_those_of_pils_resize(every_kind: Path, tmp_path: Path) -> None:
    source = packed(every_kind, tmp_path / "packed", Mode(raw=200))
    for index, kind in enumerate(KINDS):
        image = by_pil(kind)
        expected = image if kind.startswith("small") else image.resize((266, 200), Image.Resampling.BILINEAR)
        assert (np.asarray(source.read(index)) == np.asarray(expected)).all(), kind


def test_validation_sees_the_same_pixels_of_a_raw_record_as_of_its_original(every_kind: Path, tmp_path: Path) -> None:
    source = packed(every_kind, tmp_path / "packed", Mode(raw=256))
    for index, kind in enumerate(KINDS):
        ours, original = (
            validation_view(np.asarray(decode_image(sample)), 224, 256) for sample in (source.read(index), KINDS[kind])
        )
        assert ours.tobytes() == original.tobytes(), kind


def test_larger_images_become_jpegs_close_to_pils_resize(every_kind: Path, tmp_path: Path) -> None:
    source = packed(every_kind, tmp_path / "packed", Mode(max_side=400, quality=95))
    for index, kind in enumerate(KINDS):
        expected = by_pil(kind)
        if not kind.startswith("small"):
            expected = expected.resize((400, 300), Image.Resampling.BICUBIC)
        ours = decode_image(source.read(index))
        assert bytes(source.read(index))[:2] == b"\xff\xd8", kind
        assert ours.size == expected.size == (source.widths_N[index], source.heights_N[index]), kind
        bound = 35 if not kind.startswith("small") else 20  # tiny noise is the worst that JPEG can meet
        assert psnr_db(np.asarray(ours), np.asarray(expected)) >= bound, kind


def test_a_jpeg_that_is_no_larger_keeps_its_bytes_unless_it_is_cmyk(every_kind: Path, tmp_path: Path) -> None:
    source = packed(every_kind, tmp_path / "packed", Mode(max_side=500))
    unchanged = {kind for index, kind in enumerate(KINDS) if source.read(index) == KINDS[kind]}
    assert unchanged == {kind for kind in KINDS if "jpeg" in kind and "cmyk" not in kind}
    assert decode_image(source.read(list(KINDS).index("jpeg cmyk"))).mode == "RGB"


def test_the_longer_side_counts_whichever_it_is(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 1}, val={"a": 1})
    for name, size in (("tall", (100, 300)), ("wide", (300, 100)), ("strip", (2, 1000))):
        photo(3, *size).save(root / "train" / "a" / f"{name}.png")
    small = packed(root, tmp_path / "small", Mode(max_side=150))
    assert {tuple(size) for size in zip(small.widths_N.tolist(), small.heights_N.tolist(), strict=True)} >= {
        (50, 150),
        (150, 50),
        (1, 150),
    }
    raw = packed(root, tmp_path / "raw", Mode(raw=50))
    assert {tuple(size) for size in zip(raw.widths_N.tolist(), raw.heights_N.tolist(), strict=True)} >= {
        (50, 150),
        (150, 50),
        (2, 1000),
    }


# What is no whole image


def test_the_quick_look_agrees_with_pil_on_every_kind_that_it_accepts() -> None:
    accepted = set()
    for kind, content in KINDS.items():
        look = check_header(content)
        if look:
            accepted.add(kind)
            assert (look.width, look.height) == by_pil(kind).size
    assert accepted == {kind for kind in KINDS if "jpeg" in kind or "png" in kind}


@pytest.mark.parametrize("kind", ["small jpeg", "small png", "jpeg progressive", "png palette"])
def test_the_quick_look_accepts_nothing_that_is_cut_off(kind: str) -> None:
    whole = KINDS[kind]
    for length in range(0, len(whole), max(1, len(whole) // 300)):
        assert check_header(whole[:length]) is None


@pytest.mark.parametrize("kind", ["jpeg", "jpeg progressive", "jpeg gray", "png", "png palette"])
def test_what_the_quick_look_accepts_after_a_changed_byte_can_nearly_always_be_decoded(kind: str) -> None:
    noise, whole = np.random.default_rng(0), KINDS[kind]
    accepted = undecodable = 0
    for position in noise.integers(0, len(whole), 300):
        damaged = whole[:position] + bytes([whole[position] ^ int(noise.integers(1, 256))]) + whole[position + 1 :]
        if (look := check_header(damaged)) is None:
            continue
        accepted += 1
        try:
            assert decode_image(damaged).size == (look.width, look.height)
        except UnreadableImageError:
            undecodable += 1
    if "png" in kind:
        assert not accepted  # its checksums tell
    else:
        assert accepted > 200
        assert undecodable <= 0.05 * accepted


BAD = {
    "empty.jpg": (b"", "empty file"),
    "html.jpg": (b"<html>", "not an image"),
    "cut.jpg": (LARGE["jpeg"][:9000], "truncated or damaged"),
    "cut.png": (LARGE["png"][:-30], "truncated or damaged"),
    "cut.webp": (LARGE["webp"][:900], "truncated or damaged"),
    "flipped.png": (LARGE["png"][:5000] + bytes([LARGE["png"][5000] ^ 1]) + LARGE["png"][5001:], "truncated or damaged"),
}


@pytest.fixture
def with_bad(make_folder: MakeFolder) -> Path:
    root = make_folder(train={"a": 2, "b": 2}, val={"a": 1})
    for name, (content, _) in BAD.items():
        (root / "train" / "a" / name).write_bytes(content)
    trailing = LARGE["jpeg"] + b"trailing rubbish, as some cameras leave it"
    (root / "train" / "b" / "trailing.jpg").write_bytes(trailing)
    return root


@pytest.mark.parametrize("mode", [Mode(), Mode(max_side=100), Mode(raw=30)], ids=str)
def test_unreadable_images_are_left_out_and_listed(with_bad: Path, tmp_path: Path, mode: Mode) -> None:
    source = packed(with_bad, tmp_path / "packed", mode)
    assert [source.name(index) for index in range(len(source))] == [
        "train/a/000.jpg",
        "train/a/001.jpg",
        "train/b/000.jpg",
        "train/b/001.jpg",
        "train/b/trailing.jpg",
    ]
    listed = [json.loads(line) for line in (tmp_path / "packed" / UNREADABLE).read_text().splitlines()]
    assert {line["name"] for line in listed} == {f"train/a/{name}" for name in BAD}
    for line in listed:
        assert line["reason"].startswith(BAD[line["name"].removeprefix("train/a/")][1])
        assert line["split"] == "train"


def test_strict_makes_the_first_unreadable_image_an_error(with_bad: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"6 unreadable images, such as train/a/cut.jpg \(truncated.*leave out --strict"
    ) as caught:
        pack_here(with_bad, tmp_path / "packed", strict=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="is only partly packed"):
        open_records(str(tmp_path / "packed"), "train")


def test_a_split_without_one_readable_image_is_an_error(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 2}, val={"a": 1})
    (root / "val" / "a" / "000.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of 1 sampled val images can be decoded, such as val/a/000.jpg \(not an image\)"):
        pack_here(root, tmp_path / "packed")


def test_check_finds_damage_that_lies_behind_a_good_header(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 2}, val={"a": 1})
    jpeg = LARGE["jpeg"]
    position = jpeg.index(b"\xff\xc4") + 5  # the first Huffman table: more codes than there can be
    (root / "train" / "a" / "z.jpg").write_bytes(jpeg[:position] + b"\xff" * 12 + jpeg[position + 12 :])
    assert len(pack_and_open(root, tmp_path / "quick", check=False)) == 3
    assert len(pack_and_open(root, tmp_path / "checked", check=True)) == 2


def pack_and_open(source: Path, dest: Path, check: bool) -> RecordsSource:
    pack_here(source, dest, check=check)
    return open_records(str(dest), "train")


# The plan


def digest(dest: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dest.iterdir()) if path.is_file()}


@pytest.mark.parametrize("mode", [Mode(), Mode(max_side=20), Mode(raw=20)], ids=str)
def test_shards_are_the_same_bytes_in_whichever_order_they_are_written(with_bad: Path, tmp_path: Path, mode: Mode) -> None:
    pack_here(with_bad, tmp_path / "forwards", mode, shard_bytes=3000)
    plan = plan_pack(with_bad, tmp_path / "backwards", mode, False, shard_bytes=3000)
    assert len(plan.jobs) > 2
    for job in reversed(plan.jobs):
        write_shard(job)
    pack_here(with_bad, tmp_path / "backwards", mode, shard_bytes=3000)
    assert digest(tmp_path / "forwards") == digest(tmp_path / "backwards")


def test_two_plans_are_the_same_where_they_would_write_the_same(with_bad: Path, tmp_path: Path) -> None:
    def fingerprint(mode: Mode, check: bool = False) -> str:
        return plan_pack(with_bad, tmp_path / "dest", mode, check).fingerprint

    first = fingerprint(Mode())
    assert first == fingerprint(Mode())
    others = {fingerprint(Mode(max_side=100)), fingerprint(Mode(max_side=100, quality=80)), fingerprint(Mode(raw=9))}
    assert len({first, fingerprint(Mode(), check=True), *others}) == 5
    (with_bad / "train" / "a" / "000.jpg").rename(with_bad / "train" / "a" / "0000.jpg")
    assert fingerprint(Mode()) != first


def test_a_source_that_a_node_does_not_see_is_an_error_and_not_a_shard_of_unreadable_images(
    with_bad: Path, tmp_path: Path
) -> None:
    plan = plan_pack(with_bad, tmp_path / "dest", Mode(), False)
    with_bad.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"is not visible to .*: give a source that all nodes share"):
        write_shard(plan.jobs[0])


def test_a_large_set_of_tiny_images_is_cut_by_their_number(tmp_path: Path) -> None:
    root = tmp_path / "cifar"
    root.mkdir()
    record = bytes(3073)
    for number in range(1, 6):
        (root / f"data_batch_{number}.bin").write_bytes(record * 4000)
    (root / "test_batch.bin").write_bytes(record)
    (root / "batches.meta.txt").write_text("only")
    plan = plan_pack(root, tmp_path / "dest", Mode(), False)
    assert [len(job.split_listing.locations) for job in plan.jobs] == [6667, 6667, 6666, 1]
    assert plan.expected_bytes == 20001 * 3072


def test_every_file_of_a_packed_set_has_the_checksum_of_the_index(with_bad: Path, tmp_path: Path) -> None:
    index = pack_here(with_bad, tmp_path / "packed", shard_bytes=3000)
    assert [check_file(tmp_path / "packed", file) for file in index.files()] == [None] * len(index.files())
