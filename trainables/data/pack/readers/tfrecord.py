"""TFRecord files of `tf.Example`s: ImageNet's `image/encoded` and `image/class/label`, or TFDS's `image` and `label`.

TensorFlow is not needed. https://www.tensorflow.org/tutorials/load_data/tfrecord gives the format: for each record its length
(8 bytes), a checksum of that (4), its content, a checksum of that (4); numbers are little-endian.
"""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainables.data.decode import UnreadableImageError
from trainables.data.pack.layout_reader import Label, LayoutReader, Listing, Location, files_below, locate, numbered, split_files
from trainables.data.pack.readers.protobuf import WireError, example_features
from trainables.errors import DataError

_FILES = r".+\.tfrecords?(-\d+-of-\d+)?|(train|val|validation|test)-\d+-of-\d+"
_IMAGE = ("image/encoded", "image")
_LABEL = ("image/class/label", "label")
_CLASS_NAME = ("image/class/synset", "image/class/text")
_FILE_NAME = ("image/filename", "file_name")

_Features = dict[str, list[memoryview] | list[int]]


class TfrecordReader(LayoutReader):
    """A location is a file below the root, and where in it a record's content lies: offset and size."""

    @staticmethod
    def matches(root: Path) -> bool:
        return bool(files_below(root, _FILES))

    def listing(self) -> Listing:
        names: dict[Label, str] = {}

        def samples(path: Path) -> Iterator[tuple[Location, Label]]:
            for offset, size, features in _records(path):
                label = _first(features, _LABEL)
                if not isinstance(label, int):
                    raise DataError(f"{path}: the record at byte {offset} has no {' or '.join(_LABEL)}; give labelled images")
                if label not in names and (name := _first(features, _CLASS_NAME)):
                    names[label] = _text(name)
                yield (str(path.relative_to(self._root)), offset, size), label

        files = split_files(self._root, files_below(self._root, _FILES), "TFRecord files")
        return numbered(self._root, locate(files, samples), names)

    def read(self, locations: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, bytes | UnreadableImageError]]:
        for location in locations:
            try:
                yield self._read(*location)
            except WireError as error:
                yield f"{location[0]}@{location[1]}", UnreadableImageError(f"a damaged record: {error}")

    def _read(self, file: str, offset: int, size: int) -> tuple[str, bytes]:
        with open(self._root / file, "rb") as content:
            content.seek(offset)
            record = content.read(size + 4)
        if len(record) < size + 4 or masked_crc32c(record[:size]) != int.from_bytes(record[size:], "little"):
            raise WireError("its checksum is another")
        features = example_features(memoryview(record)[:size])
        name, image = _first(features, _FILE_NAME), _first(features, _IMAGE)
        if not isinstance(image, memoryview):
            raise WireError(f"no {' or '.join(_IMAGE)}")
        return _text(name) if name else f"{file}@{offset}", bytes(image)


def masked_crc32c(content: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(content))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _records(path: Path) -> Iterator[tuple[int, int, _Features]]:
    """Offset and size of each record's content and its features; of the mapped file only lengths and labels are touched."""
    if not path.stat().st_size:
        return
    with open(path, "rb") as file:  # the mapping ends with the last view of it
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 0
    while at < len(whole):
        head = bytes(whole[at : at + 12])
        if len(head) < 12 or masked_crc32c(head[:8]) != int.from_bytes(head[8:], "little"):
            raise DataError(f"{path} is no TFRecord file, or damaged, from byte {at} on; download it again")
        offset, size = at + 12, int.from_bytes(head[:8], "little")
        at = offset + size + 4
        if at > len(whole):
            raise DataError(f"{path} is cut off in the record at byte {offset}; download it again")
        try:
            yield offset, size, example_features(whole[offset : offset + size])
        except WireError as error:
            raise DataError(f"{path}: the record at byte {offset} is no tf.Example ({error}); download it again") from None


def _first(features: _Features, keys: tuple[str, ...]) -> int | memoryview | None:
    return next((features[key][0] for key in keys if features.get(key)), None)


def _text(value: int | memoryview) -> str:
    return str(value) if isinstance(value, int) else bytes(value).decode(errors="replace")
