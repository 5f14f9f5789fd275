"""LMDB environments: Caffe's Datum; image files under keys CLASS/NAME; or image files beside labels, image-N and label-N.

Values that Python has pickled, the most common layout of all, are refused: to read a pickle is to run what it says.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.interface import NO_LABELS
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import Label, LayoutReader, files_below
from trainables.data.pack.readers.protobuf import WireError, parse_datum
from trainables.errors import DataError, printable

_FILE = "data.mdb"
_IMAGE_KEY, _LABEL_KEY = b"image-", b"label-"
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"P5", b"P6")
_NO_IMAGE = re.compile(rb"label-\d+|num-samples|__\w+__")
"""Other keys than images: labels, their number, and those of PyTorch users' tools, such as __len__ and __keys__."""
_LAYOUTS = "Datum values, image files under keys CLASS/NAME, or image files under image-N with label-N beside them"


class LmdbReader(LayoutReader):
    """A location is an environment below the root, a folder or a single file, and a key, its bytes as Latin-1."""

    what = "LMDB environments"
    random_access = False

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        """Folders with data.mdb in them, and environments of a single file (LMDB's subdir=False)."""
        files = files_below(root, rf"{re.escape(_FILE)}|(?!lock\.).+\.(mdb|lmdb)")
        return [path.parent if path.name == _FILE else path for path in files]

    def samples(self, part: Path) -> Iterator[tuple[tuple[str, str], Label | None]]:
        name = str(part.relative_to(self.root))
        with _reading(part) as transaction:
            for key_view, value in transaction.cursor():
                key = bytes(key_view)
                if not _NO_IMAGE.fullmatch(key):
                    yield (name, key.decode("latin-1")), self._label(part, transaction, key, value)

    def name(self, location: tuple[str, str]) -> str:
        return printable("/".join(location))

    def _label(self, path: Path, transaction: Any, key: bytes, value: memoryview) -> Label | None:
        """The label of the image under a key. Raises DataError for a layout that is not known."""
        if bytes(value[:4]).startswith(_MAGIC):
            label = transaction.get(key.replace(_IMAGE_KEY, _LABEL_KEY, 1)) if key.startswith(_IMAGE_KEY) else None
            if label is not None:
                self.text_is_index = True
                return bytes(label).decode(errors="replace").strip()
            name, slash, _ = key.decode(errors="replace").lstrip("/").partition("/")
            if not slash and self.labels:
                raise DataError(f"{path}: the label of {key!r} is not to be found; give {_LAYOUTS}; {NO_LABELS}")
            return name if slash else None
        if len(value) > 2 and value[0] == 0x80 and value[1] in range(2, 6) and value[-1] == ord("."):
            raise DataError(
                f"{path}: its values are Python pickles, and reading a pickle runs whatever code it names; "
                f"write it again as {_LAYOUTS}, or pack the images that it was made from"
            )
        try:
            datum = parse_datum(value)
        except WireError as error:
            raise DataError(f"{path}: {key!r} is of no known layout ({error}); give {_LAYOUTS}") from None
        self.pixels |= not datum.encoded  # of both kinds, all are stored as pixels
        return datum.label

    def read(self, locations: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Sample | UnreadableImageError]]:
        with contextlib.ExitStack() as opened:
            open_now: dict[str, Any] = {}
            for name, key in locations:
                if name not in open_now:
                    open_now[name] = opened.enter_context(_reading(self.root / name))
                value = open_now[name].get(key.encode("latin-1"))
                yield self.name((name, key)), UnreadableImageError("no such key") if value is None else _sample(value)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """A read transaction, which gives views of the mapped file: they are valid as long as it is.

    Raises DataError where there is no environment, or it is damaged.
    """
    import lmdb

    try:
        with (
            lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False) as environment,
            environment.begin(buffers=True) as transaction,
        ):
            yield transaction
    except lmdb.Error as error:
        raise not_readable(path / _FILE if path.is_dir() else path, "an LMDB environment", str(error)) from None


def _sample(value: memoryview) -> Sample | UnreadableImageError:
    """An image file's bytes, or the RGB pixels of a Datum, which Caffe keeps as planes of blue, green and red."""
    if bytes(value[:4]).startswith(_MAGIC):
        return bytes(value)
    try:
        datum = parse_datum(value)
    except WireError as error:
        return UnreadableImageError(str(error))
    if datum.encoded:
        return bytes(datum.data)
    if datum.channels not in (1, 3) or not datum.height or not datum.width:
        return UnreadableImageError(f"{datum.channels} × {datum.height} × {datum.width} pixels are no image")
    pixels_CHW: NDArray[np.uint8] = np.frombuffer(datum.data, dtype=np.uint8).reshape(datum.channels, datum.height, datum.width)
    return np.ascontiguousarray(np.repeat(pixels_CHW, 3 // datum.channels, axis=0)[::-1].transpose(1, 2, 0))
