"""An image folder: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or valid, dev, test, …), as torchvision's ImageFolder reads it.

Without labels, images at any depth. Shapes: N samples of the split.
"""

import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainables.data.interface import HOLD_OUT, NO_LABELS
from trainables.data.order import Split
from trainables.data.pack.image_folders import (
    NO_IMAGES,
    detection_error,
    has_images,
    has_root_classes,
    has_train_folder,
    is_image_folder,
    list_entries,
    renamed_splits,
    split_classes,
    split_folders,
)
from trainables.data.pack.layout_reader import Label, LayoutReader
from trainables.data.split_names import SPLIT_OF, folded, report_names
from trainables.errors import DataError, NoLabelsError, first_three, printable
from trainables.notices import notice

_ONE_CLASS = "folders whose names differ in their Unicode form alone (NFC and NFD) are one class"
_UNSORTED, _DANGLING = "in no class folder", "links that lead nowhere"
_MAX_REASONS = 6


class FolderReader(LayoutReader):
    """A location is a file's path below the root. Classes and samples are in ImageFolder's order, so that published weights fit.

    Classes are the folders of `train`, sorted; those whose names differ in their Unicode form alone are one. A validation folder
    may lack some of them, and may not have others. Hidden files and folders are none; a notice counts others that are left out.

    Raises DataError: a folder is missing or empty, lies too deep, is a link to nothing or to one that it lies in, or belongs to
    two classes; two folders may be the same split; the data set has boxes in place of classes. OSError: one cannot be read.
    """

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        return [root] if root.is_dir() and (has_train_folder(str(root)) or has_root_classes(str(root))) else []

    def splits(self) -> Mapping[Split, list[str]]:
        """The name of each split's folder; empty where it is the root itself."""
        root = str(self.root)
        splits = split_folders(root)
        if not self.labels:
            return {split: [folder] for split, folder in _unlabelled(root, splits).items()}
        if refusal := detection_error(_below(root, splits.get("train", ""))):
            raise refusal
        if self.holds_out and not splits and has_root_classes(root):
            splits = {"train": ""}
            notice(f"{root} has no folder train: its folders are the classes")
        if "train" not in splits:
            parent, name = os.path.split(os.path.realpath(root))
            advice = (
                f"{renamed_splits(root) or split_classes(root) or 'images belong in train/CLASS/ and val/CLASS/'}; {NO_LABELS}"
            )
            if SPLIT_OF.get(name.lower()) == "train":
                advice = f"write data.path: {parent}"
            raise NoLabelsError(f"{root} has no folder train; {advice}")
        self._train, self._class_folders = splits["train"], _train_folders(_below(root, splits["train"]))
        self.classes = [*self._class_folders]
        if "val" not in splits and not self.holds_out:
            raise DataError(f"{root} has no validation folder; its images belong in val/CLASS/; {HOLD_OUT}")
        return {split: [folder] for split, folder in splits.items()}

    def samples(self, part: str) -> Iterable[tuple[str, Label | None]]:
        if not self.labels:
            path = _below(str(self.root), part)
            walk = _Walk(path, by_class=False)
            label = part if is_image_folder(str(self.root)) else None
            if not (files := walk.images("")):
                raise DataError(f"{path} {NO_IMAGES}; add some or remove it")
            walk.report()
            return [(os.path.join(part, file), label) for file in files]
        return [(file, label) for label, files in enumerate(self.by_class(part).values()) for file in files]

    def by_class(self, part: str) -> dict[str, list[str]]:
        """The files of each class in the folder of a split of `splits`, as paths below the root."""
        path = _below(str(self.root), part)
        walk = _Walk(path)
        training = part == self._train
        classes = self._class_folders if training else _validation_folders(path, self._class_folders)
        found = {name: [file for folder in folders for file in walk.images(folder, name)] for name, folders in classes.items()}
        empty = [name for name, files in found.items() if not files]
        if empty and training:
            folder = os.path.join(path, classes[empty[0]][0])
            has = f" (but {first_three(others)}: convert images to PNG)" if (others := list_entries(folder).others) else ""
            raise DataError(f"{folder} {NO_IMAGES}{has}; add some or remove it")
        if len(empty) == len(classes):
            raise DataError(f"{path} {NO_IMAGES}")
        if empty:
            notice(f"{path}: no images of {len(empty)} of {len(classes)} classes: {first_three(empty)}")
        walk.report()
        return {name: [os.path.join(part, file) for file in files] for name, files in found.items()}


def _below(root: str, folder: str) -> str:
    return os.path.join(root, folder) if folder else root


def _unlabelled(root: str, splits: dict[Split, str]) -> dict[Split, str]:
    """The folder of each split of a folder of images without labels; of one without such folders, all of it for training.

    A notice names what else it has. Raises DataError where it is not clear which images are meant: there is a folder for
    validation and none for training, or none for validation, and other images.
    """
    if not splits:
        return {"train": ""}
    found = list_entries(root)
    others = [name for name in found.folders if name.lower() not in SPLIT_OF and has_images(os.path.join(root, name))]
    others += found.images
    if "train" not in splits:
        raise DataError(f"{root} has a folder {splits['val']} and no folder train: rename it, or move the other images to train/")
    if others and "val" not in splits:
        raise DataError(
            f"{root} has a folder {splits['train']}, and other images ({first_three(others)}): give "
            f"{os.path.join(root, splits['train'])} to use that folder alone, or rename it to use all"
        )
    if others:
        notice(f"{root}: not used, since {splits['train']} and {splits['val']} are the splits: {first_three(others)}")
    return splits


def _train_folders(path: str) -> dict[str, list[str]]:
    """The folders of each class of the training split; see `_folders_by_class`. Raises DataError where there are none."""
    classes = _folders_by_class(path)
    if not classes:
        raise NoLabelsError(
            f"{path} has no class folders; images belong in train/CLASS/, or in a list train.csv of path,label; {NO_LABELS}"
        )
    _refuse_deep(path, classes)
    if twice := [name for name, folders in classes.items() if len(folders) > 1]:
        notice(f"{path}: {_ONE_CLASS}: {first_three(twice)}")
    report_names(path, [*classes])
    return classes


def _folders_by_class(split_folder: str) -> dict[str, list[str]]:
    """The names of each class's folders, in the order of the first; the class's is in NFC, and printable whatever its bytes are.

    Raises DataError where one is a link to nothing.
    """
    found = list_entries(split_folder)
    if found.dangling:
        path = os.path.join(split_folder, found.dangling[0])
        raise DataError(f"{path} is a link to {os.readlink(path)}, which cannot be reached; mount it or remove the link")
    classes: dict[str, list[str]] = {}
    for folder in found.folders:
        classes.setdefault(unicodedata.normalize("NFC", printable(folder)), []).append(folder)
    return classes


def _validation_folders(split_folder: str, train: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The folders of each class of `train`. Raises DataError where there are others, or images in no class's folder."""
    found = _folders_by_class(split_folder)
    extra, alike = sorted(found.keys() - train.keys()), {folded(name): name for name in train}
    if same := [f"{name!r} is {alike[folded(name)]!r} in train" for name in extra if folded(name) in alike]:
        raise DataError(f"{split_folder} has classes of other names than train: {first_three(same)}; rename them")
    if len(found) == len(extra) < 2:  # no folder, or one, that is none of a class
        flat = os.path.join(split_folder, *found.get("".join(extra), []))
        if not _folders_by_class(flat).keys().isdisjoint(train):
            _refuse_deep(split_folder, found)
        if list_entries(flat).images:
            labels = first_three(sorted({*list_entries(split_folder).others, *list_entries(flat).others}))
            problem = f"has classes that train has not: {extra[0]}" if extra else "has its images in no class folders"
            raise DataError(
                f"{split_folder} {problem}; move each image to its class's folder, val/CLASS/, named as in train"
                + (f" ({labels} may say which)" if labels else "")
            )
    if extra:
        raise DataError(f"{split_folder} has classes that train has not: {first_three(extra)}; add them to train or remove them")
    if other_form := [name for name, folders in found.items() if {*folders, *train[name]} != {train[name][0]}]:
        notice(f"{split_folder}: {_ONE_CLASS}: {first_three(other_form)}")
    return {name: found.get(name, []) for name in train}


def _refuse_deep(split_folder: str, classes: Mapping[str, list[str]]) -> None:
    """Raises DataError where the only folder holds folders, as when an archive was unpacked into a folder of its own name."""
    only = os.path.join(split_folder, *next(iter(classes.values()), [])[:1])
    if len(classes) == 1 and (inner := list_entries(only).folders):
        raise DataError(
            f"the only folder in {split_folder} is {os.path.basename(only)}, which holds {first_three(inner)}; "
            f"if these are the classes, move them up: mv {shlex.quote(only)}/* {shlex.quote(split_folder)}/"
        )


class _Walk:
    """A walk through the class folders of one split, which follows links and counts what it leaves out.

    `by_class`: False is a walk through a folder without labels, whose inner folders mean nothing.
    """

    def __init__(self, split_folder: str, *, by_class: bool = True) -> None:
        self._path, self._by_class = split_folder, by_class
        self._left_out = Counter[str]()
        self._inner: list[str] = []
        """A folder of each class that has no images of its own, but several folders of them."""
        self._visited: dict[str, tuple[str, str]] = {}  # by its real path a folder's class and path
        self._twice: list[str] = []
        found = list_entries(split_folder)
        if by_class and (unsorted := len(found.images) + len(found.others)):
            self._left_out[_UNSORTED] = unsorted

    def images(self, folder_name: str, class_name: str = "") -> list[str]:
        """Image files in one class folder, at any depth, relative to the split's folder: by folder, then by name, each sorted.

        Without a name it is the split's folder itself.

        Raises DataError where a folder in it, which a link may lead to, is one of another class too, or one that it lies in.
        """
        waiting: list[tuple[str, list[str]]] = [(self._path, [])]
        if folder_name:
            waiting = [(os.path.join(self._path, folder_name), [os.path.realpath(self._path)])]
        found: list[tuple[str, list[str]]] = []
        while waiting:
            path, outer = waiting.pop()
            real = os.path.realpath(path)
            if any(os.path.commonpath((real, folder)) == real for folder in outer):
                raise DataError(
                    f"{path} is a link to {real}, in which it lies: its images would count again and again; remove the link"
                )
            self._visit(path, real, class_name)
            listing = list_entries(path)
            waiting += [(os.path.join(path, name), [*outer, real]) for name in listing.folders]
            found.append((path, listing.images))
            self._left_out.update(os.path.splitext(name)[1].lower() or "without an extension" for name in listing.others)
            self._left_out[_DANGLING] += len(listing.dangling)
        skip = len(self._path) + 1
        if self._by_class and len(deeper := [path for path, names in found if names]) > 1 and not found[0][1]:
            self._inner.append(min(deeper)[skip:])
        return [f"{path}{os.sep}{name}"[skip:] for path, names in sorted(found) for name in names]

    def _visit(self, path: str, real: str, class_name: str) -> None:
        earlier_class, earlier_path = self._visited.setdefault(real, (class_name, path))
        if earlier_class != class_name:
            raise DataError(f"{path} and {earlier_path} are one folder: its images would be of two classes; remove the link")
        if earlier_path != path:
            self._twice.append(f"{path} and {earlier_path}")

    def report(self) -> None:
        """One line for all that was left out, one for what counts twice, one for classes that may be groups of them."""
        if self._twice:
            more = f", and those of {len(self._twice) - 1} more folders" if len(self._twice) > 1 else ""
            notice(f"{self._twice[0]} are one folder: its images count twice{more}")
        if self._inner:
            notice(
                f"{self._path}: classes whose images are in inner folders: {len(self._inner)}, such as {self._inner[0]}: "
                "the class is the outer folder"
            )
        if total := self._left_out.total():
            reasons = [f"{count} {reason}" for reason, count in self._left_out.most_common(_MAX_REASONS) if count]
            more = ", …" if len(self._left_out) > _MAX_REASONS else ""
            by_ending = total > self._left_out[_UNSORTED] + self._left_out[_DANGLING]
            advice = "; convert images of other formats to PNG; rename JPEG files so that they end in .jpg" if by_ending else ""
            notice(f"{self._path}: {total} file{'s' * (total > 1)} left out: {', '.join(reasons)}{more}{advice}")
