"""CIFAR-10 and CIFAR-100 as https://www.cs.toronto.edu/~kriz/cifar.html has them: the binary version and the one for Python.

Shapes: N images of a file, C=3 channels, H=W=32 pixels.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.order import Split
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import Listing, Piece, RandomAccessReader, SplitListing, unnamed_labels
from trainables.errors import DataError

_PIXEL_BYTES = 3 * 32 * 32


class _File(NamedTuple):
    """The labels of a file, where its first image begins, and the bytes from one image to the next."""

    labels_N: NDArray[np.int64]
    begin: int
    step: int


class _Version(NamedTuple):
    names: str
    """The file of the classes' names; those of a pickle stand under `names_key`."""
    names_key: str
    files: dict[Split, tuple[str, ...]]
    read: Callable[[Path], _File]


class CifarReader(RandomAccessReader):
    """A location is an image's Piece of a file."""

    @staticmethod
    def matches(root: Path) -> bool:
        return _version(root) is not None

    def listing(self) -> Listing:
        version = _version(self._root)
        assert version is not None
        names_file = self._root / version.names
        names = _unpickled(names_file)[version.names_key] if version.names_key else names_file.read_text(encoding="utf-8").split()
        splits = {split: self._split_listing(version, files, names) for split, files in version.files.items()}
        return Listing(tuple(names), splits, pixels=True)

    def name(self, location: str | Piece) -> str:
        return f"{location[0]}[{location[3]}]"

    def decode(self, content: bytes) -> NDArray[np.uint8]:
        pixels_CHW = np.frombuffer(content, dtype=np.uint8).reshape(3, 32, 32)
        return np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))

    def _split_listing(self, version: _Version, files: tuple[str, ...], names: list[str]) -> SplitListing:
        locations: list[Piece] = []
        labels: list[NDArray[np.int64]] = []
        for name in files:
            path = self._root / name
            try:
                file = version.read(path)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}; give all files of the data set") from None
            if unknown := sorted(set(file.labels_N[(file.labels_N < 0) | (file.labels_N >= len(names))].tolist())):
                raise unnamed_labels(path, [str(label) for label in unknown])
            locations += [
                Piece(name, file.begin + number * file.step, _PIXEL_BYTES, str(number)) for number in range(len(file.labels_N))
            ]
            labels.append(file.labels_N)
        return SplitListing(locations, np.concatenate(labels))


def _version(root: Path) -> _Version | None:
    return next(
        (version for version in _VERSIONS if all((root / name).is_file() for name in (version.names, *version.files["val"]))),
        None,
    )


def _binary(label_bytes: int) -> Callable[[Path], _File]:
    """A reader of records of `label_bytes` labels, of which the last is the class, and an image."""

    def read(path: Path) -> _File:
        content, step = np.fromfile(path, dtype=np.uint8), label_bytes + _PIXEL_BYTES
        if not len(content) or len(content) % step:
            raise not_readable(path, "a CIFAR file", f"{len(content):,} bytes, not a multiple of {step}", cut_off=True)
        return _File(content.reshape(-1, step)[:, label_bytes - 1].astype(np.int64), label_bytes, step)

    return read


def _pickled(label_key: str) -> Callable[[Path], _File]:
    """A reader of a pickled dict of labels and of an array (N, 3072), whose bytes stand in the file as they are."""

    def read(path: Path) -> _File:
        batch = _unpickled(path)
        data, labels = batch.get("data"), batch.get(label_key)
        begin = -1
        if isinstance(data, _Array) and isinstance(labels, list) and data.holds(len(labels)):
            begin = path.read_bytes().find(data.content)
        if begin < 0:
            raise not_readable(path, "a CIFAR batch", f"no uint8 array of {_PIXEL_BYTES} columns with {label_key}")
        return _File(np.array(labels, dtype=np.int64), begin, _PIXEL_BYTES)

    return read


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


class _Array:
    """Takes the place of numpy's array in a pickle: a real one would be made from the file's bytes, whatever they claim."""

    content: Any = b""
    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state, self.content = state, state[-1]
        if isinstance(self.content, str):  # Python 2 wrote bytes as text
            self.content = self.content.encode("latin-1")

    def holds(self, num_images: int) -> bool:
        """Whether it is an array (N, 3072) of bytes, row by row."""
        if len(self.state) != 5:
            return False
        _, shape, kind, is_fortran, _ = self.state
        return bool(
            shape == (num_images, _PIXEL_BYTES)
            and isinstance(kind, _Dtype)
            and kind.name in ("u1", "|u1")
            and not is_fortran
            and len(self.content) == num_images * _PIXEL_BYTES
        )


class _Dtype:
    """Takes the place of numpy's dtype."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: a byte has none."""


class _Unpickler(pickle.Unpickler):
    """Finds nothing but what stands for numpy's arrays, so that no code of the file's choice runs."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"_reconstruct": lambda *_: _Array(), "ndarray": _Array, "dtype": _Dtype}
        if module.partition(".")[0] == "numpy" and name in known:
            return known[name]
        raise pickle.UnpicklingError(f"it has {module}.{name}, which could run code")


_TEN: dict[Split, tuple[str, ...]] = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "val": ("test_batch",)}
_TEN_BINARY: dict[Split, tuple[str, ...]] = {split: tuple(f"{name}.bin" for name in names) for split, names in _TEN.items()}
_VERSIONS = (
    _Version("batches.meta.txt", "", _TEN_BINARY, _binary(1)),
    _Version("fine_label_names.txt", "", {"train": ("train.bin",), "val": ("test.bin",)}, _binary(2)),
    _Version("batches.meta", "label_names", _TEN, _pickled("labels")),
    _Version("meta", "fine_label_names", {"train": ("train",), "val": ("test",)}, _pickled("fine_labels")),
)
