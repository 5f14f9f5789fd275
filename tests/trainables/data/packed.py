"""Packed sets for tests."""

from pathlib import Path

from trainables.data.index import Index
from trainables.data.pack.join import write_set
from trainables.data.pack.modes import Mode
from trainables.data.pack.shard import write_shard
from trainables.data.pack.shard_plan import SHARD_BYTES, plan_pack


def pack_here(
    source: Path,
    dest: Path,
    mode: Mode | None = None,
    *,
    check: bool = False,
    strict: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Index:
    """What `distill pack` does, in this process."""
    plan = plan_pack(source, dest, mode or Mode(), check, shard_bytes=shard_bytes)
    for job in plan.jobs:
        write_shard(job)
    return write_set(plan, dest, "0", strict=strict)
