import errno
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fuzz.originals import flat_png
from tests.trainables.data.photos import encoded, photo
from trainables.data import decode
from trainables.data.decode import UnreadableImageError, decode_image, read_file


def _sixteen_bit() -> Image.Image:
    return Image.fromarray(np.linspace(0, 65535, 40 * 32).reshape(32, 40).astype(np.uint16))


def _with_alpha() -> Image.Image:
    image = photo(3).convert("RGBA")
    image.putalpha(Image.fromarray(np.arange(32 * 40, dtype=np.uint8).reshape(32, 40)))
    return image


FILES = {
    "jpeg": encoded(photo(1), "JPEG"),
    "jpeg progressive": encoded(photo(1), "JPEG", progressive=True),
    "jpeg 4:4:4": encoded(photo(1), "JPEG", subsampling=0, quality=95),
    "jpeg gray": encoded(photo(1).convert("L"), "JPEG"),
    "jpeg cmyk": encoded(photo(1).convert("CMYK"), "JPEG"),
    "jpeg rotated by exif": encoded(
        photo(1), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    ),
    "png": encoded(photo(2), "PNG"),
    "png interlaced gray": encoded(photo(2).convert("L"), "PNG"),
    "png one bit": encoded(photo(2).convert("1"), "PNG"),
    "png palette": encoded(photo(2).quantize(16), "PNG"),
    "png palette with a transparent colour": encoded(photo(2).quantize(16), "PNG", transparency=3),
    "png alpha": encoded(_with_alpha(), "PNG"),
    "png gray alpha": encoded(_with_alpha().convert("LA"), "PNG"),
    "png 16 bit": encoded(_sixteen_bit(), "PNG"),
    "tiff 16 bit": encoded(_sixteen_bit(), "TIFF"),
    "webp": encoded(photo(4), "WEBP"),
    "webp lossless": encoded(photo(4), "WEBP", lossless=True),
    "webp alpha": encoded(_with_alpha(), "WEBP"),
    "bmp": encoded(photo(5), "BMP"),
    "gif": encoded(photo(5).quantize(8), "GIF"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_pixels_are_those_of_pil(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"  # the content says what a file is, not its name
    path.write_bytes(FILES[kind])
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    for ours in (decode_image(FILES[kind]), decode_image(read_file(str(path)))):
        assert ours.mode == "RGB"
        assert (np.asarray(ours) == expected).all()


def test_sixteen_bits_are_clipped_as_pil_clips_them() -> None:
    assert (np.asarray(decode_image(FILES["png 16 bit"]))[..., 0] == np.minimum(np.asarray(_sixteen_bit()), 255)).all()


@pytest.mark.parametrize(
    "kind", ["jpeg", "jpeg progressive", "jpeg cmyk", "png", "png 16 bit", "png palette", "webp", "webp alpha", "bmp"]
)
def test_a_truncated_file_is_unreadable_wherever_it_ends(kind: str) -> None:
    whole = FILES[kind]
    for length in (1, 8, 30, len(whole) // 3, len(whole) // 2, len(whole) * 4 // 5):
        with pytest.raises(UnreadableImageError) as caught:
            decode_image(whole[:length])
        assert "\n" not in str(caught.value)
        assert 0 < len(str(caught.value)) < 120


@pytest.mark.filterwarnings("ignore")
def test_random_damage_gives_an_image_or_a_reason_and_nothing_else() -> None:
    noise = np.random.default_rng(0)
    for kind, whole in FILES.items():
        for _ in range(40):
            damaged = bytearray(whole)
            for position in noise.integers(0, min(len(whole), 400), 3):
                damaged[position] = noise.integers(0, 256)
            try:
                image = decode_image(bytes(damaged))
            except UnreadableImageError:
                continue
            assert image.mode == "RGB", kind


def test_the_reason_is_one_phrase() -> None:
    for content, reason in ((b"", "empty file"), (b"<html>not found</html>", "not an image"), (FILES["jpeg"][:600], "truncated")):
        with pytest.raises(UnreadableImageError, match=reason):
            decode_image(content)


def test_a_decompression_bomb_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 100)
    with pytest.raises(UnreadableImageError, match="decompression bombs"):
        decode_image(FILES["png"])


def test_a_strip_that_pil_would_call_a_lack_of_memory_is_unreadable() -> None:
    with pytest.raises(UnreadableImageError, match="longer or wider than PIL can decode"):
        decode_image(flat_png(2**26, 1))


def test_a_file_that_is_missing_or_a_folder_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImageError, match="cannot be read: No such file"):
        read_file(str(tmp_path / "absent.jpg"))
    with pytest.raises(UnreadableImageError, match="cannot be read: Is a directory"):
        read_file(str(tmp_path))


def test_a_name_that_is_no_file_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        for name in ("loop.jpg", "socket.jpg", "x" * 300, "socket.jpg/under"):
            with pytest.raises(UnreadableImageError, match="cannot be read: "):
                read_file(name)


@pytest.mark.skipif(sys.platform != "linux", reason="the first page of /proc/self/mem is a disk that fails")
def test_a_disk_that_fails_is_no_unreadable_image() -> None:
    with pytest.raises(OSError, match="/proc/self/mem") as caught:
        read_file("/proc/self/mem")
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 3 * 2**20])
def test_a_file_of_any_size_is_read_whole(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(0).bytes(size)
    (tmp_path / "file").write_bytes(content)
    assert read_file(str(tmp_path / "file")) == content


def test_a_pipe_of_an_images_name_is_unreadable_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(UnreadableImageError, match="empty file"):
        decode_image(read_file(str(tmp_path / "pipe.jpg")))


def test_reading_leaves_no_file_open(tmp_path: Path) -> None:
    path, before = tmp_path / "image.png", set(os.listdir("/dev/fd"))
    path.write_bytes(FILES["png"])
    decode_image(read_file(str(path))).load()
    with pytest.raises(UnreadableImageError, match="Is a directory"):  # said once it is open
        read_file(str(tmp_path))
    assert set(os.listdir("/dev/fd")) <= before
