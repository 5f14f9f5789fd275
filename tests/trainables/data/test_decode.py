import errno
import io
import os
import socket
import struct
import subprocess
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


def _big_endian(image: Image.Image) -> Image.Image:
    return Image.frombytes("I;16B", image.size, np.asarray(image).astype(">u2").tobytes())


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
    "png palette with a transparent color": encoded(photo(2).quantize(16), "PNG", transparency=3),
    "png alpha": encoded(_with_alpha(), "PNG"),
    "png gray alpha": encoded(_with_alpha().convert("LA"), "PNG"),
    "png 16 bit": encoded(_sixteen_bit(), "PNG"),
    "tiff 16 bit": encoded(_sixteen_bit(), "TIFF"),
    "tiff 16 bit, big-endian": encoded(_big_endian(_sixteen_bit()), "TIFF"),
    "pgm 16 bit": encoded(_sixteen_bit(), "PPM"),
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
    if "16 bit" in kind:  # which PIL clips at 255
        expected = np.repeat(np.rint(np.asarray(_sixteen_bit()) / 257).astype(np.uint8)[..., None], 3, axis=2)
    for ours in (decode_image(FILES[kind]), decode_image(read_file(str(path)))):
        assert ours.mode == "RGB"
        assert (np.asarray(ours) == expected).all()


def test_twelve_bits_of_a_tiff_become_eight() -> None:
    bits = np.unpackbits(np.array([0, 4095, 2048, 15], dtype=">u2").view(np.uint8).reshape(4, 2), axis=1)[:, 4:]
    tiff = bytearray(encoded(Image.new("L", (4, 1)), "TIFF"))
    with Image.open(io.BytesIO(tiff)) as image:
        (offset,) = image.tag_v2[273]
    at = tiff.index(struct.pack("<HHI", 258, 3, 1))
    tiff[at + 8 : at + 10] = struct.pack("<H", 12)
    tiff[offset:] = np.packbits(bits.ravel()).tobytes() + tiff[offset + 6 :]
    assert np.asarray(decode_image(bytes(tiff)))[0, :, 0].tolist() == [0, 255, 128, 1]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_of_unknown_range_are_unreadable(dtype: type) -> None:
    with pytest.raises(
        UnreadableImageError, match=r"^values of PIL's mode [IF], whose range is unknown; save it with 8 or 16 bits$"
    ):
        decode_image(encoded(Image.fromarray(np.full((4, 4), 3, dtype=dtype)), "TIFF"))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_up_to_the_size_that_pil_refuses_is_read() -> None:
    with pytest.raises(UnreadableImageError, match="more than 178 million pixels, PIL's limit"):
        decode_image(flat_png(17_000, 11_000, depth=1, color=0))
    assert decode_image(flat_png(9000, 11_000, depth=1, color=0)).size == (9000, 11_000)


def test_a_jpeg_that_is_too_large_can_be_decoded_at_a_part_of_its_size() -> None:
    large = encoded(Image.new("L", (14_000, 13_000), 200), "JPEG")
    reduced = decode_image(large, reduced=True)
    assert (reduced.size, reduced.getpixel((6999, 6499))) == ((7000, 6500), (200, 200, 200))
    small = decode_image(FILES["jpeg"], reduced=True)
    assert small.tobytes() == decode_image(FILES["jpeg"]).tobytes()


@pytest.mark.processes
def test_no_warning_of_pil_reaches_the_terminal(tmp_path: Path) -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # nine tags, of which one is there
    (tmp_path / "exif").write_bytes(encoded(photo(1), "JPEG", exif=exif))
    (tmp_path / "large").write_bytes(flat_png(9000, 11_000, depth=1, color=0))
    (tmp_path / "palette").write_bytes(encoded(photo(2).quantize(16), "PNG", transparency=b"\0\1\2"))
    script = (
        "import sys; from trainables.data.decode import decode_image, read_file\n"
        "for path in sys.argv[1:]: decode_image(read_file(path))"
    )
    command = [sys.executable, "-c", script, *map(str, sorted(tmp_path.iterdir()))]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""


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
    for content, reason in (
        (b"", "empty file"),
        (b"<html>not found</html>", "not an image"),
        (b"II*\0" + bytes(20), "a TIFF of channels that PIL does not read, save it as 8-bit RGB"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer, run `git lfs pull`"),
        (FILES["jpeg"][:600], "truncated"),
    ):
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
