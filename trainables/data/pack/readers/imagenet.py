"""ImageNet as image-net.org gives it: a tar of a tar per class, and validation images in one folder or tar with a file of labels.

Tiny ImageNet has its validation images so too. Classes are WordNet IDs, sorted, as they are where images lie in class folders.
"""

import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import (
    Label,
    Listing,
    Location,
    RandomAccessReader,
    has_folders,
    is_image_folder,
    locate,
    numbered,
)
from trainables.data.pack.readers.tar_file import tar_files
from trainables.data.sources.folder import EXTENSIONS, FolderSource
from trainables.data.split_names import is_hidden
from trainables.errors import DataError

_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_TINY_LABELS = "val/val_annotations.txt"
_KIT = "ILSVRC2012_devkit*"
_NUMBER = re.compile(r".*_(\d+)\.JPEG", re.IGNORECASE)


class ImagenetReader(RandomAccessReader):
    """A location is the path of an image, or its Piece of a tar."""

    @staticmethod
    def matches(root: Path) -> bool:
        if (root / _TINY_LABELS).is_file():
            return has_folders(root / "train")
        if is_image_folder(root):
            return False
        has_train = (root / _TRAIN_TAR).is_file() or has_folders(root / "train")
        has_tar = any((root / name).is_file() for name in (_TRAIN_TAR, _VAL_TAR))
        return has_train and (has_tar or ((root / "val").is_dir() and bool(_label_files(root))))

    def listing(self) -> Listing:
        train_tar, val_tar = self._root / _TRAIN_TAR, self._root / _VAL_TAR
        if not val_tar.is_file() and not (self._root / "val").is_dir():
            raise DataError(f"{train_tar} holds tars of a class each, and {_VAL_TAR} is not with it; add it, or unpack both")
        label_of = self._val_labels()
        train = self._tar_samples if train_tar.is_file() else self._folder_samples

        def samples(path: Path) -> Iterator[tuple[Location, Label]]:
            return train() if path == train_tar else self._val_samples(label_of)

        return numbered(self._root, locate(self._root, {"train": [train_tar], "val": [val_tar]}, samples))

    def _tar_samples(self) -> Iterator[tuple[Location, Label]]:
        path = self._root / _TRAIN_TAR
        with open(path, "rb") as raw:
            for class_tar in sorted(tar_files(self._root, path, raw), key=lambda piece: piece.name):
                name, _, extension = class_tar.name.rpartition(".")
                if extension != "tar":
                    raise DataError(f"{path} holds {class_tar.name}, and not a tar per class; give the tar of image-net.org")
                for piece in tar_files(self._root, path, raw, class_tar):
                    yield piece, name

    def _folder_samples(self) -> Iterator[tuple[Location, Label]]:
        source = FolderSource(str(self._root), "train")
        return zip(source.files(), (source.classes[label] for label in source.labels_N.tolist()), strict=True)

    def _val_samples(self, label_of: Mapping[str, str]) -> Iterator[tuple[Location, Label]]:
        path = self._root / _VAL_TAR
        if path.is_file():
            with open(path, "rb") as raw:
                images: list[tuple[Location, str]] = [(piece, piece.name) for piece in tar_files(self._root, path, raw)]
        else:
            folder = self._root / ("val/images" if (self._root / _TINY_LABELS).is_file() else "val")
            names = [
                entry.name for entry in folder.iterdir() if entry.name.lower().endswith(EXTENSIONS) and not is_hidden(entry.name)
            ]
            images = [(f"{folder.relative_to(self._root)}/{name}", name) for name in names]
        for location, name in sorted(images, key=lambda image: image[1]):
            number = _NUMBER.fullmatch(name)
            label = label_of.get(name) or (label_of.get(str(int(number[1]))) if number else None)
            if label is None:
                raise DataError(
                    f"{self._root}: the validation image {name} has no label; give the images and labels of one data set"
                )
            yield location, label

    def _val_labels(self) -> dict[str, str]:
        """The class of each validation image by its file's name or by its number."""
        tiny = self._root / _TINY_LABELS
        if tiny.is_file():
            return dict(line.split("\t")[:2] for line in tiny.read_text(encoding="utf-8").splitlines() if "\t" in line)
        found = _label_files(self._root)
        if _TRUTH not in found or _META not in found:
            raise DataError(
                f"{self._root}: the classes of its validation images need {_TRUTH} and {_META}, which says what its numbers "
                "mean: put image-net.org's development kit for tasks 1 & 2 there, or unpack into train/CLASS/ and val/CLASS/"
            )
        from scipy.io import loadmat

        try:
            synsets = loadmat(io.BytesIO(found[_META]), squeeze_me=True)["synsets"]
            wnids = {int(number): str(wnid) for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}
            return {str(line): wnids[int(number)] for line, number in enumerate(found[_TRUTH].split(), 1)}
        except Exception as error:  # a damaged file makes scipy's parser raise almost anything
            raise DataError(
                f"{self._root}: {_META} or {_TRUTH} is damaged ({type(error).__name__}: {error}); give the files of one kit"
            ) from None


def _label_files(root: Path) -> dict[str, bytes]:
    """What there is of _TRUTH and _META: in `root`, in its folder val, or in a development kit, a folder or an archive."""
    found: dict[str, bytes] = {}
    kits = sorted(root.glob(_KIT))
    for folder in (root, root / "val", *kits, *(kit / "data" for kit in kits)):
        found |= {name: (folder / name).read_bytes() for name in (_TRUTH, _META) if (folder / name).is_file()}
    for archive in (kit for kit in kits if kit.is_file() and len(found) < 2):
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    name = member.name.rpartition("/")[2]
                    if name in (_TRUTH, _META) and (content := tar.extractfile(member)):
                        found[name] = content.read()
        except (tarfile.TarError, OSError, EOFError) as error:
            raise not_readable(archive, "a tar", str(error), cut_off=isinstance(error, EOFError)) from None
    return found
