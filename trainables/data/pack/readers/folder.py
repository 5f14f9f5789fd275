"""An image folder: ROOT/train/CLASS/* and ROOT/val/CLASS/*, as training reads it; without labels, images at any depth."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainables.data.order import Split
from trainables.data.pack.layout_reader import Label, LayoutReader, is_image_folder
from trainables.data.sources.folder import (
    NO_IMAGES,
    has_root_classes,
    has_train_folder,
    images_below,
    list_folder,
    split_folders,
    unlabelled_splits,
)
from trainables.data.split_names import SPLIT_NAMES
from trainables.errors import DataError


class FolderReader(LayoutReader):
    """A location is a file's path below the root."""

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        return [root] if root.is_dir() and (has_train_folder(str(root)) or has_root_classes(str(root))) else []

    def splits(self) -> Mapping[Split, list[str]]:
        if not self.labels:
            return {split: [folder] for split, folder in unlabelled_splits(str(self.root)).items()}
        if not self.holds_out:
            return {split: [split] for split in SPLIT_NAMES}
        return {split: [split] for split in SPLIT_NAMES if split in ("train", *split_folders(str(self.root)))}

    def samples(self, part: Any) -> Iterable[tuple[str, Label | None]]:
        if not self.labels:
            label = part if is_image_folder(self.root) else None
            if not (paths := images_below(str(self.root), part)):
                raise DataError(f"{self.root / part} {NO_IMAGES}; add some or remove it")
            return ((path, label) for path in paths)
        self.classes, files, labels_N = list_folder(str(self.root), part, holds_out=self.holds_out)
        return zip(files, labels_N.tolist(), strict=True)
