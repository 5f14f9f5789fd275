"""`distill pack`: plan, write shards on all cores or a Ray cluster, write the index, verify. Resumes after a kill."""

import contextlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from service.cluster.parallel_map import bar, parallel_map
from trainables.data.index import INDEX, UNFINISHED, UNREADABLE, Index, check_file, read_index
from trainables.data.pack.modes import Mode
from trainables.data.pack.shard import write_shard
from trainables.data.pack.shard_plan import SHARD_BYTES, PackPlan, plan_pack, write_set
from trainables.data.source import refuse_single_class
from trainables.errors import DataError, printable
from trainables.locks import locked_or_raise
from trainables.rundir import expand_home, write_json

_MAX_REASONS = 6


@dataclass(frozen=True)
class Packing:
    """The outcome of one command."""

    index: Index
    num_written: int
    """Number of shards that this command wrote; the others existed before."""
    seconds: float


def pack(
    source: Path,
    dest: Path,
    mode: Mode,
    *,
    check: bool,
    strict: bool,
    processes: int,
    shard_bytes: int = SHARD_BYTES,
    labels: bool = True,
    val_share: float | None = None,
) -> Packing:
    """Pack `source` into the folder `dest`, or resume packing. The result does not depend on `processes`.

    Raises:
        DataError: see `plan_pack`, `refuse_single_class` and `write_set`; a disk or a network fails; `dest` holds something
            else, another command is working on it, or its disk is too small.
        ClusterError: the cluster of RAY_ADDRESS does not answer, or does not share `dest`.
    """
    began = time.monotonic()
    source, dest = expand_home(source).resolve(), expand_home(dest).resolve()
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file; give a folder for the packed set")
    unfinished = dest / UNFINISHED
    if dest.is_dir() and not (dest / INDEX).exists() and not unfinished.exists() and any(dest.iterdir()):
        raise DataError(f"{dest} holds other things than a packed set; give a new folder")
    with errors_as_data_error(source, dest):
        plan = plan_pack(source, dest, mode, check, shard_bytes=shard_bytes, labels=labels, val_share=val_share)
        refuse_single_class(plan.classes, str(source))
        if (dest / INDEX).exists():
            index = read_index(dest)
            _refuse_other(dest, plan, index.source.get("plan"), "a set packed")
            if strict and index.num_unreadable:
                raise DataError(
                    f"{dest} is finished without {index.num_unreadable} unreadable images, all in {dest / UNREADABLE}; "
                    "fix or remove them and pack into another folder, or leave out --strict"
                )
            verify(dest, index, processes)
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a kill right after the index was written
            return Packing(index, 0, time.monotonic() - began)
        unfinished.mkdir(parents=True, exist_ok=True)
        busy = DataError(f"{dest}: another `distill pack` is working on it; wait until it ends")
        with locked_or_raise(unfinished / "lock", busy):
            try:
                packed = json.loads((unfinished / "plan.json").read_bytes())["plan"]
            except (OSError, ValueError, KeyError):
                packed = plan.fingerprint
                write_json(unfinished / "plan.json", {"plan": packed, "source": str(source), "mode": str(mode)})
            _refuse_other(dest, plan, packed, "an unfinished set")
            for torn in dest.glob(".*.tmp"):  # partial files of a killed process
                torn.unlink(missing_ok=True)
            missing = [job for job in plan.jobs if not job.is_whole()]
            num_missing = sum(len(job.split_listing.locations) for job in missing)
            needed, free = plan.expected_bytes * num_missing // plan.num_samples, shutil.disk_usage(dest).free
            if needed > free:
                has = f"its disk has {free >> 20:,} MiB free"
                raise DataError(f"{dest}: about {needed >> 20:,} MiB are still to be written, and {has}")
            with bar("packing", "images", plan.num_samples) as advance:
                advance(plan.num_samples - num_missing)
                for count in parallel_map(write_shard, [(job,) for job in missing], processes, dest):
                    advance(count)
            index = write_set(plan, dest, version("raydistill"), strict=strict)
        verify(dest, index, processes)
        return Packing(index, len(missing), time.monotonic() - began)


@contextlib.contextmanager
def errors_as_data_error(source: Path, dest: Path) -> Iterator[None]:
    """Turn disk and network errors into a one-line DataError. Finished shards are not lost."""
    try:
        yield
    except OSError as error:
        where = error.filename or f"packing {source} into {dest}"
        raise DataError(f"{where}: {error.strerror or error}; fix that, then repeat the command to continue") from None


def verify(dest: Path, index: Index, threads: int) -> None:
    """Verify the checksums of all files. Raises DataError: what is wrong with the first file, and how many are wrong."""
    files = index.files()
    with bar("verifying", "files", len(files)) as advance:
        wrong = []
        # Threads are enough, as reading and hashing release the GIL.
        with ThreadPoolExecutor(threads) as pool:
            for fault in pool.map(partial(check_file, dest), files):
                advance(1)
                wrong += [fault] if fault else []
    if wrong:
        more = f", and {len(wrong) - 1} more of {len(files)} files" if len(wrong) > 1 else ""
        raise DataError(f"{wrong[0]}{more}: copy the set again, or remove it and pack it again")


def _refuse_other(dest: Path, plan: PackPlan, fingerprint: object, what: str) -> None:
    if fingerprint != plan.fingerprint:
        raise DataError(
            f"{dest} holds {what} from other images or in another mode than {plan.source} {plan.mode}; "
            "give another folder, or remove it"
        )


def summary_line(dest: Path, packing: Packing) -> str:
    """Describe a packing in one line."""
    index, where = packing.index, printable(str(dest))
    counts = ", ".join(f"{split.rows.rows:,} {name}" for name, split in index.splits.items())
    mib = sum(file.bytes for file in index.files()) / 2**20
    shards = sum(len(split.shards) for split in index.splits.values())
    left_out = ""
    if index.num_unreadable:
        lines = (dest / UNREADABLE).read_text(encoding="utf-8").splitlines() if (dest / UNREADABLE).exists() else []
        # "truncated or damaged: broken data stream" and the like are one reason; what to do follows a semicolon
        reasons = Counter(re.split("[:;]", json.loads(line)["reason"])[0] for line in lines).most_common(_MAX_REASONS)
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons)
        left_out = f"; {index.num_unreadable} unreadable images left out ({listed}), listed in {where}/{UNREADABLE}"
    of_classes = f"of {len(index.classes)} classes" if index.classes else "without labels"
    return (
        f"{where}: {counts} images {of_classes} in {shards} shards ({packing.num_written} written now), "
        f"{mib:,.0f} MiB, verified, {packing.seconds:.1f} s{left_out}"
    )
