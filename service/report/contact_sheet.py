"""The output of `distill data` for a packed set: counts, sizes, shapes, and a contact sheet of its images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from service.report.labels import number
from service.report.table import Table
from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.index import Index, read_index
from trainables.data.order import Split
from trainables.data.pack.modes import described
from trainables.data.sources.records import open_records
from trainables.rundir import replacing

PERCENTILES = (0, 5, 50, 95, 100)
_TILE, _CAPTION, _PER_ROW, _ROWS = 128, 14, 8, 6
_MAX_CLASSES = 20


def describe(root: Path, index: Index) -> Iterator[str | Table]:
    """Yield lines and tables about a set from its rows, without reading images. Raises DataError if the set is damaged."""
    mode, classes = described(index.mode), index.classes
    yield f"{root}: {index.source.get('kind')} {index.source.get('name')}, {mode}, by raydistill {index.raydistill}"
    yield (
        f"images as {'RGB pixels' if index.image == 'pixels' else 'files'}; {index.num_unreadable} unreadable skipped; "
        f"{f'{len(classes)} classes' if classes else 'without labels'}"
    )
    splits: tuple[Split, ...] = ("train", "val")
    sources = {split: open_records(str(root), split, labels=bool(classes)) for split in splits}
    counts = {
        split: np.bincount(source.labels_N[source.labels_N >= 0], minlength=len(classes)) for split, source in sources.items()
    }
    rows = []
    for split, source in sources.items():
        shards, counts_K = index.splits[split].shards, counts[split]
        per_class = [f"{(counts_K > 0).sum():,}", f"{counts_K.min():,}–{counts_K.max():,}"] if classes else []
        mib = f"{sum(shard.bytes for shard in shards) / 2**20:,.1f}"
        rows.append([split, f"{len(source):,}", *per_class, str(len(shards)), mib])
    heads = ["split", "images", *(["classes", "per class (min–max)"] if classes else []), "shards", "MiB"]
    yield Table("splits", heads, rows, left=["split"], optional=["shards"])
    if classes:
        yield _classes(classes, counts)
    train = sources["train"]
    sizes = {
        "bytes": (train.sizes_N, 0),
        "shorter side, pixels": (np.minimum(train.widths_N, train.heights_N), 0),
        "width / height": (train.widths_N / np.maximum(train.heights_N, 1), 2),
    }
    rows = [
        [name, *(number(each, digits) for each in np.percentile(of_N, PERCENTILES))] for name, (of_N, digits) in sizes.items()
    ]
    heads = ["min", *(f"{percent}% below" for percent in PERCENTILES[1:-1]), "max"]
    yield Table("sizes of train images", ["", *heads], rows, left=[""])


def _classes(classes: Sequence[str], counts: Mapping[Split, np.ndarray]) -> Table:
    """Tabulate the classes in order; if there are many, those with the fewest and the most training images."""
    shown, title = np.arange(len(classes)), "classes"
    if len(classes) > _MAX_CLASSES:
        by_count = np.argsort(counts["train"], kind="stable")
        shown = np.concatenate([by_count[: _MAX_CLASSES // 2], by_count[-_MAX_CLASSES // 2 :]])
        title = f"classes with the fewest and the most train images, {_MAX_CLASSES} of {len(classes):,}"
    rows = [[str(label), classes[label], *(f"{counts_K[label]:,}" for counts_K in counts.values())] for label in shown.tolist()]
    return Table(title, ["label", "class", *counts], rows, left=["class"])


def write_sheet(root: Path, path: Path) -> int:
    """Write a PNG of evenly spread training images with their class names; return how many could be read.

    Raises:
        DataError: the set is damaged.
        OSError: `path` cannot be written.
    """
    source = open_records(str(root), "train", labels=bool(read_index(root).classes))
    count = min(len(source), _PER_ROW * _ROWS)
    sheet = Image.new("RGB", (_PER_ROW * _TILE, -(-count // _PER_ROW) * (_TILE + _CAPTION)), "white")
    draw, num_read = ImageDraw.Draw(sheet), 0
    for place, index in enumerate(np.linspace(0, len(source) - 1, count).round().astype(int).tolist()):
        x, y = place % _PER_ROW * _TILE, place // _PER_ROW * (_TILE + _CAPTION)
        try:
            image = decode_image(source.read(index))
        except UnreadableImageError:
            draw.line((x, y, x + _TILE, y + _TILE), "red")
        else:
            method = Image.Resampling.BICUBIC if max(image.size) > _TILE else Image.Resampling.NEAREST
            sheet.paste(ImageOps.pad(image, (_TILE - 4, _TILE - 4), method, "white"), (x + 2, y + 2))
            num_read += 1
        if source.classes:
            draw.text((x + 4, y + _TILE), source.classes[source.labels_N[index]][:20], "black")
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")
    return num_read
