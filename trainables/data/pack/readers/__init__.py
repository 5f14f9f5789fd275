"""The layouts that can be packed, by name, in the order in which they are tried."""

import re
from pathlib import Path

from trainables.data.interface import NO_LABELS
from trainables.data.pack.file_kind import ARCHIVE, ARRAYS, archive_error, arrays_error, datasets_error
from trainables.data.pack.image_folders import (
    NO_IMAGES,
    detection_error,
    has_images,
    has_root_classes,
    is_image_folder,
    renamed_splits,
)
from trainables.data.pack.layout_reader import LayoutReader, files_below
from trainables.data.pack.readers.cifar import CifarReader
from trainables.data.pack.readers.folder import FolderReader
from trainables.data.pack.readers.image_list import ImageListReader
from trainables.data.pack.readers.imagenet import ImagenetReader
from trainables.data.pack.readers.lmdb import LmdbReader
from trainables.data.pack.readers.parquet import ParquetReader, describes_images
from trainables.data.pack.readers.tfrecord import TfrecordReader
from trainables.data.pack.readers.webdataset import WebdatasetReader
from trainables.data.split_names import is_hidden
from trainables.errors import DataError, first_three
from trainables.notices import notice

IMAGE_FOLDER, LISTS = "image folder", "list of images"
READERS: dict[str, type[LayoutReader]] = {
    "CIFAR": CifarReader,
    "ImageNet as downloaded": ImagenetReader,
    "LMDB": LmdbReader,
    "Parquet": ParquetReader,
    "TFRecord": TfrecordReader,
    "WebDataset": WebdatasetReader,
    LISTS: ImageListReader,
    IMAGE_FOLDER: FolderReader,
}


def matching_reader(root: Path, labels: bool = True) -> str | None:
    """The layout of a source; None where it has none that is known. Without `labels`, any folder with images has one."""
    if is_image_folder(str(root)) and not ImagenetReader.files(root):  # whatever else lies there, such as its archive
        if labels and (unused := ImageListReader.named_by_split(root)):
            notice(f"{root}: the folders in its splits are the classes; the lists {first_three(unused)} are not used")
        return IMAGE_FOLDER
    matching = (name for name, reader in READERS.items() if reader.files(root))
    name = next(matching, None)
    if name == "Parquet" and describes_images(ParquetReader.files(root)[0]):
        name = next(matching, name if labels else None)
    if labels or name not in (LISTS, None) or (name == LISTS and ImageListReader.has_splits(root)):
        return name
    return IMAGE_FOLDER if has_images(str(root)) else name  # notes about images look like a list too


def nearby_layout_error(root: Path) -> DataError | None:
    """The refusal of a path without a layout, by what is in it: another task's data, a layout, archive, arrays or a table."""
    if refusal := detection_error(str(root)):
        return refusal
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name)) if root.is_dir() else []
    for folder in folders:
        if (name := matching_reader(folder)) and (len(folders) == 1 or not has_root_classes(str(folder))):
            return DataError(f"{root} is of no known layout, but its folder {folder} is ({name}): give that one")
    for pattern in (ARCHIVE, ARRAYS):
        if not (found := [root] if root.is_file() and re.fullmatch(pattern, root.name) else files_below(root, pattern)):
            continue
        return arrays_error(found[0]) if pattern == ARRAYS else archive_error(found[0], root if len(found) > 1 else None)
    if found := [path for path in files_below(root, r".+\.arrow") if path.with_name("dataset_info.json").exists()]:
        return datasets_error(found[0])
    if tables := files_below(root, r"(?i).+\.(csv|tsv)") if has_images(str(root)) else []:
        return DataError(
            f"{root} is of no known layout: if {tables[0]} is the list of its images, write path,label as its first line"
        )
    return None


def find_reader(root: Path, labels: bool = True) -> str:
    """The layout of a source. Raises DataError where it has none that is known."""
    layouts = ", ".join(READERS)
    if not root.exists():
        raise DataError(f"{root} does not exist; give one of these layouts: {layouts}")
    if name := matching_reader(root, labels):
        return name
    if refusal := nearby_layout_error(root):
        raise refusal
    if root.is_file():
        raise DataError(f"{root} is a single file; give the folder with the files of both splits, or a list of images")
    if not labels:
        raise DataError(f"{root} {NO_IMAGES}, and is of no other layout that can be packed: {layouts}")
    advice = renamed_splits(str(root)) or f"docs/records.md shows each; {NO_LABELS}"
    raise DataError(f"{root} is of no layout that can be packed: {layouts}; {advice}")
