"""An image folder: ROOT/train/CLASS/* and ROOT/val/CLASS/*, as training reads it."""

from pathlib import Path

from trainables.data.pack.layout_reader import Listing, RandomAccessReader, SplitListing
from trainables.data.sources.folder import FolderSource, has_train_folder


class FolderReader(RandomAccessReader):
    """A location is a file's path below the root. Training opens its `FolderSource`."""

    @staticmethod
    def matches(root: Path) -> bool:
        return root.is_dir() and has_train_folder(str(root))

    def listing(self) -> Listing:
        train, val = FolderSource(str(self._root), "train"), FolderSource(str(self._root), "val")
        return Listing(
            train.classes, {"train": SplitListing(train.files(), train.labels_N), "val": SplitListing(val.files(), val.labels_N)}
        )
