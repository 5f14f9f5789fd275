"""Which samples go into which shard: decided before the first is written, by the source and the mode alone."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.data.decode import UnreadableImageError
from trainables.data.order import Split
from trainables.data.pack.layout_reader import Listing, SplitListing
from trainables.data.pack.modes import Mode
from trainables.data.pack.readers import READERS, find_reader
from trainables.data.pack.shard import ShardJob
from trainables.errors import DataError, printable

SHARD_BYTES = 256 * 2**20
SHARD_ROWS = 8192
"""Sets of tiny images have more than one shard too: what cores share is shards."""
_PROBES = 64


@dataclass(frozen=True)
class PackPlan:
    """Everything that a packed set depends on, byte by byte."""

    source: Path
    kind: str
    mode: Mode
    classes: tuple[str, ...]
    pixels: bool
    jobs: tuple[ShardJob, ...]
    expected_bytes: int
    fingerprint: str
    """Of the arguments, the samples' locations and their labels: two plans with the same make the same set."""

    @property
    def num_samples(self) -> int:
        return sum(len(job.split_listing.locations) for job in self.jobs)


def plan_pack(source: Path, dest: Path, mode: Mode, check: bool, *, shard_bytes: int = SHARD_BYTES) -> PackPlan:
    """List the source and cut it into shards of about `shard_bytes`, with the same number of samples but a split's last.

    Sizes are estimated from a few samples spread over each split: to ask a million files for theirs takes minutes on a network.

    Raises DataError where the source is of no known layout, or its labels do not agree.
    """
    kind = find_reader(source)
    listing = READERS[kind](source).listing()
    classes = tuple(map(printable, listing.classes))
    pixels = mode.stores_pixels(listing.pixels)
    jobs: list[ShardJob] = []
    expected = 0
    for split in ("train", "val"):
        split_listing = listing.splits[split]
        if not len(split_listing.locations):
            raise DataError(f"{source}: its {kind} holds no {split} images; give both splits")
        mean = _mean_bytes(source, kind, mode, pixels, split_listing, split)
        expected += round(mean * len(split_listing.locations))
        num_shards = math.ceil(len(split_listing.locations) / max(1, min(SHARD_ROWS, round(shard_bytes / mean))))
        rows = math.ceil(len(split_listing.locations) / num_shards)
        for number, first in enumerate(range(0, len(split_listing.locations), rows)):
            part = SplitListing(split_listing.locations[first : first + rows], split_listing.labels_N[first : first + rows])
            jobs.append(ShardJob(dest, split, number, source, kind, mode, pixels, check, part))
    fingerprint = _fingerprint(kind, mode, listing, jobs)
    return PackPlan(source, kind, mode, classes, pixels, tuple(jobs), expected, fingerprint)


def _mean_bytes(source: Path, kind: str, mode: Mode, pixels: bool, split_listing: SplitListing, split: Split) -> float:
    """Mean bytes of a packed image, from a few that are spread over the split."""
    probes = split_listing.locations[:: -(-len(split_listing.locations) // _PROBES)]
    sizes: list[int] = []
    reasons: list[str] = []
    for name, sample in READERS[kind](source).read(probes):
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


def _fingerprint(kind: str, mode: Mode, listing: Listing, jobs: list[ShardJob]) -> str:
    """A hash over what the shards are made of."""
    sha = hashlib.sha256(json.dumps([kind, mode.described(), listing.classes, listing.pixels]).encode())
    for job in jobs:
        sha.update(f"{job.file} {job.check} {len(job.split_listing.locations)}\n".encode())
        sha.update(_locations_text(job.split_listing.locations))
        sha.update(job.split_listing.labels_N.tobytes())
    return sha.hexdigest()


def _locations_text(locations: Any) -> bytes:
    text = "\n".join(locations) if isinstance(locations[0], str) else json.dumps(locations)
    return text.encode(errors="surrogateescape")
