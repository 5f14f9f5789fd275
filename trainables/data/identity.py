"""Identify data, so that a resumed stage never trains silently on other data, and a cache never has outputs for other images.

An identity needs no `stat` and no read per image: it hashes the labels and names of all images, or the checksums in a packed
set's index, and the contents of the few images that `_sampled_sha256` reads. In a large folder, a replaced file of the same name
may go unnoticed by a resumed stage; a cache's fingerprint hashes the sizes of all files too.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from trainables.config import DataIdentity, SplitIdentity
from trainables.data.decode import UnreadableImageError
from trainables.data.interface import Source
from trainables.errors import DataError, first_three

SAMPLED = 256
"""The number of files whose contents a fingerprint reads. Preprocessing changes nearly all images, so that a few reveal it;
opening a million on a network disk takes minutes."""
_HASHES = {"labels": "labels", "order": "names or order"}
_RESTORE = "restore the data, or choose another --out"


def data_identity(train: Source, val: Source) -> DataIdentity:
    """Fingerprint both splits. Raises DataError if the disk or the network fails."""
    return DataIdentity(classes=train.classes, train=_split_identity(train), val=_split_identity(val))


def _split_identity(source: Source) -> SplitIdentity:
    return SplitIdentity(
        num_images=len(source),
        labels=hashlib.sha256(np.ascontiguousarray(source.labels_N, dtype=np.int64).data).hexdigest(),
        order=" ".join("" if each.checksums_sha256() else _names_sha256(each) for each in source.sets),
        contents=" ".join(each.checksums_sha256() or _sampled_sha256(each) for each in source.sets),
    )


def _names_sha256(source: Source) -> str:
    """Hash the names of all samples in order. They may contain bytes that are not UTF-8."""
    names = "".join(f"{source.name(index)}\0" for index in range(len(source)))
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()


def fingerprint(source: Source) -> str:
    """Hash a split's classes, its identity and the sizes of its files. Raises DataError if the disk or the network fails."""
    identity, sizes = _split_identity(source), [each.sizes_sha256() for each in source.sets]
    return hashlib.sha256(json.dumps([source.classes, identity.model_dump(), sizes]).encode()).hexdigest()


def data_changes(before: DataIdentity, now: DataIdentity) -> list[str]:
    """Describe each change between two data sets with the same classes."""
    changes = []
    for split in ("train", "val"):
        old, new = getattr(before, split), getattr(now, split)
        if old.num_images != new.num_images:
            changes.append(f"{split} had {old.num_images} images and has {new.num_images}")
            continue
        differing = [words for name, words in _HASHES.items() if getattr(old, name) != getattr(new, name)]
        if not differing and old.contents != new.contents:  # contents also change with the order
            differing = ["contents"]
        if differing:
            changes.append(f"the {' and the '.join(differing)} of the {split} images changed")
    return changes


def check_same_data(trained: str, before: DataIdentity, now: DataIdentity, *, accept: bool) -> list[str]:
    """Return what has changed since `trained`, a run or a checkpoint, was trained; [] if the data is the same.

    Raises DataError if the data has changed without `accept`, or if its classes have changed.
    """
    if before.classes != now.classes:
        raise DataError(
            f"{trained} was trained on other classes: {_class_changes(before.classes, now.classes)}; its models predict "
            f"the old ones, and --accept-new-data does not change that: {_RESTORE}"
        )
    changes = data_changes(before, now)
    if changes and not accept:
        raise DataError(
            f"{trained} was trained on other data: {', '.join(changes)}: {_RESTORE}, or repeat the unfinished epoch "
            "on the new data with --accept-new-data"
        )
    return changes


def _class_changes(before: Sequence[str], now: Sequence[str]) -> str:
    parts = {"new": [name for name in now if name not in {*before}], "gone": [name for name in before if name not in {*now}]}
    named = [
        f"class{'es' if len(names) > 1 else ''} {first_three(names)} {'are' if len(names) > 1 else 'is'} {what}"
        for what, names in parts.items()
        if names
    ]
    return " and ".join(named) or "they are in another order"


def _sampled_sha256(source: Source) -> str:
    """Hash the contents of SAMPLED evenly spread files, or of all if there are fewer; of an unreadable one, the reason.

    Training skips unreadable images. Raises DataError if the disk or the network fails.
    """
    digest, count = hashlib.sha256(), min(len(source), SAMPLED)
    for number in range(count):
        try:
            content = bytes(source.read(number * len(source) // count))
        except UnreadableImageError as error:
            content = str(error).encode()
        except OSError as error:
            raise DataError(f"data.path: {error.filename} cannot be read: {error.strerror}") from None
        digest.update(b"%d\0" % len(content))
        digest.update(content)
    return digest.hexdigest()
