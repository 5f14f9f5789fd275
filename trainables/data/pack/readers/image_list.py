"""Lists of image files and their classes: `path,label` a row, with commas, tabs or spaces, with or without a header.

Two files, named by their splits (train.csv, val.txt), or one with a column `split`. Paths are relative to the list's folder or,
as in Caffe's lists of ImageNet, to the folder next to it that has the split's name.
"""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from trainables.data.order import Split
from trainables.data.pack.layout_reader import LABEL_FIELDS, Label, LayoutReader, files_below, split_files, split_name
from trainables.data.sources.folder import EXTENSIONS
from trainables.data.split_names import SPLIT_NAMES, SPLIT_OF, choose_splits, known_split_names
from trainables.errors import DataError, first_three
from trainables.notices import notice

_LISTS = r"(?i).+\.(csv|tsv|txt|lst)"
_PATH_FIELDS = (
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "file_path",
    "image",
    "image_path",
    "image_id",
    "image_name",
    "img",
)


class _Row(NamedTuple):
    path: str
    label: str
    split: str


class ImageListReader(LayoutReader):
    """A location is an image's path below the folder of the lists."""

    what = "lists of images"
    text_is_index = True

    def __init__(self, root: Path) -> None:
        super().__init__(root.parent if root.is_file() else root)
        self._given = root

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        """The lists of images in a folder and in its folders, or the one that is given: files whose first row names an image."""
        paths = [root] if root.is_file() and re.fullmatch(_LISTS, root.name) else files_below(root, _LISTS)
        return [path for path in paths if len(path.relative_to(root).parts) <= 2 and _columns(path)]

    def splits(self) -> Mapping[Split, list[tuple[Path, list[_Row]]]]:
        lists = self.files(self._given)
        if len(lists) > 1 or split_name(self.root, lists[0]):
            files = split_files(self.root, lists, self.what)
            return {split: [(path, list(_rows(path))) for path in paths] for split, paths in files.items()}
        path, found = lists[0], dict[str, list[_Row]]()
        for row in _rows(path):
            found.setdefault(row.split.lower(), []).append(row)
        if others := sorted(found.keys() - SPLIT_OF.keys() - {""}):
            notice(f"{path}: rows of the split {first_three(others)} are not used")
        chosen = choose_splits(found, str(path))
        for split in SPLIT_NAMES:
            if split not in chosen:
                raise DataError(
                    f"{path} has no {split} rows: add a column `split` of {known_split_names('train')} and "
                    f"{known_split_names('val')}, or give a folder with one list per split, train.csv and val.csv"
                )
        return {split: [(path, rows)] for split, rows in chosen.items()}

    def samples(self, part: tuple[Path, list[_Row]]) -> Iterator[tuple[str, Label]]:
        """Each row's image and class, and a notice of the files that are missing. Raises DataError where all are."""
        path, rows = part
        folders = [path.parent, path.parent / (split_name(self.root, path) or "")]
        folder = next((folder for folder in folders if rows and (folder / rows[0].path).exists()), path.parent)
        locations = [os.path.normpath(os.path.join(folder.relative_to(self.root), row.path)) for row in rows]
        if missing := _missing(self.root, locations):
            found = f"{path}: {len(missing)} of its {len(rows)} files are missing, such as {first_three(missing)}"
            if len(missing) == len(rows):
                raise DataError(f"{found}; write paths relative to {path.parent}, with extensions")
            notice(found)
        return ((location, row.label) for location, row in zip(locations, rows, strict=True))


def _table(path: Path) -> Iterator[list[str]]:
    """The rows of a list, as text. Raises DataError where they are no table."""
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        first = file.readline()
        file.seek(0)
        delimiter = next((sign for sign in "\t,;" if sign in first), None)
        if delimiter is None:
            yield from (line.rsplit(maxsplit=1) for line in file if line.strip())
            return
        rows = csv.reader(file, delimiter=delimiter)
        try:
            yield from (row for row in rows if row)
        except csv.Error as error:
            raise DataError(f"{path} cannot be read near line {rows.line_num} ({error}); write rows of path,label") from None


def _columns(path: Path) -> dict[str, int] | None:
    """The columns by their names: those of the header, or `path` and `label`; None where the first row names no image."""
    try:
        first = [field.strip().lower() for field in next(_table(path), [])]
    except (OSError, DataError):
        return None
    if first and first[0].endswith(EXTENSIONS):
        return {"path": 0, **({"label": 1} if len(first) == 2 else {})}
    return {name: at for at, name in enumerate(first)} if {*first} & {*_PATH_FIELDS} else None


def _rows(path: Path) -> Iterator[_Row]:
    """The images of a list. Raises DataError where it has no class, or a row is short."""
    columns = _columns(path) or {}
    at = next(columns[name] for name in _PATH_FIELDS if name in columns)
    label_at, *others = [name for name in LABEL_FIELDS if name in columns] or [""]
    if not label_at:
        raise DataError(f"{path} has no class column: write rows of path,label, or a header with {first_three(LABEL_FIELDS)}")
    if others:
        notice(f"list of images: the column {label_at} is the class; not used: {', '.join(others)}")
    for number, row in enumerate(_table(path), 1):
        if number == 1 and row[at].strip().lower() in _PATH_FIELDS:
            continue
        if len(row) <= max(columns[label_at], at) or not (label := row[columns[label_at]].strip()):
            raise DataError(f"{path}: row {number} ({','.join(row)}) has no class; write rows of path,label")
        split = "".join(row[columns["split"] :][:1]).strip() if "split" in columns else ""
        yield _Row(row[at].strip().replace("\\", "/"), label, split)


def _missing(root: Path, locations: list[str]) -> list[str]:
    """Those of these files that are not there; each folder is listed once, since a file server answers that faster."""
    present: dict[str, set[str]] = {}
    for folder in {os.path.dirname(location) for location in locations}:
        present[folder] = {*os.listdir(root / folder)} if (root / folder).is_dir() else set()
    return [location for location in locations if os.path.basename(location) not in present[os.path.dirname(location)]]
