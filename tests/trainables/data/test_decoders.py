import contextlib
import io
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.trainables.data.boxes import random_boxes
from tests.trainables.data.decoders import DECODERS, decoder_or_skip
from tests.trainables.data.photos import encoded, photo
from trainables.data import decode, turbojpeg
from trainables.data.decode import StoredImage, UnreadableImageError, decode_image
from trainables.data.jpeg import Box, read_header
from trainables.data.pack.modes import check_header
from trainables.data.turbojpeg import TurboJpeg, open_decoder

EXIF_ROTATED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
WIDTH, HEIGHT = 149, 115

JPEGS = {
    "4:4:4": encoded(photo(1, WIDTH, HEIGHT), "JPEG", subsampling=0, quality=92),
    "4:2:2": encoded(photo(1, WIDTH, HEIGHT), "JPEG", subsampling=1, quality=92),
    "4:2:0": encoded(photo(1, WIDTH, HEIGHT), "JPEG", subsampling=2, quality=92),
    "progressive": encoded(photo(1, WIDTH, HEIGHT), "JPEG", progressive=True),
    "gray": encoded(photo(1, WIDTH, HEIGHT).convert("L"), "JPEG"),
    "restart markers": encoded(photo(1, WIDTH, HEIGHT), "JPEG", restart_marker_blocks=3),
    "rotated by exif": encoded(photo(1, WIDTH, HEIGHT), "JPEG", exif=EXIF_ROTATED),
    "rgb inside": encoded(photo(1, WIDTH, HEIGHT), "JPEG", keep_rgb=True),
    "a comment": encoded(photo(1, WIDTH, HEIGHT), "JPEG", comment=b"x" * 3000),
}


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> TurboJpeg | None:
    return decoder_or_skip(request.param)


@pytest.fixture
def turbo() -> TurboJpeg:
    found = decoder_or_skip("turbojpeg")
    assert found is not None
    return found


def _pil(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _boxes(width: int, height: int, count: int) -> list[Box]:
    boxes = [(0, 0, width, height), (0, 0, 1, 1), (width - 1, height - 1, width, height)]
    return [*boxes, *random_boxes(width, height, count)]


@pytest.mark.parametrize("kind", JPEGS)
def test_every_part_of_an_image_has_the_pixels_of_pil(decoder: TurboJpeg | None, kind: str) -> None:
    whole_HWC = _pil(JPEGS[kind])
    for left, top, right, bottom in _boxes(WIDTH, HEIGHT, 60):
        ours_HWC = StoredImage(JPEGS[kind], decoder).part((left, top, right, bottom))
        assert (ours_HWC == whole_HWC[top:bottom, left:right]).all(), (left, top, right, bottom)


@pytest.mark.parametrize("kind", JPEGS)
def test_libjpeg_turbo_leaves_no_kind_to_pil(turbo: TurboJpeg, kind: str) -> None:
    header = read_header(JPEGS[kind])
    assert header is not None
    assert turbo.decode(JPEGS[kind], header, (0, 0, WIDTH, HEIGHT), 1) is not None


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("kind", ["4:4:4", "4:2:2", "4:2:0", "progressive", "gray"])
def test_a_shrunk_part_shows_what_the_part_shows(decoder: TurboJpeg | None, kind: str, shrink: int) -> None:
    small = Image.open(io.BytesIO(JPEGS[kind])).convert("RGB").resize((WIDTH // 8, HEIGHT // 8), Image.Resampling.BOX)
    data = encoded(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), "JPEG", quality=95)  # nothing finer than 1/8
    # the last shrunk pixels stand for pixels beyond the edge too
    whole = Image.fromarray(np.pad(_pil(data), ((0, -HEIGHT % 8), (0, -WIDTH % 8), (0, 0)), mode="edge"))
    for box in _boxes(WIDTH, HEIGHT, 40):
        rgb_HWC, left, top, shrunk = StoredImage(data, decoder).decode(box, shrink)
        assert shrunk in (1, shrink)
        height, width = rgb_HWC.shape[:2]
        assert left * shrunk <= box[0]
        assert top * shrunk <= box[1]
        assert (left + width) * shrunk >= box[2]
        assert (top + height) * shrunk >= box[3]
        covered = (left * shrunk, top * shrunk, (left + width) * shrunk, (top + height) * shrunk)
        averaged = np.asarray(whole.resize((width, height), Image.Resampling.BOX, box=covered), dtype=float)
        assert abs(rgb_HWC - averaged).mean() < 5, box


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "progressive", "gray"])
def test_a_truncated_file_is_what_pil_says_wherever_it_ends(decoder: TurboJpeg | None, kind: str) -> None:
    whole, outcomes = JPEGS[kind], set()
    for length in (*range(2, 700, 37), *range(700, len(whole), 411), *range(len(whole) - 6, len(whole) + 1)):
        for box in ((0, 0, WIDTH, HEIGHT), (5, 3, 40, 9)):
            try:
                expected = np.asarray(decode_image(whole[:length]))[box[1] : box[3], box[0] : box[2]]
            except UnreadableImageError as error:
                outcomes.add("unreadable")
                with pytest.raises(UnreadableImageError, match=str(error).split(":")[0]):
                    StoredImage(whole[:length], decoder).part(box)
            else:
                outcomes.add("read")
                assert (StoredImage(whole[:length], decoder).part(box) == expected).all()
    assert outcomes == {"unreadable", "read"}


def _damaged(count: int) -> Iterator[bytes]:
    noise = np.random.default_rng(1)
    for whole in JPEGS.values():
        for _ in range(count):
            damaged = bytearray(whole)
            for position in noise.integers(2, len(whole) - 2, 2):
                damaged[position] = noise.integers(0, 256)
            yield bytes(damaged)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_what_pil_says_or_pixels_that_pil_refuses(
    decoder: TurboJpeg | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 500_000)
    for data in _damaged(30):
        try:
            expected = np.asarray(decode_image(data))
        except UnreadableImageError:
            with contextlib.suppress(UnreadableImageError):
                StoredImage(data, decoder).whole()
        else:
            assert (StoredImage(data, decoder).whole() == expected).all()


def test_a_damaged_file_spoils_no_other(turbo: TurboJpeg) -> None:
    whole = JPEGS["4:2:0"]
    header = read_header(whole)
    assert header is not None
    expected = turbo.decode(whole, header, (3, 3, 50, 50), 1)
    assert expected is not None
    for data in (*_damaged(6), *(whole[:length] for length in range(100, len(whole), 83))):
        turbo.decode(data, header, (0, 0, WIDTH, HEIGHT), 1)
        again = turbo.decode(whole, header, (3, 3, 50, 50), 1)
        assert again is not None
        assert (again.rgb_HWC == expected.rgb_HWC).all()


def test_a_file_with_something_after_its_end_is_read(decoder: TurboJpeg | None) -> None:
    data = JPEGS["4:2:0"] + b"a trailer of some camera"
    assert (StoredImage(data, decoder).part((3, 50, 30, 90)) == _pil(data)[50:90, 3:30]).all()


def test_a_thumbnail_with_an_end_of_its_own_does_not_hide_a_truncation(decoder: TurboJpeg | None) -> None:
    inside = encoded(photo(2, 16, 16), "JPEG")
    whole = encoded(photo(1, WIDTH, HEIGHT), "JPEG", exif=EXIF_ROTATED + inside)
    assert inside[-2:] == b"\xff\xd9"
    assert StoredImage(whole, decoder).part((0, 0, 9, 9)).shape == (9, 9, 3)
    with pytest.raises(UnreadableImageError, match="truncated"):
        StoredImage(whole[: len(whole) * 3 // 4], decoder).part((0, 0, 9, 9))


@pytest.mark.parametrize(
    "data",
    [
        encoded(photo(1).convert("CMYK"), "JPEG"),
        encoded(photo(2), "PNG"),
        encoded(photo(4), "WEBP"),
        encoded(photo(5).quantize(8), "GIF"),
    ],
    ids=["cmyk", "png", "webp", "gif"],
)
def test_what_is_no_ordinary_jpeg_goes_to_pil(decoder: TurboJpeg | None, data: bytes) -> None:
    assert read_header(data) is None
    stored = StoredImage(data, decoder)
    assert (stored.width, stored.height) == (40, 32)
    assert (stored.part((5, 6, 30, 20)) == _pil(data)[6:20, 5:30]).all()


def test_a_header_says_the_size_or_nothing() -> None:
    for kind, data in JPEGS.items():
        header = read_header(memoryview(data))
        assert header is not None
        assert header[:2] == (WIDTH, HEIGHT)
        assert header.mcu_width == (16 if kind not in ("4:4:4", "gray", "rgb inside") else 8)
        assert header.ycbcr == (kind != "rgb inside")
        assert read_header(data[:-1]) is None
        for length in range(0, 700, 7):
            shortened = read_header(data[:length] + b"\xff\xd9")
            assert shortened is None or shortened[:2] == header[:2]
    assert read_header(b"") is None
    for nonsense in (b"", b"\xff\xd8" * 400, b"\xff\xe0\0\0" + b"\xff" * 400, b"\xff\xc0\0\x11\x08\1"):
        assert read_header(b"\xff\xd8" + nonsense + b"\xff\xd9") is None


def test_a_decompression_bomb_is_refused_by_its_header(decoder: TurboJpeg | None) -> None:
    data = JPEGS["4:4:4"]
    at = data.index(b"\xff\xc0")
    bomb = data[: at + 5] + struct.pack(">HH", 65_000, 65_000) + data[at + 9 :]
    began = time.process_time()
    with pytest.raises(UnreadableImageError, match="decompression bombs"):
        StoredImage(bomb, decoder)
    assert time.process_time() - began < 0.1


def test_a_size_that_so_few_bytes_cannot_hold_is_refused_by_its_header(decoder: TurboJpeg | None) -> None:
    for data, frame in ((JPEGS["4:4:4"], b"\xff\xc0"), (encoded(photo(1).convert("CMYK"), "JPEG"), b"\xff\xc0")):
        at = data.index(frame)
        claims = data[: at + 5] + struct.pack(">HH", 9_000, 9_000) + data[at + 9 :]
        with pytest.raises(UnreadableImageError, match="truncated or damaged: too few bytes for its size"):
            StoredImage(claims, decoder)
        assert check_header(claims) is None
    white = encoded(Image.new("L", (4_000, 4_000), 255), "JPEG", optimize=True, progressive=True)
    assert StoredImage(white, decoder).part((0, 0, 8, 8)).min() == 255


def test_scans_without_end_are_refused_before_any_is_decoded(decoder: TurboJpeg | None) -> None:
    for mode in ("RGB", "CMYK"):
        data = encoded(Image.new(mode, (2000, 1500)), "JPEG", progressive=True)
        bomb = data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 700 + data[-2:]
        with pytest.raises(UnreadableImageError, match="too many progressive scans for its size"):
            StoredImage(bomb, decoder)
        assert check_header(bomb) is None


def test_threads_share_a_decoder(decoder: TurboJpeg | None) -> None:
    boxes = _boxes(WIDTH, HEIGHT, 100)
    alone = [StoredImage(JPEGS["4:2:0"], decoder).part(box) for box in boxes]
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda box: StoredImage(memoryview(JPEGS["4:2:0"]), decoder).part(box), boxes))
        assert all((one == other).all() for one, other in zip(alone, together, strict=True))


def test_without_libjpeg_turbo_3_pil_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turbojpeg, "find_library", lambda: "/nowhere/libturbojpeg.so")
    assert open_decoder.__wrapped__() is None


def test_pils_own_switch_for_truncated_files_is_off() -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
