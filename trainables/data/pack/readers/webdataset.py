"""WebDataset tars: members of one name make a sample, `000017.jpg` the image and `000017.cls` its class, a number or a name."""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainables.data.pack.layout_reader import Label, LayoutReader, Listing, Location, files_below, locate, numbered, split_files
from trainables.data.sources.folder import EXTENSIONS
from trainables.errors import DataError

_BLOCK = 512


class WebdatasetReader(LayoutReader):
    """A location is a tar below the root, offset and size of an image in it, and the member's name."""

    @staticmethod
    def matches(root: Path) -> bool:
        return bool(files_below(root, r".+\.tar(\.gz|\.bz2|\.xz|\.zst)?"))

    def listing(self) -> Listing:
        if packed := files_below(self._root, r".+\.tar\.(gz|bz2|xz|zst)"):
            raise DataError(
                f"{packed[0]} is compressed, so that its images cannot be reached one by one; unpack it to a plain .tar"
            )

        def samples(path: Path) -> Iterator[tuple[Location, Label]]:
            for name, offset, size, label in _samples(path):
                yield (str(path.relative_to(self._root)), offset, size, name), label

        located = locate(split_files(self._root, files_below(self._root, r".+\.tar"), "tars"), samples)
        if all(str(label).isdecimal() for labels in located.labels.values() for label in labels):
            located = located._replace(labels={split: [*map(int, labels)] for split, labels in located.labels.items()})
        return numbered(self._root, located)

    def read(self, locations: Sequence[tuple[str, int, int, str]]) -> Iterator[tuple[str, bytes]]:
        for file, offset, size, member in locations:
            with open(self._root / file, "rb") as tar:
                tar.seek(offset)
                yield f"{file}/{member}", tar.read(size)


def _samples(path: Path) -> Iterator[tuple[str, int, int, str]]:
    """Of each sample the image's member name, offset and size, and the label. Raises DataError where a tar is damaged."""
    key, image, label = "", None, None
    try:
        with open(path, "rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if (member_key := f"{folder}/{stem}") != key:
                    yield from _whole(path, key, image, label)
                    key, image, label = member_key, None, None
                if extension.lower() == "cls":
                    content = tar.extractfile(member)
                    label = content.read().decode(errors="replace").strip() if content else None
                elif f".{extension.lower()}" in EXTENSIONS:
                    image = (member.name, member.offset_data, member.size)
            raw.seek(tar.offset)
            if raw.read(_BLOCK).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise tarfile.ReadError(f"damaged at byte {tar.offset}")
            raw.seek(0, 2)
            if raw.tell() < tar.offset:
                raise tarfile.ReadError("cut off")
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} is no whole tar ({error}); download it again") from None
    yield from _whole(path, key, image, label)


def _whole(path: Path, key: str, image: tuple[str, int, int] | None, label: str | None) -> Iterator[tuple[str, int, int, str]]:
    """The sample, if there is one. Raises DataError where one half of it is missing."""
    if image and label:
        yield *image, label
    elif image or label:
        missing = ".cls with its class" if image else "image"
        raise DataError(f"{path}: the sample {key.lstrip('/')} has no {missing}; give tars with KEY.jpg and KEY.cls")
