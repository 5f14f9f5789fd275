"""Every part of a tiled file has the pixels of the file that it was made of, bit by bit; a damaged map is an error."""

import contextlib
import io
import itertools
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.trainables.data.boxes import random_boxes
from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import MakeFolder, encoded, photo
from tests.trainables.data.test_decoders import EXIF_ROTATED
from trainables.config import DataConfig
from trainables.data.augment import Augment, uniforms
from trainables.data.decode import StoredImage, UnreadableImageError, decode_image
from trainables.data.decoders import DECODERS
from trainables.data.decoders.interface import Box, Decoder, read_header
from trainables.data.pack import tiling, transcode
from trainables.data.pack.modes import Mode
from trainables.data.pack.tiling import has_pixels_of, tiled
from trainables.data.sources.records import open_records
from trainables.data.tiles import open_tiles
from trainables.errors import DataError

pytest.importorskip("turbojpeg")

WIDTH, HEIGHT = 301, 203
PHOTO = photo(3, WIDTH, HEIGHT)


def _gray_as_if_subsampled(data: bytes) -> bytes:
    """Factors of 2 × 2, as some cameras write them; they mean nothing where there is one component."""
    changed = bytearray(data)
    changed[data.index(b"\xff\xc0") + 11] = 0x22
    return bytes(changed)


def _subsampled(factor: int) -> bytes:
    """By OpenCV, since PIL writes no such file."""
    parameters = (cv2.IMWRITE_JPEG_QUALITY, 85, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor)
    return cv2.imencode(".jpg", cv2.cvtColor(np.asarray(PHOTO), cv2.COLOR_RGB2BGR), parameters)[1].tobytes()


def _slowly_brighter() -> Image.Image:
    """No two neighbours differ by as much as the first and the last, so that there is no code for that."""
    grain = np.random.default_rng(0).integers(-9, 10, (320, 480, 1))
    return Image.fromarray((128 + np.linspace(0, 110, 480)[:, None] + grain).astype(np.uint8).repeat(3, axis=2))


GRAY = encoded(PHOTO.convert("L"), "JPEG", quality=90)
JPEGS = {
    "4:2:0": encoded(PHOTO, "JPEG", quality=85),
    "4:2:0 of a prime row": encoded(photo(4, 16 * 17, 16 * 13), "JPEG", quality=90),
    "4:2:0 of whole MCUs": encoded(photo(4, 320, 160), "JPEG", quality=90),
    "4:2:2": encoded(PHOTO, "JPEG", subsampling=1, quality=85),
    "4:4:0": _subsampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440),
    "4:1:1": _subsampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411),
    "4:4:4": encoded(PHOTO, "JPEG", subsampling=0, quality=92),
    "its own tables": encoded(PHOTO, "JPEG", optimize=True, quality=85),
    "tables that lack codes": encoded(_slowly_brighter(), "JPEG", optimize=True, quality=85),
    "progressive": encoded(PHOTO, "JPEG", progressive=True, quality=90),
    "gray": GRAY,
    "gray with factors": _gray_as_if_subsampled(GRAY),
    "restart markers": encoded(PHOTO, "JPEG", restart_marker_blocks=3, quality=90),
    "rotated by exif": encoded(PHOTO, "JPEG", exif=EXIF_ROTATED, comment=b"x" * 300, quality=90),
    "rgb inside": encoded(PHOTO, "JPEG", keep_rgb=True),
    "quality 100": encoded(PHOTO, "JPEG", quality=100, subsampling=0),
    "one tile a row": encoded(photo(5, 160, 400), "JPEG", quality=80),
    "large": encoded(photo(6, 1000, 720), "JPEG", quality=80),
}


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    try:
        return DECODERS[request.param]()
    except ImportError as error:
        pytest.skip(f"{request.param} is not installed: {error}")


def _tiled(kind: str) -> bytes:
    content = tiled(JPEGS[kind])
    assert content is not None
    return content


def _boxes(width: int, height: int, count: int) -> list[Box]:
    """All that touch some edges and not the others, and as many by chance."""
    xs, ys = ((0, side // 3, side * 2 // 3, side) for side in (width, height))
    lines = [list(itertools.combinations(along, 2)) for along in (xs, ys)]
    boxes = [(left, top, right, bottom) for (left, right), (top, bottom) in itertools.product(*lines)]
    return [*boxes, *random_boxes(width, height, count)]


@pytest.mark.parametrize("kind", JPEGS)
def test_every_part_of_a_tiled_file_has_the_pixels_of_its_original(decoder: Decoder, kind: str) -> None:
    content, whole_HWC = _tiled(kind), np.asarray(decode_image(JPEGS[kind]))
    assert (np.asarray(decode_image(content)) == whole_HWC).all()
    header = read_header(content)
    assert header is not None
    tiles = open_tiles(content, header)
    assert tiles is not None
    for left, top, right, bottom in _boxes(*whole_HWC.shape[1::-1], 10):
        ours_HWC = StoredImage(content, decoder).part((left, top, right, bottom))
        assert (ours_HWC == whole_HWC[top:bottom, left:right]).all(), (left, top, right, bottom)
        cut = tiles.cut((left, top, right, bottom), 1)
        box = cut.box((left, top, right, bottom))
        # a library that warned of anything would leave it to PIL
        assert decoder.name == "pil" or decoder.decode(cut.data, cut.header, box, 1) is not None


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", JPEGS)
def test_what_is_decoded_of_a_tiled_file_is_what_is_decoded_of_its_original(kind: str, shrink: int) -> None:
    decoder = DECODERS["turbojpeg"]()
    content, original = StoredImage(_tiled(kind), decoder), StoredImage(JPEGS[kind], decoder)
    for box in _boxes(original.width, original.height, 10):
        ours, expected = content.decode(box, shrink), original.decode(box, shrink)
        assert ours[1:] == expected[1:]
        assert np.array_equal(ours.rgb_HWC, expected.rgb_HWC), box


@pytest.mark.parametrize("fidelity", ["fast", "exact"])
def test_training_and_validation_see_the_same_pixels(fidelity: str) -> None:
    data = DataConfig.model_validate({"image_size": 48, "augment": "crop_flip", "fidelity": fidelity})
    for split in ("train", "val"):
        augment = Augment(data, split)
        for kind in ("4:2:0", "gray", "large", "progressive"):
            content, original = memoryview(_tiled(kind)), JPEGS[kind]
            for row in uniforms(0, 0, np.arange(5), augment.num_uniforms):
                ours_HWC, expected_HWC = np.zeros((2, 48, 48, 3), dtype=np.uint8)
                augment.render(content, row, ours_HWC)
                augment.render(original, row, expected_HWC)
                assert np.array_equal(ours_HWC, expected_HWC)


def test_a_crop_takes_the_bytes_that_it_needs() -> None:
    content = _tiled("large")
    header = read_header(content)
    assert header is not None
    tiles = open_tiles(content, header)
    assert tiles is not None
    assert len(tiles.cut((400, 260, 600, 460), 1).data) < 0.15 * len(content)
    assert len(content) < 1.1 * len(JPEGS["large"])


@pytest.mark.parametrize(
    "data",
    [
        encoded(PHOTO.convert("CMYK"), "JPEG"),
        encoded(PHOTO, "PNG"),
        encoded(photo(1), "JPEG"),
        encoded(Image.new("RGB", (1800, 1800), (90, 120, 30)), "JPEG", optimize=True),
        JPEGS["4:2:0"][:-900] + b"\xff\xd9",
        b"",
    ],
    ids=["cmyk", "png", "tiny", "flat", "cut short", "empty"],
)
def test_what_cannot_be_tiled_is_left_as_it_is(data: bytes) -> None:
    assert tiled(data) is None


def test_a_file_of_the_longest_sides_is_left_as_it_is() -> None:
    assert tiled(encoded(Image.new("RGB", (65_490, 64)), "JPEG", quality=100)) is None


@pytest.mark.parametrize("own_tables", [False, True])
def test_a_file_whose_map_would_be_too_long_for_its_segment_has_fewer_tiles(own_tables: bool) -> None:
    noise = np.random.default_rng(0)
    colors = np.kron(noise.integers(0, 2, (68, 68, 3)) * 255, np.ones((16, 16, 1)))  # so that entry points take long codes
    pixels = 0.75 * colors + 0.25 * noise.integers(0, 256, colors.shape)
    data = encoded(Image.fromarray(pixels.astype(np.uint8)), "JPEG", quality=100, optimize=own_tables)
    content = tiled(data)
    assert content is not None
    assert has_pixels_of(content, data)


def test_a_tiled_file_can_be_tiled_again() -> None:
    once = _tiled("4:2:0")
    assert tiled(once) == once


def test_damage_before_the_scan_is_an_error_and_so_is_another_length(decoder: Decoder) -> None:
    content = _tiled("4:2:0")
    scan = content.index(b"\xff\xda") + 14
    # but for the marker's own bytes, without which it is a file like any other
    for at in (*range(16, 60), *range(60, scan, 7)):
        damaged = content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
        with pytest.raises(UnreadableImageError):
            StoredImage(damaged, decoder)
    for shorter in (content[:5000] + content[5001:], content[:40], content[:20] + b"\xff\xd9", content + b"\xff\xd9"):
        with pytest.raises(UnreadableImageError):
            StoredImage(shorter, decoder).part((10, 10, 90, 90))


def test_a_map_that_lies_under_a_right_checksum_ends_in_pixels_or_an_error(decoder: Decoder) -> None:
    content = bytearray(_tiled("4:2:0"))
    scan = struct.unpack_from(">I", content, 22)[0]
    noise = np.random.default_rng(1)
    for _ in range(200):
        damaged = bytearray(content)
        for at in noise.integers(26, scan, 3):
            damaged[at] = noise.integers(256)
        struct.pack_into(">I", damaged, 14, zlib.crc32(damaged[18:scan]))
        with contextlib.suppress(UnreadableImageError):
            assert StoredImage(bytes(damaged), decoder).part((50, 50, 120, 100)).shape[2] == 3


def test_a_set_says_how_many_of_its_images_are_tiled(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(train={"a": 1, "b": 1}, val={"a": 1})
    for number, kind in enumerate(JPEGS):
        (root / "train" / "a" / f"z{number:02}.jpg").write_bytes(JPEGS[kind])
    (root / "train" / "b" / "cmyk.jpg").write_bytes(encoded(PHOTO.convert("CMYK"), "JPEG"))
    index = pack_here(root, tmp_path / "tiled", Mode(tiles=True), check=True)
    assert index.mode == {"tiles": len(JPEGS)}
    source, plain = open_records(str(tmp_path / "tiled"), "train"), root / "train"
    assert len(source) == len(JPEGS) + 3
    for number in range(len(source)):
        original = decode_image((plain.parent / source.name(number)).read_bytes())
        assert (np.asarray(decode_image(source.read(number))) == np.asarray(original)).all()
    smaller = pack_here(root, tmp_path / "smaller", Mode(max_side=250, quality=95, tiles=True))
    assert smaller.mode["max_side"] == 250
    assert 0 < smaller.mode["tiles"] <= len(JPEGS)


def test_check_leaves_out_tiles_that_show_other_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    original, other = JPEGS["4:2:0"], _tiled("4:2:2")
    assert has_pixels_of(_tiled("4:2:0"), original)
    assert not has_pixels_of(other, original)
    monkeypatch.setattr("trainables.data.pack.modes.tiled", lambda data: other)
    assert Mode(tiles=True).apply(original, pixels=False, check=True).content == original
    assert Mode(tiles=True).apply(original, pixels=False).content == other


def test_no_library_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    transcode._library.cache_clear()
    monkeypatch.setattr(transcode, "find_library", lambda: "/nowhere/libturbojpeg.so")
    with pytest.raises(DataError, match=r"pip install turbojpeg"):
        tiling.tiled(JPEGS["4:2:0"])
    monkeypatch.undo()
    transcode._library.cache_clear()


def test_a_tiled_file_is_one_that_anybody_reads() -> None:
    with Image.open(io.BytesIO(_tiled("4:2:0"))) as image:
        assert (image.format, image.size) == ("JPEG", (WIDTH, HEIGHT))
