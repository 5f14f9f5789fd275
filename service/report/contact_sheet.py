"""The output of `distill data` for a packed set: counts, sizes, shapes, and a contact sheet of its images."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from service.report.table import Table
from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.index import Index, read_index
from trainables.data.order import Split
from trainables.data.pack.modes import described
from trainables.data.sources.records import RecordsSource, open_records
from trainables.rundir import replacing

PERCENTILES = (0, 5, 50, 95, 100)
_TILE, _CAPTION, _PER_ROW, _ROWS = 128, 14, 8, 6
_MAX_CLASSES = 20


def describe(root: Path, index: Index) -> Iterator[str | Table]:
    """Yield lines and tables about a set from its rows, without reading images. Raises DataError if the set is damaged."""
    mode = described(index.mode)
    yield f"{root}: {index.source.get('kind')} {index.source.get('name')}, {mode}, by raydistill {index.raydistill}"
    yield (
        f"images as {'RGB pixels' if index.image == 'pixels' else 'files'}; {index.num_unreadable} unreadable skipped; "
        f"{f'{len(index.classes)} classes' if index.classes else 'without labels'}"
    )
    sources: dict[Split, RecordsSource] = {
        split: open_records(str(root), split, labels=bool(index.classes)) for split in ("train", "val")
    }
    yield _splits(index, sources)
    if index.classes:
        yield _classes(index.classes, sources)
    train = sources["train"]
    sizes = {
        "bytes": train.sizes_N,
        "shorter side, pixels": np.minimum(train.widths_N, train.heights_N),
        "width / height": train.widths_N / np.maximum(train.heights_N, 1),
    }
    rows = [[name, *(f"{share:,.{2 * ('/' in name)}f}" for share in np.percentile(sizes[name], PERCENTILES))] for name in sizes]
    heads = ["min", *(f"{percent}% below" for percent in PERCENTILES[1:-1]), "max"]
    yield Table("sizes of train images", ["", *heads], rows, left=[""])


def _splits(index: Index, sources: dict[Split, RecordsSource]) -> Table:
    of_classes = ["classes", "per class (min–max)", "median"] if index.classes else []
    rows = []
    for split, source in sources.items():
        per_class = []
        if index.classes:
            counts_K = np.bincount(source.labels_N[source.labels_N >= 0], minlength=len(index.classes))
            per_class = [f"{(counts_K > 0).sum():,}", f"{counts_K.min():,}–{counts_K.max():,}", f"{np.median(counts_K):,.0f}"]
        shards = index.splits[split].shards
        mib = f"{sum(shard.bytes for shard in shards) / 2**20:,.1f}"
        rows.append([split, f"{len(source):,}", *per_class, str(len(shards)), mib])
    columns = ["split", "images", *of_classes, "shards", "MiB"]
    return Table("splits", columns, rows, left=["split"], optional=["median", "shards"])


def _classes(classes: tuple[str, ...], sources: dict[Split, RecordsSource]) -> Table:
    """Tabulate the classes in order; if there are many, those with the fewest and the most training images."""
    counts = {split: np.bincount(source.labels_N, minlength=len(classes)) for split, source in sources.items()}
    shown = np.arange(len(classes))
    title = "classes"
    if len(classes) > _MAX_CLASSES:
        by_count = np.argsort(counts["train"], kind="stable")
        shown = np.concatenate([by_count[: _MAX_CLASSES // 2], by_count[-_MAX_CLASSES // 2 :]])
        title = f"classes with the fewest and the most train images, {_MAX_CLASSES} of {len(classes):,}"
    rows = [[str(label), classes[label], *(f"{counts[split][label]:,}" for split in sources)] for label in shown.tolist()]
    return Table(title, ["label", "class", *sources], rows, left=["class"])


def write_sheet(root: Path, path: Path) -> int:
    """Write a PNG of evenly spread training images with their class names; return how many could be read.

    Raises:
        DataError: the set is damaged.
        OSError: `path` cannot be written.
    """
    source = open_records(str(root), "train", labels=bool(read_index(root).classes))
    count = min(len(source), _PER_ROW * _ROWS)
    indices = np.linspace(0, len(source) - 1, count).round().astype(int).tolist()
    rows = -(-count // _PER_ROW)
    sheet = Image.new("RGB", (_PER_ROW * _TILE, rows * (_TILE + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    shown = 0
    for number, index in enumerate(indices):
        x, y = number % _PER_ROW * _TILE, number // _PER_ROW * (_TILE + _CAPTION)
        try:
            image = decode_image(source.read(index))
        except UnreadableImageError:
            draw.line((x, y, x + _TILE, y + _TILE), "red")
        else:
            scale = (_TILE - 4) / max(image.size)
            width, height = (max(1, round(side * scale)) for side in image.size)
            resized = image.resize((width, height), Image.Resampling.BICUBIC if scale < 1 else Image.Resampling.NEAREST)
            sheet.paste(resized, (x + (_TILE - width) // 2, y + (_TILE - height) // 2))
            shown += 1
        if source.classes:
            draw.text((x + 4, y + _TILE), source.classes[source.labels_N[index]][:20], "black")
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")
    return shown
