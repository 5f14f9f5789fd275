"""CIFAR-10 and CIFAR-100 as https://www.cs.toronto.edu/~kriz/cifar.html has them: the binary version and the one for Python.

Shapes: N images of a file, C=3 channels, H=W=32 pixels.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.order import Split
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import LayoutReader, Piece
from trainables.errors import DataError

_PIXEL_BYTES = 3 * 32 * 32


class _Version(NamedTuple):
    names: str
    """The file of the classes' names; those of a pickle stand under `names_key`."""
    names_key: str
    labels: int | str
    """The bytes of label before each image, of which the last is the class; or the key of a pickle's labels."""
    files: dict[Split, tuple[str, ...]]


_TEN: dict[Split, tuple[str, ...]] = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "val": ("test_batch",)}
_TEN_BINARY: dict[Split, tuple[str, ...]] = {split: tuple(f"{name}.bin" for name in names) for split, names in _TEN.items()}
_VERSIONS = (
    _Version("batches.meta.txt", "", 1, _TEN_BINARY),
    _Version("fine_label_names.txt", "", 2, {"train": ("train.bin",), "val": ("test.bin",)}),
    _Version("batches.meta", "label_names", "labels", _TEN),
    _Version("meta", "fine_label_names", "fine_labels", {"train": ("train",), "val": ("test",)}),
)


class CifarReader(LayoutReader):
    """A location is an image's Piece of a file."""

    pixels = True
    _labels: int | str

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        """The files of the classes' names."""
        return [
            root / names for names, _, _, files in _VERSIONS if all((root / name).is_file() for name in (names, *files["val"]))
        ]

    def splits(self) -> Mapping[Split, Sequence[Path]]:
        names_file = self.files(self.root)[0]
        version = next(version for version in _VERSIONS if version.names == names_file.name)
        if version.names_key:
            self.classes = _unpickled(names_file)[version.names_key]
        else:
            self.classes = names_file.read_text(encoding="utf-8").split()
        self._labels = version.labels
        return {split: [self.root / name for name in names] for split, names in version.files.items()}

    def samples(self, part: Path) -> Iterator[tuple[Piece, int]]:
        read = _read_binary if isinstance(self._labels, int) else _read_pickle
        try:
            labels, begin, step = read(part, self._labels)
        except OSError as error:
            raise DataError(f"{part} cannot be read: {error.strerror}; give all files of the data set") from None
        for number, label in enumerate(labels):
            yield Piece(part.name, begin + number * step, _PIXEL_BYTES, str(number)), label

    def name(self, location: Piece) -> str:
        return f"{location.file}[{location.name}]"

    def decode(self, content: bytes) -> NDArray[np.uint8]:
        pixels_CHW = np.frombuffer(content, dtype=np.uint8).reshape(3, 32, 32)
        return np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))


def _read_binary(path: Path, label_bytes: Any) -> tuple[list[int], int, int]:
    """The labels of a file, where its first image begins, and the bytes from one image to the next."""
    content, step = np.fromfile(path, dtype=np.uint8), label_bytes + _PIXEL_BYTES
    if not len(content) or len(content) % step:
        raise not_readable(path, "a CIFAR file", f"{len(content):,} bytes, not a multiple of {step}", cut_off=True)
    return content.reshape(-1, step)[:, label_bytes - 1].tolist(), label_bytes, step


def _read_pickle(path: Path, key: Any) -> tuple[list[int], int, int]:
    """The same of a pickled dict of labels and of an array (N, 3072), whose bytes stand in the file as they are."""
    batch, begin = _unpickled(path), -1
    labels = batch.get(key)
    match batch.get("data"):
        case _Numpy(state=(_, shape, _Numpy(arguments=("u1" | "|u1", *_)), False, str() | bytes() as pixels)) if (
            isinstance(labels, list) and shape == (len(labels), _PIXEL_BYTES) and len(pixels) == len(labels) * _PIXEL_BYTES
        ):  # Python 2 wrote bytes as text
            begin = path.read_bytes().find(pixels.encode("latin-1") if isinstance(pixels, str) else pixels)
    if begin < 0:
        raise not_readable(path, "a CIFAR batch", f"no uint8 array of {_PIXEL_BYTES} columns with {key}")
    return [int(label) for label in labels or ()], begin, _PIXEL_BYTES


def _unpickled(path: Path) -> dict[str, Any]:
    """The dict in a pickle, its keys and texts as str. No code runs that the file names. Raises DataError."""
    content = path.read_bytes()
    try:
        values = dict(_Unpickler(io.BytesIO(content), encoding="latin-1").load())
    except Exception as error:  # the unpickler reads any bytes, and may fail in any way
        is_cut_off = isinstance(error, EOFError) or "truncated" in str(error)
        raise not_readable(path, "a CIFAR batch", str(error) or type(error).__name__, cut_off=is_cut_off) from None
    return {_text(key): [_text(item) for item in value] if isinstance(value, list) else value for key, value in values.items()}


def _text(value: Any) -> Any:
    """Bytes as text: keys and names, which Python 3 reads as the one or the other."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Numpy:
    """Takes the place of numpy's array and dtype: real ones would be made from the file's bytes, whatever they claim."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Finds nothing but what stands for numpy's arrays, so that no code of the file's choice runs."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return _Numpy
        raise pickle.UnpicklingError(f"it has {module}.{name}, which could run code")
