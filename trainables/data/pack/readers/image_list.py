"""Lists of image files and their classes: `path,label` a row, with commas, tabs or spaces, with or without a header; JSON lines.

Two files, named by their splits (train.csv, val.txt), or one with a column `split`. Paths are relative to the list's folder or,
as in Caffe's lists of ImageNet, to the folder next to it that has the split's name. Where all are missing there, they are looked
for in the folders near the list, and with an extension; a notice shows what was found. Without labels a row may be a path alone.
"""

import codecs
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from trainables.data.interface import HOLD_OUT, NO_LABELS
from trainables.data.order import Split
from trainables.data.pack.image_folders import EXTENSIONS
from trainables.data.pack.layout_reader import LABEL_FIELDS, Label, LayoutReader, files_below, split_files, split_name
from trainables.data.split_names import SPLIT_NAMES, SPLIT_OF, choose_splits, known_split_names
from trainables.errors import DataError, NoLabelsError, first_three
from trainables.notices import notice

_LISTS = r"(?i).+\.(csv|tsv|txt|lst|jsonl)"
_MAX_LISTS = 1000
"""The most text files in a folder that may be lists: where there are more, they are captions of images or the like."""
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
    line: int
    path: str
    label: str
    split: str


class ImageListReader(LayoutReader):
    """A location is an image's path below the folder of the lists."""

    what = "lists of images"
    text_is_index = True

    def __init__(self, root: Path, labels: bool = True, val_share: float | None = None) -> None:
        super().__init__(root, labels, val_share)
        if root.is_file():
            self.root = root.parent

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        """The lists of images in a folder and in its folders, or the one that is given: files whose first row names an image."""
        paths = [root] if root.is_file() and re.fullmatch(_LISTS, root.name) else files_below(root, _LISTS)
        near = [path for path in paths if len(path.relative_to(root).parts) <= 2]
        return [path for path in near if _columns(path)] if len(near) <= _MAX_LISTS else []

    @classmethod
    def named_by_split(cls, root: Path) -> list[str]:
        """The names of lists in `root` itself that are called as a split, such as train.csv."""
        named = (path for path in root.iterdir() if re.fullmatch(_LISTS, path.name) and path.stem.lower() in SPLIT_OF)
        return sorted(path.name for path in named if _columns(path))

    @classmethod
    def has_splits(cls, root: Path) -> bool:
        """Whether the lists in a folder have both splits, by their names or by a column."""
        lists = cls.files(root)
        named = {SPLIT_OF.get(split_name(root, path) or "") for path in lists}
        return {"train", "val"} <= named or (len(lists) == 1 and "split" in (_columns(lists[0]) or {}))

    def splits(self) -> Mapping[Split, list[tuple[Path, list[_Row]]]]:
        lists = self.files(self.given)
        if self.labels and len(lists) > 1:
            tests = [path for path in lists if split_name(self.root, path) in (*SPLIT_NAMES["val"][1], None)]
            if unlabelled := [path for path in tests if {*LABEL_FIELDS}.isdisjoint(_columns(path) or ())]:
                shown = first_three([str(path.relative_to(self.root)) for path in unlabelled])
                notice(f"{self.root}: lists without a class column are not used: {shown}")
                lists = [path for path in lists if path not in unlabelled] or lists
        is_all = self.holds_out and self.given.is_file()  # whatever its name
        if len(lists) > 1 or (split_name(self.root, lists[0]) and not is_all):
            files = split_files(self.root, lists, self.what, self.holds_out)
            return {split: [(path, list(_rows(path, self.labels))) for path in paths] for split, paths in files.items()}
        path, found = lists[0], dict[str, list[_Row]]()
        for row in _rows(path, self.labels):
            found.setdefault(row.split.lower(), []).append(row)
        if others := sorted(found.keys() - SPLIT_OF.keys() - {""}):
            notice(f"{path}: rows of the split {first_three(others)} are not used")
        if self.holds_out and found.keys() == {""}:
            return {"train": [(path, found[""])]}
        chosen = choose_splits(found, str(path))
        for split in SPLIT_NAMES:
            if split not in chosen and not (self.holds_out and split == "val"):
                raise DataError(
                    f"{path} has no {split} rows: add a column `split` of {known_split_names('train')} and "
                    f"{known_split_names('val')}, or give a folder with one list per split, train.csv and val.csv; {HOLD_OUT}"
                )
        return {split: [(path, rows)] for split, rows in chosen.items()}

    def samples(self, part: tuple[Path, list[_Row]]) -> Iterator[tuple[str, Label | None]]:
        """Each row's image and class, and a notice of the files that are missing.

        Raises DataError where all are; without labels, where one is.
        """
        path, rows = part
        folders = [path.parent, path.parent / (split_name(self.root, path) or "")]
        usual = ((folder, "") for folder in folders if rows and (folder / rows[0].path).exists())
        folder, extension = next(usual, None) or _find_images(path, folders, rows)
        inside = os.path.join(os.path.abspath(self.root), "")  # absolute paths below the root are samples of the same names
        relative = folder.relative_to(self.root)
        locations = [os.path.normpath(os.path.join(relative, row.path + extension)).removeprefix(inside) for row in rows]
        if self.labels and len(labels := dict(zip(locations, (row.label for row in rows), strict=True))) < len(rows):
            both = [(row.line, at) for row, at in zip(rows, locations, strict=True) if row.label != labels[at]]
            if both:
                raise DataError(
                    f"{path}: line {both[0][0]} and a later one give {both[0][1]} two classes: write one class for each image"
                )
            notice(f"{path}: {len(rows) - len(labels)} rows repeat an image: it counts again")
        if missing := _missing(self.root, locations):
            found = f"{path}: {len(missing)} of its {len(rows)} files are missing, such as {first_three(missing)}"
            if len(missing) == len(rows):
                raise DataError(f"{found}; write paths relative to {path.parent}, with extensions")
            if not self.labels:
                line = rows[locations.index(missing[0])].line
                raise DataError(f"{found}, the first in line {line}; restore them, or remove their lines")
            notice(found)
        return ((location, row.label or None) for location, row in zip(locations, rows, strict=True))


def _find_images(path: Path, usual: list[Path], rows: list[_Row]) -> tuple[Path, str]:
    """The folder in which the images of a list are, which are in none of the `usual` ones, and the extension that its paths lack.

    They are the only ones with which most of the list's files are there. Raises DataError: there are several.
    """
    sample = [row.path for row in rows[:: len(rows) // 16 + 1]]
    folders = [*usual, *sorted(file for depth in ("*", "*/*") for file in path.parent.glob(depth) if file.is_dir())]
    extensions = ["", *EXTENSIONS, *map(str.upper, EXTENSIONS)]
    found = []
    for folder in dict.fromkeys(folders):
        for extension in extensions:
            if sum(os.path.isfile(os.path.join(folder, name + extension)) for name in sample) * 2 > len(sample):
                found.append((folder, extension))
    first, *more = [choice for choice in found if choice[0] in usual] or found or [(path.parent, "")]
    shown = (
        [str(folder.relative_to(path.parent) / (sample[0] + extension)) for folder, extension in (first, *more)] if sample else []
    )
    if more:
        raise DataError(f"{path}: its {sample[0]} may be {' or '.join(shown[:3])}: write such paths")
    if found:
        notice(f"{path}: its {sample[0]} is taken for {shown[0]}, and so on")
    return first


def _table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a list, as text, with their line. Raises DataError where they are no table."""
    with open(path, "rb") as raw:
        encoding = "utf-16" if raw.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"  # Excel's text
    errors = "surrogateescape" if encoding == "utf-8-sig" else "replace"
    with open(path, newline="", encoding=encoding, errors=errors) as file:
        if path.suffix.lower() == ".jsonl":
            yield from _json_lines(path, file)
            return
        first = file.readline()
        file.seek(0)
        delimiter = next((sign for sign in "\t,;" if sign in first), None)
        is_path = path.suffix.lower() in (".txt", ".lst") and "\t" not in first and first.strip().lower().endswith(EXTENSIONS)
        if delimiter is None or is_path:
            for number, line in enumerate(file, 1):
                if text := line.strip():
                    yield number, [text] if text.lower().endswith(EXTENSIONS) else text.rsplit(maxsplit=1)
            return
        rows = csv.reader(file, delimiter=delimiter)
        try:
            yield from ((rows.line_num, row) for row in rows if row)
        except csv.Error as error:
            raise DataError(f"{path} cannot be read near line {rows.line_num} ({error}); write rows of path,label") from None


def _json_lines(path: Path, file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows of JSON lines, such as Hugging Face's metadata.jsonl, under a header of the first one's keys."""
    keys: list[str] = []
    for number, line in enumerate(file, 1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise DataError(f"{path} cannot be read in line {number} ({error}); write an object in each line") from None
        if isinstance(record, dict):
            if not keys:
                keys = [*record]
                yield number, keys
            yield number, ["" if record.get(key) is None else str(record[key]) for key in keys]


def _columns(path: Path) -> dict[str, int] | None:
    """The columns by their names: those of the header, or `path` and `label`; None where the first row names no image."""
    try:
        first = [field.strip().lower() for _, row in islice(_table(path), 1) for field in row]
    except (OSError, DataError):
        return None
    if first and first[0].endswith(EXTENSIONS):
        return {"path": 0, **({"label": 1} if len(first) == 2 else {})}
    return {name: at for at, name in enumerate(first)} if {*first} & {*_PATH_FIELDS} else None


def _rows(path: Path, labels: bool) -> Iterator[_Row]:
    """The images of a list. Raises DataError where a row is short, or has no class although there are `labels`."""
    columns = _columns(path) or {}
    at = next(columns[name] for name in _PATH_FIELDS if name in columns)
    label_at = next((name for name in LABEL_FIELDS if name in columns), "")
    if not label_at and labels:
        raise NoLabelsError(
            f"{path} has no class column: write rows of path,label, or a header with {first_three(LABEL_FIELDS)}; {NO_LABELS}"
        )
    if unused := [
        name for name, column in columns.items() if labels and name and column not in (at, columns[label_at]) and name != "split"
    ]:
        notice(f"list of images: the column {label_at} is the class; not used: {first_three(unused)}")
    for number, (line, row) in enumerate(_table(path)):
        if number == 0 and row[at].strip().lower() in _PATH_FIELDS:
            continue
        label = "".join(row[columns[label_at] :][:1]).strip() if label_at else ""
        if len(row) <= at or (labels and not label):
            raise DataError(f"{path}: row {line} ({','.join(row)}) has no class; write rows of path,label")
        split = "".join(row[columns["split"] :][:1]).strip() if "split" in columns else ""
        yield _Row(line, row[at].strip().replace("\\", "/"), label, split)


def _missing(root: Path, locations: list[str]) -> list[str]:
    """Those of these files that are not there; each folder is listed once, since a file server answers that faster."""
    present: dict[str, set[str]] = {}
    for folder in {os.path.dirname(location) for location in locations}:
        present[folder] = {*os.listdir(root / folder)} if (root / folder).is_dir() else set()
    return [location for location in locations if os.path.basename(location) not in present[os.path.dirname(location)]]
