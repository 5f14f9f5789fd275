"""A folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or valid, dev, test, …), as torchvision's ImageFolder reads it.

Shapes: N samples of the split.
"""

import os
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.interface import HOLD_OUT, NO_LABELS
from trainables.data.order import Split
from trainables.data.split_names import SPLIT_OF, choose_splits, folded, is_hidden, report_names
from trainables.errors import DataError, NoLabelsError, first_three, printable
from trainables.notices import notice

# torchvision.datasets.folder.IMG_EXTENSIONS, compared without case: what else PIL reads, ImageFolder leaves out
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
NO_IMAGES = f"holds no images, files whose names end in {' '.join(EXTENSIONS)}"
_ONE_CLASS = "folders whose names differ in their Unicode form alone (NFC and NFD) are one class"
_UNSORTED, _DANGLING = "in no class folder", "links that lead nowhere"
_MAX_REASONS = 6
_DETECTION = {
    "YOLO's boxes": {"images", "labels"},
    "Pascal VOC's boxes": {"jpegimages", "annotations"},
    "masks": {"images", "masks"},
}
"""Folders of data sets for other tasks, by what they have."""


class FolderListing(NamedTuple):
    """One split of an image folder: its classes, its files as paths below the folder, and their labels (N,)."""

    classes: tuple[str, ...]
    files: list[str]
    labels_N: NDArray[np.int64]


def list_folder(root: str, split: Split, *, holds_out: bool = False) -> FolderListing:
    """One split of an image folder; classes and samples in ImageFolder's order, so that published weights fit.

    Classes are the folders of `train`, sorted; those whose names differ in their Unicode form alone are one. A validation folder
    may lack some of them, and may not have others. Hidden files and folders are none; a notice counts others that are left out.
    holds_out: where there are no folders of splits, `root` is the folder of the classes.

    Raises DataError: a folder is missing, unreadable or empty, lies too deep, is a link to nothing or to one that it lies in, or
    belongs to two classes; two folders may be the same split; the data set has boxes in place of classes.
    """
    splits = {its_split: os.path.join(root, name) for its_split, name in split_folders(root).items()}
    if refusal := detection_error(splits.get("train", root)):
        raise refusal
    if holds_out and not splits and has_root_classes(root):
        splits = {"train": root}
        notice(f"{root} has no folder train: its folders are the classes")
    if "train" not in splits:
        parent, name = os.path.split(os.path.realpath(root))
        advice = f"{renamed_splits(root) or split_classes(root) or 'images belong in train/CLASS/ and val/CLASS/'}; {NO_LABELS}"
        if SPLIT_OF.get(name.lower()) == "train":
            advice = f"write data.path: {parent}"
        raise NoLabelsError(f"data.path: {root} has no folder train; {advice}")
    if split not in splits:
        raise DataError(f"data.path: {root} has no validation folder; its images belong in val/CLASS/; {HOLD_OUT}")
    train, walk = splits["train"], _Walk(splits[split])
    classes = train_classes = _class_folders(train)
    if not classes:
        raise NoLabelsError(
            f"data.path: {train} has no class folders; images belong in train/CLASS/, or in a list train.csv of path,label; "
            f"{NO_LABELS}"
        )
    _refuse_deep(train, classes)
    if split == "val":
        classes = _validation_folders(splits["val"], classes)
    else:
        if twice := [name for name, folders in classes.items() if len(folders) > 1]:
            notice(f"{train}: {_ONE_CLASS}: {first_three(twice)}")
        report_names(train, [*classes])

    files: list[str] = []
    counts = []
    below = "" if splits[split] == root else f"{os.path.basename(splits[split])}{os.sep}"
    for name, folders in classes.items():
        found = [file for folder in folders for file in walk.images(folder, name)]
        if not found and split == "train":
            path = os.path.join(train, folders[0])
            has = f" (but {first_three(others)}: convert images to PNG)" if (others := _list(path).others) else ""
            raise DataError(f"data.path: {path} {NO_IMAGES}{has}; add some or remove it")
        files += [f"{below}{file}" for file in found]
        counts.append(len(found))
    if not files:
        raise DataError(f"data.path: {splits[split]} {NO_IMAGES}")
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        notice(f"{splits[split]}: no images of {len(empty)} of {len(classes)} classes: {first_three(empty)}")
    walk.report()
    return FolderListing(tuple(train_classes), files, np.repeat(np.arange(len(classes), dtype=np.int64), counts))


def has_train_folder(root: str) -> bool:
    """Whether a folder has a folder `train` with images, or with folders."""
    trains = (_list(os.path.join(root, name)) for name in _list(root).folders if SPLIT_OF.get(name.lower()) == "train")
    return any(train.folders or train.images for train in trains)


def has_images(root: str) -> bool:
    """Whether a path is a folder with images, at any depth, or perhaps behind a link. Raises DataError: it cannot be read."""
    waiting = [root] if os.path.isdir(root) else []
    while waiting:
        path = waiting.pop()
        listing = _list(path)
        if listing.images or os.path.islink(path):
            return True
        waiting += [os.path.join(path, name) for name in listing.folders]
    return False


def images_below(root: str, folder: str) -> list[str]:
    """The images in `folder` of `root` (empty: in all of it), at any depth, as paths below `root`; see `_Walk.images`."""
    walk = _Walk(root, by_class=False)
    found = walk.images(folder)
    walk.report()
    return found


def split_folders(root: str) -> dict[Split, str]:
    """The name of each split's folder in `root`; a split without one is left out. Raises DataError: there is no such folder."""
    if not os.path.isdir(root):
        what = "is a file, and no list of images, whose first row names one" if os.path.exists(root) else "does not exist"
        raise DataError(f"data.path: {root} {what}; write digits, synthetic, or a folder with train/CLASS/* and val/CLASS/*")
    found = _list(root)
    return choose_splits({name: name for name in found.folders + found.dangling}, root)


def unlabelled_splits(root: str) -> dict[Split, str]:
    """The folder of each split of a folder of images without labels; of one without such folders, all of it for training.

    A notice names what else it has. Raises DataError where it is not clear which images are meant: there is a folder for
    validation and none for training, or none for validation, and other images.
    """
    splits = split_folders(root)
    if not splits:
        return {"train": ""}
    found = _list(root)
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


def split_classes(root: str) -> str:
    """What to do with class folders that lie in `root` itself; empty where there are not two."""
    if not has_root_classes(root):
        return ""
    return (
        f"if its folders {first_three(_list(root).folders)} are classes: {HOLD_OUT}, or move each to train/CLASS/ "
        "and a part of its images to val/CLASS/"
    )


def renamed_splits(root: str) -> str:
    """How to rename folders whose names have a split's word among others, as training_set and test_set; empty without."""
    found = {SPLIT_OF[word]: name for name in _list(root).folders[::-1] for word in _words(name) if word in SPLIT_OF}
    moves = [f"mv {shlex.quote(os.path.join(root, found[split]))} {shlex.quote(os.path.join(root, split))}" for split in found]
    return f"if {' and '.join(found.values())} are its splits, rename them: {' && '.join(moves)}" if "train" in found else ""


def _words(name: str) -> list[str]:
    return re.findall("[a-z]+", name.lower())


def has_root_classes(root: str) -> bool:
    """Whether two folders in `root` hold images, and their names are not those of two splits, as train2017 and val2017 are."""
    folders = _list(root).folders
    words = {word for name in folders for word in _words(name) if word in SPLIT_OF}
    if len(words) > 1 or any(name.lower() in SPLIT_OF for name in folders):
        return False
    return len(list(islice((name for name in folders if _list(os.path.join(root, name)).images), 2))) == 2


def detection_error(folder: str) -> DataError | None:
    """The refusal of a folder in which images have boxes or masks in place of classes; else None."""
    if not os.path.isdir(folder):
        return None
    found = _list(folder)
    folders = {name.lower(): name for name in found.folders}
    kind = next((kind for kind, names in _DETECTION.items() if folders.keys() >= names), None)
    described = [*found.others, *(_list(os.path.join(folder, folders["annotations"])).others if "annotations" in folders else ())]
    if any(re.fullmatch(r"instances_.+\.json|_annotations\.coco\.json", name) for name in described):
        kind = "COCO's boxes"
    if not kind:
        return None
    return NoLabelsError(
        f"{folder} has {kind}, and no class of a whole image: crop objects to train/CLASS/ and val/CLASS/, or write "
        f"a list train.csv of path,label; {NO_LABELS}"
    )


class _Listing(NamedTuple):
    """The sorted names of what is in a folder, but for what is hidden."""

    folders: list[str]
    images: list[str]
    others: list[str]  # files
    dangling: list[str]  # links without an image's ending that lead nowhere: to what is not mounted, say


def _list(path: str) -> _Listing:
    """Raises DataError where the folder cannot be read."""
    found = _Listing([], [], [], [])
    try:
        with os.scandir(path) as entries:
            for entry in entries:  # a million: nothing here may ask the disk but for links
                name = entry.name
                if is_hidden(name):
                    continue
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):
                    found.folders.append(name)
                elif name.lower().endswith(EXTENSIONS):
                    found.images.append(name)
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    found.dangling.append(name)
                else:
                    found.others.append(name)
    except OSError as error:
        raise DataError(f"data.path: {error.filename} cannot be read: {error.strerror}") from None
    for names in found:
        names.sort()
    return found


def _class_folders(split_folder: str) -> dict[str, list[str]]:
    """The names of each class's folders, in the order of the first; the class's is in NFC, and printable whatever its bytes are.

    Raises DataError where one is a link to nothing.
    """
    found = _list(split_folder)
    if found.dangling:
        path = os.path.join(split_folder, found.dangling[0])
        raise DataError(
            f"data.path: {path} is a link to {os.readlink(path)}, which cannot be reached; mount it or remove the link"
        )
    classes: dict[str, list[str]] = {}
    for folder in found.folders:
        classes.setdefault(unicodedata.normalize("NFC", printable(folder)), []).append(folder)
    return classes


def _validation_folders(split_folder: str, train: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The folders of each class of `train`. Raises DataError where there are others, or images in no class's folder."""
    found = _class_folders(split_folder)
    extra, alike = sorted(found.keys() - train.keys()), {folded(name): name for name in train}
    if same := [f"{name!r} is {alike[folded(name)]!r} in train" for name in extra if folded(name) in alike]:
        raise DataError(f"data.path: {split_folder} has classes of other names than train: {first_three(same)}; rename them")
    if len(found) == len(extra) < 2:  # no folder, or one, that is none of a class
        flat = os.path.join(split_folder, *found.get("".join(extra), []))
        if not _class_folders(flat).keys().isdisjoint(train):
            _refuse_deep(split_folder, found)
        if _list(flat).images:
            labels = first_three(sorted({*_list(split_folder).others, *_list(flat).others}))
            problem = f"has classes that train has not: {extra[0]}" if extra else "has its images in no class folders"
            raise DataError(
                f"data.path: {split_folder} {problem}; move each image to its class's folder, val/CLASS/, named as in train"
                + (f" ({labels} may say which)" if labels else "")
            )
    if extra:
        raise DataError(
            f"data.path: {split_folder} has classes that train has not: {first_three(extra)}; add them to train or remove them"
        )
    if other_form := [name for name, folders in found.items() if {*folders, *train[name]} != {train[name][0]}]:
        notice(f"{split_folder}: {_ONE_CLASS}: {first_three(other_form)}")
    return {name: found.get(name, []) for name in train}


def _refuse_deep(split_folder: str, classes: Mapping[str, list[str]]) -> None:
    """Raises DataError where the only folder holds folders, as when an archive was unpacked into a folder of its own name."""
    only = os.path.join(split_folder, *next(iter(classes.values()), [])[:1])
    if len(classes) == 1 and (inner := _list(only).folders):
        raise DataError(
            f"data.path: the only folder in {split_folder} is {os.path.basename(only)}, which holds {first_three(inner)}; "
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
        found = _list(split_folder)
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
                    f"data.path: {path} is a link to {real}, in which it lies: its images would count again and again; "
                    "remove the link"
                )
            self._visit(path, real, class_name)
            listing = _list(path)
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
            raise DataError(
                f"data.path: {path} and {earlier_path} are one folder: its images would be of two classes; remove the link"
            )
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
