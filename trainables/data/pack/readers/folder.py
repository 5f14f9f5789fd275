"""An image folder: ROOT/train/CLASS/* and ROOT/val/CLASS/*, as training reads it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from trainables.data.order import Split
from trainables.data.pack.layout_reader import Label, LayoutReader
from trainables.data.sources.folder import FolderSource, has_train_folder


class FolderReader(LayoutReader):
    """A location is a file's path below the root. Training opens its `FolderSource`."""

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        return [root] if root.is_dir() and has_train_folder(str(root)) else []

    def splits(self) -> Mapping[Split, list[Split]]:
        return {"train": ["train"], "val": ["val"]}

    def samples(self, part: Split) -> Iterable[tuple[str, Label]]:
        source = FolderSource(str(self.root), part)
        self.classes = source.classes
        return zip(source.files(), source.labels_N.tolist(), strict=True)
