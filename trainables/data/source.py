"""Open the source that `data.path` names: an entry of SOURCES, a packed set, another known layout, or an image folder."""

import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from trainables.config import DataConfig
from trainables.data.index import is_records
from trainables.data.interface import Source
from trainables.data.order import Split
from trainables.data.pack.image_folders import NO_IMAGES
from trainables.data.pack.readers import IMAGE_FOLDER, matching_reader, nearby_layout_error
from trainables.data.sources.layout import LayoutSource
from trainables.data.sources.memory import open_digits, open_synthetic
from trainables.data.sources.mixed import open_mixed
from trainables.data.sources.records import open_records
from trainables.data.storage.remote import open_remote
from trainables.data.storage.staging import open_staged
from trainables.errors import DataError
from trainables.notices import notice
from trainables.object_store.store import is_uri
from trainables.rundir import expand_home

SOURCES: dict[str, Callable[[DataConfig, Split], Source]] = {
    "digits": lambda data, split: open_digits(split),
    "synthetic": lambda data, split: open_synthetic(split, data.synthetic_images, data.synthetic_classes, data.image_size),
}


def open_source(data: DataConfig, split: Split) -> Source:
    """Open one split of `data.path`; for training, together with the sets of `data.more`.

    Raises DataError if it is missing, empty or inconsistent.
    """
    if data.more and split == "train":
        return open_mixed(data, partial(open_source, split=split))
    if data.val_share and (data.path in SOURCES or _is_packed(data)):
        raise DataError(f"data.val_share: {data.path} has a validation split of its own; leave data.val_share out")
    if named := SOURCES.get(data.path):
        if os.path.isdir(data.path):
            notice(f"data.path: {data.path} is the built-in data set, not the folder; for the folder, write ./{data.path}")
        source = named(data, split)
        if not data.labels:
            notice(f"data.labels: false: the labels of {data.path} are not used")
            source.classes, source.labels_N = (), np.full(len(source), -1, dtype=np.int64)
        return source
    if is_uri(data.path):
        return open_remote(data, split)
    if is_records(data.path):
        return open_records(data.path, split, data.labels)
    root = expand_home(data.path)
    try:
        kind = matching_reader(root, data.labels)
        if kind is None and (refusal := nearby_layout_error(root)):
            raise type(refusal)(f"data.path: {refusal}")
        if kind is None and not data.labels and root.is_dir():
            raise DataError(f"data.path: {data.path} {NO_IMAGES}; add some, or give another folder")
        return LayoutSource(data, root, kind or IMAGE_FOLDER, split)  # its error describes the expected layout
    except OSError as error:
        raise DataError(f"data.path: {error.filename or root} cannot be read: {error.strerror}") from None


def refuse_single_class(classes: Sequence[str], where: str) -> None:
    """Raise DataError if there is only one class: its cross-entropy is always 0."""
    if len(classes) == 1:
        raise DataError(f"{where} has one class only, {', '.join(classes)}; a classifier needs images of two or more")


def _is_packed(data: DataConfig) -> bool:
    return is_uri(data.path) or (data.path not in SOURCES and is_records(data.path))


def check_placement(data: DataConfig) -> None:
    """Raise DataError if `data.stage` does not fit the source."""
    if data.stage != "none" and not _is_packed(data):
        raise DataError(f"data.stage: {data.path} is not a packed set; pack it with `distill pack`, or leave data.stage out")


def open_on_node(data: DataConfig, split: Split) -> Source:
    """Open a source for a worker, which reads many epochs: from the node's copy, as `data.stage` says.

    Raises DataError as `open_source` does, and if `data.stage` does not fit the source or the node.
    """
    if data.more and split == "train":
        return open_mixed(data, partial(open_on_node, split=split))
    check_placement(data)
    if is_uri(data.path):
        return open_remote(data, split, reads_epochs=True)
    return open_source(data, split) if data.stage == "none" else open_staged(data, split)
