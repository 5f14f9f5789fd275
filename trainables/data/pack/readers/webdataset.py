"""WebDataset tars: members of one key make a sample, `000017.jpg` the image and `000017.cls` its class, a number or a name.

The format ends a key at the first dot of the base name. Many writers put dots into keys (`2022.05.png`), so that members pair
whose names are equal up to the last dot, and then an image `KEY.more.jpg` with the label of `KEY`.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainables.data.interface import NO_LABELS
from trainables.data.pack.file_kind import ARCHIVE
from trainables.data.pack.image_folders import EXTENSIONS
from trainables.data.pack.layout_reader import LABEL_FIELDS, Label, LayoutReader, Listing, Piece, files_below, split_name
from trainables.data.pack.readers.tar_file import tar_files
from trainables.errors import DataError, NoLabelsError, first_three
from trainables.notices import notice

_IMAGES = (*EXTENSIONS, ".img")
_MEMBER = re.compile(
    rf"(?P<stem>.+)(?:(?P<image>{'|'.join(map(re.escape, _IMAGES))})|(?P<cls>\.cls(?:\.txt)?)|(?P<json>\.json)|(?P<tar>\.tar))",
    re.IGNORECASE | re.DOTALL,
)
_WANTED = "give tars with KEY.jpg and KEY.cls"


class WebdatasetReader(LayoutReader):
    """A location is the image's Piece of a tar."""

    what = "tars"
    text_is_index = True

    def __init__(self, root: Path, labels: bool = True, val_share: float | None = None) -> None:
        super().__init__(root, labels, val_share)
        self._extra: list[str] = []
        """Further images of samples."""

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        """The tars of a source, and compressed ones, which are refused where they are read."""
        tars = [path for path in files_below(root, ARCHIVE) if path.suffix.lower() != ".zip"]
        return tars if any(path.suffix.lower() == ".tar" or split_name(root, path) for path in tars) else []

    def listing(self) -> Listing:
        listing = super().listing()
        if self._extra:
            notice(f"{self.root}: not used, since a sample has one image: {first_three(self._extra)}")
        return listing

    def samples(self, part: Path) -> Iterator[tuple[Piece, Label | None]]:
        """Each sample's image and label, in the order of the images.

        Raises DataError where one half of a sample is missing, or two samples have one key. Without labels, a sample is an image.
        """
        found: dict[str, dict[str, Piece]] = {"image": {}, "cls": {}, "json": {}}
        with open(part, "rb") as raw:
            for piece in tar_files(self.root, part, raw):
                if not (member := _MEMBER.fullmatch(piece.name)):
                    continue
                stem, kind = member["stem"], str(member.lastgroup)
                if kind == "tar":
                    raise DataError(
                        f"{part} holds tars, such as {piece.name}: unpack them into train/CLASS/ and val/CLASS/, or {_WANTED}"
                    )
                if (other := found[kind].setdefault(stem, piece)) is not piece:
                    raise DataError(f"{part}: the sample {stem} is there twice ({other.name}, {piece.name}); {_WANTED}")
            images, labels = found["image"], found["json"] | found["cls"]
            owners: dict[str, Piece] = {}
            for stem, piece in images.items():
                key = stem if stem in labels else _format_key(stem)
                if key != stem and key in images:
                    self._extra.append(f"{part.name}/{piece.name}")
                    continue
                own = labels.get(key)
                second = found["json"].get(key) if key in found["cls"] else None
                if not self.labels:
                    label: Label | None = key if key in found["cls"] else None
                else:
                    read = [_label(os.pread(raw.fileno(), each.size, each.offset), each.name) for each in (own, second) if each]
                    label = read[0] if read else None
                    if _contradict(read):
                        raise DataError(
                            f"{part}: the sample {stem} has class {read[0]} in its .cls and {read[1]} in its .json: remove one"
                        )
                if label is None and self.labels and not labels and "/" in stem:
                    raise DataError(
                        f"{part}: its images lie in folders ({piece.name}) without a .cls or .json: if these are the classes, "
                        f"unpack it into {self.root}/{split_name(self.root, part)}/CLASS; or {_WANTED}"
                    )
                if label is None and self.labels:
                    of_class = "" if labels else f", or if each tar is a class, unpack it into a folder {part.with_suffix('')}"
                    raise NoLabelsError(
                        f"{part}: the sample {stem} has no .cls and no .json with its class; {_WANTED}{of_class}; {NO_LABELS}"
                    )
                if owners.setdefault(key, piece) is not piece:
                    raise DataError(f"{part}: the sample {key} has two images ({owners[key].name}, {piece.name}); {_WANTED}")
                yield piece, label
        unused = [key for key in found["cls"] if key not in owners]
        if unused and self.labels:
            raise DataError(f"{part}: the sample {unused[0]} has no image ({' '.join(_IMAGES)}); {_WANTED}")


def _format_key(stem: str) -> str:
    """The key by the format: the path up to the first dot of the base name."""
    folder, slash, base = stem.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _contradict(labels: Sequence[Label | None]) -> bool:
    """Whether a sample has two numbers of a class; names may mean the same."""
    numbers = [int(text) for label in labels if (text := str(label)).isdecimal()]
    return len(set(numbers)) == 2


def _label(content: bytes, name: str) -> Label | None:
    """The class in a .cls or a .json, which may also be a .cls of JSON; None where there is none."""
    text = content.decode(errors="replace").strip()
    if not (name.lower().endswith(".json") or text.startswith("{")):
        return text or None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    values = [fields[key] for key in LABEL_FIELDS if key in fields] if isinstance(fields, dict) else [fields]
    found = next((value for value in values if isinstance(value, int | float | str) and value != ""), None)
    return str(found) if isinstance(found, float) else found
