"""Packed sets for tests."""

import io
import tarfile
from pathlib import Path

import pytest

from trainables.data.index import Index
from trainables.data.pack.modes import Mode
from trainables.data.pack.shard import write_shard
from trainables.data.pack.shard_plan import SHARD_BYTES, plan_pack, write_set
from trainables.data.sources.records import RecordsSource, open_records
from trainables.errors import DataError
from trainables.notices import notices_to


def pack_here(
    source: Path,
    dest: Path,
    mode: Mode | None = None,
    *,
    check: bool = False,
    strict: bool = False,
    shard_bytes: int = SHARD_BYTES,
    labels: bool = True,
    val_share: float | None = None,
) -> Index:
    """What `distill pack` does, in this process."""
    plan = plan_pack(source, dest, mode or Mode(), check, shard_bytes=shard_bytes, labels=labels, val_share=val_share)
    for job in plan.jobs:
        write_shard(job)
    return write_set(plan, dest, "0", strict=strict)


def packed(source: Path, mode: Mode | None = None) -> tuple[RecordsSource, RecordsSource]:
    """Train and val of the packed set of `source`."""
    dest = source.with_name(source.name + "-packed")
    pack_here(source, dest, mode)
    return open_records(str(dest), "train"), open_records(str(dest), "val")


def refusal(source: Path) -> str:
    with pytest.raises(DataError) as caught:
        pack_here(source, source.with_name("refused"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def noticed(source: Path) -> list[str]:
    """The notices of packing `source`."""
    lines: list[str] = []
    with notices_to(lines.append):
        packed(source)
    return lines


def contents(source: RecordsSource) -> list[bytes]:
    return [bytes(source.read(index)) for index in range(len(source))]


def names(source: RecordsSource) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
