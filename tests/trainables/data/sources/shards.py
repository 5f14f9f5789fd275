"""Small packed sets, written as docs/records.md says."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainables.data.index import INDEX, ROW_COLUMNS, SHARD_COLUMNS


def image_of(split: str, sample: int, size: int = 1000) -> bytes:
    """The content of a sample: noise that belongs to it alone."""
    return np.random.default_rng([split == "train", sample]).bytes(size)


def make_records(root: Path, *, shards: int = 4, rows: int = 25, size: int = 1000, val_rows: int = 10) -> Path:
    """A set of `shards` training shards of `rows` samples each, and one validation shard; samples are noise, not images."""
    root.mkdir(parents=True, exist_ok=True)
    splits = {
        split: _split(root, split, count, each, size) for split, count, each in (("train", shards, rows), ("val", 1, val_rows))
    }
    index = {
        "format": "raydistill records",
        "version": 1,
        "image": "file",
        "mode": {},
        "source": {},
        "raydistill": "0.1.0",
        "num_unreadable": 0,
        "classes": ["a", "b"],
        "splits": splits,
    }
    (root / INDEX).write_text(json.dumps(index))
    return root


def _split(root: Path, split: str, shards: int, rows: int, size: int) -> dict[str, Any]:
    files, offsets = [], []
    for shard in range(shards):
        samples = range(shard * rows, (shard + 1) * rows)
        images = [image_of(split, sample, size) for sample in samples]
        path = root / f"{split}-{shard:05}.arrow"
        labels, names = [sample % 2 for sample in samples], [f"{split}/{sample}" for sample in samples]
        sides = pa.array([1] * rows, pa.int32())
        columns = [pa.array(images, pa.large_binary()), pa.array(labels, pa.int64()), pa.array(names), sides, sides]
        _write(path, columns, SHARD_COLUMNS)
        content = path.read_bytes()
        offsets += [content.index(image) for image in images]
        files.append(_file(path, rows))
    count = shards * rows
    values = ([sample % 2 for sample in range(count)], offsets, [size] * count, [1] * count, [1] * count)
    kinds = {"int64": pa.int64(), "int32": pa.int32()}
    path = root / f"{split}.rows.arrow"
    _write(path, [pa.array(v, kinds[k]) for v, k in zip(values, ROW_COLUMNS.values(), strict=True)], tuple(ROW_COLUMNS))
    return {"rows": _file(path, count), "shards": files}


def _write(path: Path, columns: list[Any], names: tuple[str, ...]) -> None:
    batch = pa.record_batch(columns, names=list(names))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _file(path: Path, rows: int) -> dict[str, Any]:
    content = path.read_bytes()
    return {"file": path.name, "rows": rows, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
