"""What is in folders of images: their splits, classes and files, and the refusals of what is meant otherwise."""

import os
import re
import shlex
from itertools import islice
from typing import NamedTuple

from trainables.data.interface import HOLD_OUT, NO_LABELS
from trainables.data.order import Split
from trainables.data.split_names import SPLIT_OF, choose_splits, is_hidden
from trainables.errors import DataError, NoLabelsError, first_three

# torchvision.datasets.folder.IMG_EXTENSIONS, compared without case: what else PIL reads, ImageFolder leaves out
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
NO_IMAGES = f"holds no images, files whose names end in {' '.join(EXTENSIONS)}"
_DETECTION = {
    "YOLO's boxes": {"images", "labels"},
    "Pascal VOC's boxes": {"jpegimages", "annotations"},
    "masks": {"images", "masks"},
}
"""Folders of data sets for other tasks, by what they have."""


class Entries(NamedTuple):
    """The sorted names of what is in a folder, but for what is hidden."""

    folders: list[str]
    images: list[str]
    others: list[str]  # files
    dangling: list[str]  # links without an image's ending that lead nowhere: to what is not mounted, say


def list_entries(path: str) -> Entries:
    """Raises OSError, as does everything here, where a folder cannot be read."""
    found = Entries([], [], [], [])
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
    for names in found:
        names.sort()
    return found


def has_folders(path: str) -> bool:
    """Whether a folder exists and has folders."""
    return os.path.isdir(path) and bool(list_entries(path).folders)


def is_image_folder(root: str) -> bool:
    """Whether a folder has class folders for both splits."""
    folders = list_entries(root).folders if os.path.isdir(root) else []
    named = [name for name in folders if name.lower() in SPLIT_OF and has_folders(os.path.join(root, name))]
    return {"train", "val"} <= {SPLIT_OF[name.lower()] for name in named}


def has_train_folder(root: str) -> bool:
    """Whether a folder has a folder `train` with images, or with folders."""
    trains = (
        list_entries(os.path.join(root, name)) for name in list_entries(root).folders if SPLIT_OF.get(name.lower()) == "train"
    )
    return any(train.folders or train.images for train in trains)


def has_images(root: str) -> bool:
    """Whether a path is a folder with images, at any depth, or perhaps behind a link."""
    waiting = [root] if os.path.isdir(root) else []
    while waiting:
        path = waiting.pop()
        listing = list_entries(path)
        if listing.images or os.path.islink(path):
            return True
        waiting += [os.path.join(path, name) for name in listing.folders]
    return False


def split_folders(root: str) -> dict[Split, str]:
    """The name of each split's folder in `root`; a split without one is left out. Raises DataError: there is no such folder."""
    if not os.path.isdir(root):
        what = "is a file, and no list of images, whose first row names one" if os.path.exists(root) else "does not exist"
        raise DataError(f"{root} {what}; write digits, synthetic, or a folder with train/CLASS/* and val/CLASS/*")
    found = list_entries(root)
    return choose_splits({name: name for name in found.folders + found.dangling}, root)


def split_classes(root: str) -> str:
    """What to do with class folders that lie in `root` itself; empty where there are not two."""
    if not has_root_classes(root):
        return ""
    return (
        f"if its folders {first_three(list_entries(root).folders)} are classes: {HOLD_OUT}, or move each to train/CLASS/ "
        "and a part of its images to val/CLASS/"
    )


def renamed_splits(root: str) -> str:
    """How to rename folders whose names have a split's word among others, as training_set and test_set; empty without."""
    found = {SPLIT_OF[word]: name for name in list_entries(root).folders[::-1] for word in _words(name) if word in SPLIT_OF}
    found = {split: name for split, name in found.items() if name.lower() not in SPLIT_OF}
    if "train" not in found or len({*found.values()}) < len(found):
        return ""
    moves = [f"mv {shlex.quote(os.path.join(root, found[split]))} {shlex.quote(os.path.join(root, split))}" for split in found]
    return f"if {' and '.join(found.values())} are its splits, rename them: {' && '.join(moves)}"


def _words(name: str) -> list[str]:
    return re.findall("[a-z]+", name.lower())


def has_root_classes(root: str) -> bool:
    """Whether two folders in `root` hold images, and their names are not those of two splits, as train2017 and val2017 are."""
    folders = list_entries(root).folders
    words = {word for name in folders for word in _words(name) if word in SPLIT_OF}
    if len(words) > 1 or any(name.lower() in SPLIT_OF for name in folders):
        return False
    return len(list(islice((name for name in folders if list_entries(os.path.join(root, name)).images), 2))) == 2


def detection_error(folder: str) -> DataError | None:
    """The refusal of a folder in which images have boxes or masks in place of classes; else None."""
    if not os.path.isdir(folder):
        return None
    found = list_entries(folder)
    folders = {name.lower(): name for name in found.folders}
    kind = next((kind for kind, names in _DETECTION.items() if folders.keys() >= names), None)
    described = [
        *found.others,
        *(list_entries(os.path.join(folder, folders["annotations"])).others if "annotations" in folders else ()),
    ]
    if any(re.fullmatch(r"instances_.+\.json|_annotations\.coco\.json", name) for name in described):
        kind = "COCO's boxes"
    if not kind:
        return None
    return NoLabelsError(
        f"{folder} has {kind}, and no class of a whole image: crop objects to train/CLASS/ and val/CLASS/, or write "
        f"a list train.csv of path,label; {NO_LABELS}"
    )
