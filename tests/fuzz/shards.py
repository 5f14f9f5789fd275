"""Damaged packed sets: every sample and name is read, and every image seen, of both splits."""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.fuzz.mutations import mutate
from tests.fuzz.subject import Input
from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import photo
from trainables.config import DataConfig
from trainables.data.augment import Augment, uniforms
from trainables.data.decode import UnreadableImageError
from trainables.data.index import INDEX
from trainables.data.order import Split
from trainables.data.pack.modes import Mode
from trainables.data.sources.records import RecordsSource, open_records

_SIZE = 32
_SHARD_BYTES = 4000  # about three photos
_NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**40,
    2**61,
    2**62,
    2**63,
    2**64,
    1e308,
    0.5,
    "",
    "a\nb",
    "../x",
    "index.json",
    "x" * 9999,
    "\ud800",
    [],
    {},
    [[]] * 500,
    ["a\nb"],
)


class Shards:
    """See Subject. Files are written below `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed, self._root = seed, folder / "set"
        self._sets = [_pack(folder, Mode()), _pack(folder, Mode(raw=20))]
        self._root.mkdir()
        data = DataConfig.model_validate({"image_size": _SIZE, "augment": "crop_flip"})
        self._augments: dict[Split, Augment] = {"train": Augment(data, "train"), "val": Augment(data, "val")}
        self._out_HWC = np.empty((_SIZE, _SIZE, 3), dtype=np.uint8)

    def make(self, index: int) -> Input:
        noise = np.random.default_rng([self._seed, index])
        which = int(noise.integers(len(self._sets)))
        files: dict[str, bytes | None] = dict(self._sets[which])
        damage = list(_DAMAGES)[int(noise.choice(len(_DAMAGES), p=_WEIGHTS))]
        _DAMAGES[damage](files, noise)
        return Input((("file", "pixels")[which], damage), files)

    def calls(self, given: Input) -> Iterator[Callable[[], list[str]]]:
        for path in self._root.iterdir():
            path.unlink()
        late = given.kind[1].endswith("under a reader")
        begin = self._sets[("file", "pixels").index(given.kind[0])] if late else given.files
        self._write(begin)
        for split in self._augments:
            yield partial(self._read, split, given.files if late else None)

    def _write(self, files: dict[str, bytes | None] | dict[str, bytes]) -> None:
        for name, content in files.items():
            if content is None:
                (self._root / name).unlink(missing_ok=True)
            else:
                (self._root / name).write_bytes(content)

    def _read(self, split: Split, then: dict[str, bytes | None] | None) -> list[str]:
        source = open_records(str(self._root), split)
        if then is not None:
            source.read(0)
            self._write(then)
        return [self._see(source, split, index) for index in range(min(len(source), 100))]

    def _see(self, source: RecordsSource, split: Split, index: int) -> str:
        augment = self._augments[split]
        (crop,) = uniforms(0, 0, np.array([index]), augment.num_uniforms)
        try:
            augment.render(source.read(index), crop, self._out_HWC)
            assert source.name(index)
            return ""
        except UnreadableImageError as error:
            return f"UnreadableImageError: {error}"


def _pack(folder: Path, mode: Mode) -> dict[str, bytes]:
    images = folder / "images"
    for number in range(16):
        path = images / ("train" if number < 11 else "val") / ("cat", "dog")[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number, 30 + number % 7, 28 + number % 5).save(path, quality=90)
    packed = folder / f"packed{mode.raw or ''}"
    pack_here(images, packed, mode, shard_bytes=_SHARD_BYTES)
    return {path.name: path.read_bytes() for path in sorted(packed.iterdir()) if path.is_file()}


_Files = dict[str, bytes | None]


def _one(files: _Files, noise: np.random.Generator, ending: str) -> tuple[str, bytes]:
    names = [name for name in files if name.endswith(ending) and (ending != ".arrow" or ".rows." not in name)]
    name = names[int(noise.integers(len(names)))]
    content = files[name]
    assert content is not None
    return name, content


def _mutated(files: _Files, noise: np.random.Generator, ending: str) -> tuple[str, bytes]:
    name, whole = _one(files, noise, ending)
    return name, mutate(whole, [content for content in files.values() if content], noise)[1]


def _zeroed(files: _Files, noise: np.random.Generator, ending: str) -> tuple[str, bytes]:
    """The end, where Arrow keeps its structure, is blank."""
    name, whole = _one(files, noise, ending)
    length = int(noise.integers(1, min(800, len(whole))))
    return name, whole[:-length] + bytes(length)


def _told(files: _Files, name: str, content: bytes) -> None:
    """Put a file there together with its size and checksum: what only an adversary, or a mistake of ours, would do."""
    whole = files[INDEX]
    assert whole is not None
    index = json.loads(whole)
    for split in index["splits"].values():
        for file in (split["rows"], *split["shards"]):
            if file["file"] == name:
                file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    files[name], files[INDEX] = content, json.dumps(index).encode()


def _damage_shard(files: _Files, noise: np.random.Generator) -> None:
    name, content = (_zeroed if noise.random() < 0.3 else _mutated)(files, noise, ".arrow")
    files[name] = content


def _damage_told_shard(files: _Files, noise: np.random.Generator) -> None:
    _told(files, *(_zeroed if noise.random() < 0.3 else _mutated)(files, noise, ".arrow"))


def _damage_rows(files: _Files, noise: np.random.Generator) -> None:
    name, content = _mutated(files, noise, ".rows.arrow")
    files[name] = content


def _damage_told_rows(files: _Files, noise: np.random.Generator) -> None:
    _told(files, *(_zeroed if noise.random() < 0.3 else _mutated)(files, noise, ".rows.arrow"))


def _damage_row_values(files: _Files, noise: np.random.Generator) -> None:
    """A row that says something else, in a file that is whole."""
    name, whole = _one(files, noise, ".rows.arrow")
    batch = pa.ipc.open_file(pa.py_buffer(whole)).get_batch(0)
    column = int(noise.integers(batch.num_columns))
    field = batch.schema.field(column)
    values_N = np.frombuffer(batch.column(column).buffers()[1], dtype=str(field.type), count=len(batch)).copy()
    row = int(noise.integers(len(values_N)))
    most = np.iinfo(values_N.dtype).max
    nasty = [-1, 0, 1, most, most - 1, -most, most // 2 + 1, most // 3, values_N[row] + 1, values_N[row] - 1, values_N[row] * 2]
    values_N[row] = nasty[int(noise.integers(len(nasty)))]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch.set_column(column, field, pa.array(values_N)))
    _told(files, name, sink.getvalue().to_pybytes())


def _damage_index(files: _Files, noise: np.random.Generator) -> None:
    files[INDEX] = _mutated(files, noise, INDEX)[1]


def _damage_index_values(files: _Files, noise: np.random.Generator) -> None:
    """Another value, key or length somewhere in the index, which stays JSON."""
    index = json.loads(_one(files, noise, INDEX)[1])
    for _ in range(int(noise.integers(1, 3))):
        _change(index, noise)
    files[INDEX] = json.dumps(index).encode()


def _change(index: dict[str, Any], noise: np.random.Generator) -> None:
    holder: Any = index
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = keys[int(noise.integers(len(keys)))]
        value = holder[key]
        if isinstance(value, dict | list) and value and noise.random() < 0.9:
            holder = value
            continue
        match int(noise.integers(5)):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, value)
            case 1:
                holder[("a\nb", "sha", "")[int(noise.integers(3))]] = value
            case 2 if isinstance(value, int):
                holder[key] = value + int(noise.choice([-1, 1, value, 1000, 10**9]))
            case _:
                holder[key] = _NASTY[int(noise.integers(len(_NASTY)))]
        return


def _remove(files: _Files, noise: np.random.Generator) -> None:
    files[list(files)[int(noise.integers(len(files)))]] = None


def _large(files: _Files, noise: np.random.Generator) -> None:
    """Shards of more rows than memory has room for, as far as the index knows."""
    index = json.loads(_one(files, noise, INDEX)[1])
    for split in index["splits"].values():
        rows = int(noise.choice([10**8, 10**10, 2**40, 2**61]))
        split["rows"]["rows"] = rows
        split["shards"][0]["rows"] = rows
    files[INDEX] = json.dumps(index).encode()


_DAMAGES: dict[str, Callable[[_Files, np.random.Generator], None]] = {
    "shard": _damage_shard,
    "shard that the index tells of": _damage_told_shard,
    "shard under a reader": _damage_shard,
    "rows": _damage_rows,
    "rows that the index tells of": _damage_told_rows,
    "values of rows": _damage_row_values,
    "index": _damage_index,
    "values of the index": _damage_index_values,
    "rows without end": _large,
    "a file is missing": _remove,
    "a file goes under a reader": _remove,
}
_WEIGHTS = np.array([2, 3, 2, 1, 3, 3, 2, 4, 0.3, 0.5, 0.5]) / 21.3
