"""The layouts that can be packed, by name, in the order in which they are tried."""

from pathlib import Path

from trainables.data.pack.layout_reader import LayoutReader
from trainables.data.pack.readers.cifar import CifarReader
from trainables.data.pack.readers.folder import FolderReader
from trainables.data.pack.readers.lmdb import LmdbReader
from trainables.data.pack.readers.parquet import ParquetReader
from trainables.data.pack.readers.tfrecord import TfrecordReader
from trainables.data.pack.readers.webdataset import WebdatasetReader
from trainables.errors import DataError

READERS: dict[str, type[LayoutReader]] = {
    "CIFAR binary files": CifarReader,
    "image folder": FolderReader,
    "LMDB": LmdbReader,
    "Parquet": ParquetReader,
    "TFRecord": TfrecordReader,
    "WebDataset": WebdatasetReader,
}


def find_reader(root: Path) -> str:
    """The layout of a source. Raises DataError where it has none that is known."""
    if not root.exists():
        raise DataError(f"{root} does not exist; give {_known_layouts()}")
    for name, reader in READERS.items():
        if reader.matches(root):
            return name
    raise DataError(f"{root} is of no layout that can be packed: {_known_layouts()}; docs/records.md shows each")


def _known_layouts() -> str:
    return ", ".join(READERS)
