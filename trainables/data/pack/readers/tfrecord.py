"""TFRecord files of `tf.Example`s: ImageNet's `image/encoded` and `image/class/label`, or TFDS's `image` and `label`.

TensorFlow is not needed. https://www.tensorflow.org/tutorials/load_data/tfrecord gives the format: for each record its length
(8 bytes), a checksum of that (4), its content, a checksum of that (4); numbers are little-endian.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from trainables.data.decode import UnreadableImageError
from trainables.data.interface import NO_LABELS
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import Label, LayoutReader, Piece, files_below
from trainables.data.pack.readers.protobuf import Value, WireError, example_features
from trainables.errors import DataError, NoLabelsError

_CHECKSUM_BYTES = 4
_IMAGE = ("image/encoded", "image")
_LABEL = ("image/class/label", "label")
_CLASS_NAME = ("image/class/synset", "image/class/text")
_FILE_NAME = ("image/filename", "file_name")


class TfrecordReader(LayoutReader):
    """A location is the Piece of a record's content and its checksum; its name, where it has none of its own, is its offset."""

    what = "TFRecord files"

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        return files_below(root, r".+\.tfrecords?(-\d+-of-\d+)?(\.gz)?|(train|val|validation|test)-\d+-of-\d+(\.gz)?")

    def samples(self, part: Path) -> Iterator[tuple[Piece, Label | None]]:
        file = str(part.relative_to(self.root))
        for offset, size, features in _records(part):
            found = _first(features, _LABEL)
            label = found if isinstance(found, int) else None
            if label is None and self.labels:
                raise NoLabelsError(f"{part}: the record at byte {offset} has no {' or '.join(_LABEL)}; {NO_LABELS}")
            if label is not None and label not in self.names and (class_name := _first(features, _CLASS_NAME)):
                self.names[label] = _text(class_name)
            name = _text(_first(features, _FILE_NAME) or offset)
            yield Piece(file, offset, size + _CHECKSUM_BYTES, name), label

    def decode(self, content: bytes) -> bytes:
        record, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if masked_crc32c(record) != int.from_bytes(checksum, "little"):
            raise UnreadableImageError("a damaged record: its checksum is another")
        try:
            image = _first(example_features(memoryview(record)), _IMAGE)
        except WireError as error:
            raise UnreadableImageError(f"a damaged record: {error}") from None
        if not isinstance(image, memoryview):
            raise UnreadableImageError(f"a record without {' or '.join(_IMAGE)}")
        return bytes(image)


def masked_crc32c(content: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(content))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _records(path: Path) -> Iterator[tuple[int, int, dict[str, Value]]]:
    """Offset and size of each record's content and its features; of the mapped file only lengths and labels are touched."""
    if not path.stat().st_size:
        return
    with open(path, "rb") as file:  # the mapping ends with the last view of it
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 0
    while at < len(whole):
        head = bytes(whole[at : at + 12])
        if len(head) < 12 or masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little"):
            raise not_readable(path, "a TFRecord file", f"at byte {at}", cut_off=len(head) < 12)
        offset, size = at + 12, int.from_bytes(head[:8], "little")
        at = offset + size + _CHECKSUM_BYTES
        if at > len(whole):
            raise not_readable(path, "a TFRecord file", f"in the record at byte {offset}", cut_off=True)
        try:
            yield offset, size, example_features(whole[offset : offset + size])
        except WireError as error:
            raise DataError(f"{path}: the record at byte {offset} is no tf.Example ({error}); give labelled images") from None


def _first(features: dict[str, Value], keys: tuple[str, ...]) -> Value | None:
    return next((features[key] for key in keys if key in features), None)


def _text(value: Value) -> str:
    return str(value) if isinstance(value, int) else bytes(value).decode(errors="replace")
