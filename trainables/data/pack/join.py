"""The end of a packing: finished shards become a packed set under one index."""

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np

from trainables.data.index import INDEX, UNFINISHED, UNREADABLE, File, Index, SplitIndex
from trainables.data.pack.shard import Unreadable, shard_rows, write_rows
from trainables.data.pack.shard_plan import PackPlan
from trainables.errors import DataError, printable
from trainables.rundir import write_atomic, write_json


def write_set(plan: PackPlan, dest: Path, version: str, *, strict: bool) -> Index:
    """Write rows, report and, last of all, the index; then forget how they came about.

    The report, `unreadable.jsonl`, has a line {"split", "name", "reason"} for each image that was left out.

    Raises DataError where a split has no readable image; or, if `strict`, where one image is not readable.
    """
    files: dict[str, list[File]] = {"train": [], "val": []}
    rows: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    unreadable: list[Unreadable] = []
    num_tiled = 0
    for job in plan.jobs:
        finished = job.finished()
        if finished is None:
            raise DataError(f"{dest / job.file} has vanished while it was packed; the same command once more writes it again")
        files[job.split].append(finished[0])
        unreadable += finished[1]
        num_tiled += finished[2]
        rows[job.split].append(shard_rows(dest / job.file))
    report = dest / UNREADABLE
    write_atomic(report, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in unreadable).encode())
    if unreadable and strict:
        first = unreadable[0]
        raise DataError(
            f"{plan.source}: {len(unreadable)} unreadable images, such as {first['name']} ({first['reason']}), all in {report}; "
            f"fix them or leave out --strict, and the same command goes on; if you remove them, remove {dest} too"
        )
    splits: dict[Literal["train", "val"], SplitIndex] = {}
    for split in ("train", "val"):
        if not any(file.rows for file in files[split]):
            raise DataError(f"{plan.source}: not one {split} image can be read; their reasons are in {report}")
        table = write_rows(dest / f"{split}.rows.arrow", rows[split])
        splits[split] = SplitIndex(rows=table, shards=tuple(files[split]))
    index = Index(
        image="pixels" if plan.pixels else "file",
        mode=plan.mode.described() | ({"tiles": num_tiled} if plan.mode.tiles else {}),
        source={"kind": plan.kind, "name": printable(plan.source.name), "plan": plan.fingerprint},
        raydistill=version,
        num_unreadable=len(unreadable),
        classes=plan.classes,
        splits=splits,
    )
    write_json(dest / INDEX, index.model_dump(mode="json"))
    shutil.rmtree(dest / UNFINISHED, ignore_errors=True)  # the set is complete; NFS keeps the lock's file while it is open
    return index
