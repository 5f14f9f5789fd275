"""An image folder: ROOT/train/CLASS/* and ROOT/val/CLASS/*, as training reads it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainables.data.decode import UnreadableImageError, read_file
from trainables.data.pack.layout_reader import LayoutReader, Listing, SplitListing
from trainables.data.sources.folder import FolderSource, has_train_folder


class FolderReader(LayoutReader):
    """A location is a file's path below the root."""

    @staticmethod
    def matches(root: Path) -> bool:
        return root.is_dir() and has_train_folder(str(root))

    def listing(self) -> Listing:
        train, val = FolderSource(str(self._root), "train"), FolderSource(str(self._root), "val")
        return Listing(
            train.classes, {"train": SplitListing(train.files(), train.labels_N), "val": SplitListing(val.files(), val.labels_N)}
        )

    def read(self, locations: Sequence[str]) -> Iterator[tuple[str, bytes | UnreadableImageError]]:
        root = os.path.join(self._root, "")
        for location in locations:
            try:
                yield location, read_file(root + location)
            except UnreadableImageError as error:
                yield location, error
