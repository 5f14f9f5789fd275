"""ImageNet as image-net.org gives it: a tar of a tar per class, and validation images in one folder or tar with a file of labels.

Tiny ImageNet has its validation images so too. Classes are WordNet IDs, sorted, as they are where images lie in class folders.
"""

import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from trainables.data.order import Split
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.image_folders import EXTENSIONS, has_folders, is_image_folder
from trainables.data.pack.layout_reader import Label, LayoutReader, Location
from trainables.data.pack.readers.folder import FolderReader
from trainables.data.pack.readers.tar_file import tar_files
from trainables.data.split_names import is_hidden
from trainables.errors import DataError

_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_TINY_LABELS = "val/val_annotations.txt"
_NUMBER = re.compile(r".*_(\d+)\.JPEG", re.IGNORECASE)


class ImagenetReader(LayoutReader):
    """A location is the path of an image, or its Piece of a tar."""

    def __init__(self, root: Path, labels: bool = True, val_share: float | None = None) -> None:
        super().__init__(root, labels, val_share)
        self._train_tar, self._val_tar = root / _TRAIN_TAR, root / _VAL_TAR

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        """What shows the layout, whichever files it has."""
        tars = [root / name for name in (_TRAIN_TAR, _VAL_TAR) if (root / name).is_file()]
        has_train = has_folders(str(root / "train"))
        if (root / _TINY_LABELS).is_file():
            return [root / _TINY_LABELS] * has_train
        if is_image_folder(str(root)) or not (has_train or root / _TRAIN_TAR in tars):
            return []
        return tars or [root / name for name in _label_files(root) if (root / "val").is_dir()]

    def splits(self) -> Mapping[Split, list[Path]]:
        if not self._val_tar.is_file() and not (self.root / "val").is_dir():
            if self.holds_out:
                return {"train": [self._train_tar]}
            raise DataError(f"{self._train_tar} holds a tar per class, and {_VAL_TAR} is not with it; add it, or unpack both")
        self._label_of = self._val_labels() if self.labels else {}
        return {"train": [self._train_tar], "val": [self._val_tar]}

    def samples(self, part: Path) -> Iterable[tuple[Location, Label | None]]:
        if part == self._val_tar:
            return self._val_samples()
        if part.is_file():
            return self._tar_samples()
        reader = FolderReader(self.root, val_share=0)
        found = reader.by_class(reader.splits()["train"][0])
        return ((file, name) for name, files in found.items() for file in files)

    def _tar_samples(self) -> Iterator[tuple[Location, Label]]:
        path = self._train_tar
        with open(path, "rb") as raw:
            for class_tar in sorted(tar_files(self.root, path, raw), key=lambda piece: piece.name):
                name, _, extension = class_tar.name.rpartition(".")
                if extension != "tar":
                    raise DataError(f"{path} holds {class_tar.name}, and not a tar per class; give the tar of image-net.org")
                for piece in tar_files(self.root, path, raw, class_tar):
                    yield piece, name

    def _val_samples(self) -> Iterator[tuple[Location, Label | None]]:
        if self._val_tar.is_file():
            with open(self._val_tar, "rb") as raw:
                images: dict[str, Location] = {piece.name: piece for piece in tar_files(self.root, self._val_tar, raw)}
        else:
            folder = "val/images" if (self.root / _TINY_LABELS).is_file() else "val"
            names = (entry.name for entry in (self.root / folder).iterdir() if not is_hidden(entry.name))
            images = {name: f"{folder}/{name}" for name in names if name.lower().endswith(EXTENSIONS)}
        for name, location in sorted(images.items()):
            number = _NUMBER.fullmatch(name)
            label = self._label_of.get(name) or (self._label_of.get(str(int(number[1]))) if number else None)
            if label is None and self.labels:
                raise DataError(
                    f"{self.root}: the validation image {name} has no label; give the images and labels of one data set"
                )
            yield location, label

    def _val_labels(self) -> dict[str, str]:
        """The class of each validation image by its file's name or by its number."""
        tiny = self.root / _TINY_LABELS
        if tiny.is_file():
            return dict(line.split("\t")[:2] for line in tiny.read_text(encoding="utf-8").splitlines() if "\t" in line)
        found = _label_files(self.root)
        if _TRUTH not in found or _META not in found:
            raise DataError(
                f"{self.root}: the classes of its validation images need {_TRUTH} and {_META}, which says what its numbers "
                "mean: put image-net.org's development kit for tasks 1 & 2 there, or unpack into train/CLASS/ and val/CLASS/"
            )
        from scipy.io import loadmat

        try:
            synsets = loadmat(io.BytesIO(found[_META]), squeeze_me=True)["synsets"]
            wnids = {int(number): str(wnid) for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}
            return {str(line): wnids[int(number)] for line, number in enumerate(found[_TRUTH].split(), 1)}
        except Exception as error:  # a damaged file makes scipy's parser raise almost anything
            raise DataError(
                f"{self.root}: {_META} or {_TRUTH} is damaged ({type(error).__name__}: {error}); give the files of one kit"
            ) from None


def _label_files(root: Path) -> dict[str, bytes]:
    """What there is of _TRUTH and _META: in `root`, in its folder val, or in a development kit, a folder or an archive."""
    found: dict[str, bytes] = {}
    kits = sorted(root.glob("ILSVRC2012_devkit*"))
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
