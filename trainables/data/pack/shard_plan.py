"""Plan which samples go into which shard, by the source and the mode alone, and combine finished shards under one index."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainables.data.decode import UnreadableImageError
from trainables.data.index import INDEX, UNFINISHED, UNREADABLE, Index, SplitIndex
from trainables.data.order import Split
from trainables.data.pack.layout_reader import LayoutReader, Location, SplitListing
from trainables.data.pack.modes import Mode
from trainables.data.pack.readers import READERS, find_reader
from trainables.data.pack.shard import ShardJob, Unreadable, shard_rows, write_rows
from trainables.errors import DataError, printable
from trainables.rundir import write_atomic, write_json

SHARD_BYTES = 256 * 2**20
SHARD_ROWS = 8192
"""Gives sets of tiny images more than one shard too, since shards are what cores work on in parallel."""
_PROBES = 64


@dataclass(frozen=True)
class PackPlan:
    """Everything that determines the bytes of a packed set."""

    source: Path
    kind: str
    mode: Mode
    classes: tuple[str, ...]
    pixels: bool
    jobs: tuple[ShardJob, ...]
    expected_bytes: int
    fingerprint: str
    """A hash of the arguments, the samples' locations and their labels: equal fingerprints give equal sets."""

    @property
    def num_samples(self) -> int:
        return sum(len(job.split_listing.locations) for job in self.jobs)


def plan_pack(
    source: Path,
    dest: Path,
    mode: Mode,
    check: bool,
    *,
    shard_bytes: int = SHARD_BYTES,
    labels: bool = True,
    val_share: float | None = None,
) -> PackPlan:
    """List the source and cut it into shards of about `shard_bytes`, with equally many samples except in a split's last.

    For `labels` and `val_share`, see LayoutReader. Sizes are estimated from a few samples spread over each split, since a `stat`
    of a million files takes minutes on a network disk.

    Raises DataError if the layout of the source is unknown, or its labels are inconsistent.
    """
    kind = find_reader(source, labels)
    reader = READERS[kind](source, labels, val_share)
    listing = reader.listing()
    pixels = mode.stores_pixels(listing.pixels)
    sha = hashlib.sha256(json.dumps([kind, mode.described(), listing.classes, listing.pixels]).encode())
    jobs: list[ShardJob] = []
    expected = 0
    for split, whole in listing.splits.items():
        locations, labels_N = whole.locations, whole.labels_N
        if not len(locations):
            raise DataError(f"{source}: its {kind} holds no {split} images; give both splits")
        mean = _mean_bytes(reader, source, mode, pixels, locations, split)
        expected += round(mean * len(locations))
        num_shards = math.ceil(len(locations) / max(1, min(SHARD_ROWS, round(shard_bytes / mean))))
        rows = math.ceil(len(locations) / num_shards)
        for number, first in enumerate(range(0, len(locations), rows)):
            part = SplitListing(locations[first : first + rows], labels_N[first : first + rows])
            jobs.append(job := ShardJob(dest, split, number, source, kind, mode, pixels, check, part))
            text = "\n".join(part.locations) if isinstance(part.locations[0], str) else json.dumps(part.locations)
            sha.update(f"{job.file} {check} {len(part.locations)}\n{text}".encode(errors="surrogateescape"))
            sha.update(part.labels_N.tobytes())
    return PackPlan(source, kind, mode, tuple(map(printable, listing.classes)), pixels, tuple(jobs), expected, sha.hexdigest())


def _mean_bytes(
    reader: LayoutReader, source: Path, mode: Mode, pixels: bool, locations: Sequence[Location], split: Split
) -> float:
    """Estimate the mean bytes per packed image from a few samples spread over the split."""
    sizes: list[int] = []
    reasons: list[str] = []
    for name, sample in reader.read(locations[:: -(-len(locations) // _PROBES)]):
        try:
            if isinstance(sample, UnreadableImageError):
                raise sample
            sizes.append(len(mode.apply(sample, pixels).content))
        except UnreadableImageError as error:
            reasons.append(f"{name} ({error})")
    if not sizes:
        raise DataError(
            f"{source}: none of {len(reasons)} sampled {split} images can be decoded, such as {reasons[0]}; give whole images"
        )
    return sum(sizes) / len(sizes)


def write_set(plan: PackPlan, dest: Path, version: str, *, strict: bool) -> Index:
    """Write the rows, the report and finally the index; then delete the files that recorded the progress.

    The report, `unreadable.jsonl`, has a line {"split", "name", "reason"} for each skipped image.

    Raises DataError if a split has no readable image or, with `strict`, if any image is unreadable.
    """
    shards = [(job, job.finished()) for job in plan.jobs]
    unreadable: list[Unreadable] = []
    for job, finished in shards:
        if finished is None:
            raise DataError(f"{dest / job.file} has vanished during packing; run the same command again to rewrite it")
        unreadable += finished[1]
    report = dest / UNREADABLE
    write_atomic(report, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in unreadable).encode())
    if unreadable and strict:
        first = unreadable[0]
        raise DataError(
            f"{plan.source}: {len(unreadable)} unreadable images, such as {first['name']} ({first['reason']}), all in {report}; "
            f"fix them or leave out --strict, then run the same command again; if you remove them, remove {dest} too"
        )
    splits: dict[Split, SplitIndex] = {}
    for split in ("train", "val"):
        files = tuple(finished[0] for job, finished in shards if finished and job.split == split)
        if not any(file.rows for file in files):
            raise DataError(f"{plan.source}: no {split} image can be read; {report} has the reasons")
        rows = write_rows(dest / f"{split}.rows.arrow", [shard_rows(dest / file.file) for file in files])
        splits[split] = SplitIndex(rows=rows, shards=files)
    index = Index(
        image="pixels" if plan.pixels else "file",
        mode=plan.mode.described(),
        source={"kind": plan.kind, "name": printable(plan.source.name), "plan": plan.fingerprint},
        raydistill=version,
        num_unreadable=len(unreadable),
        classes=plan.classes,
        splits=splits,
    )
    write_json(dest / INDEX, index.model_dump(mode="json"))
    shutil.rmtree(dest / UNFINISHED, ignore_errors=True)  # the set is complete; NFS keeps the lock's file while it is open
    return index
