"""`distill cache`: what it writes is all that any training reads."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainables.jobs import train
from tests.trainables.teachers.cache.test_cached_teacher import ran_for, settings
from trainables.config import FillConfig, TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.pipeline.layout import build_layout
from trainables.distributed.rank_pool import RankPool
from trainables.engine.job_parts import open_loaders
from trainables.engine.modules import build_cached_teachers
from trainables.errors import DataError
from trainables.teachers.cache.fill import fill, sequential
from trainables.teachers.cache.store import RowStore
from trainables.teachers.rows import Rows


def fill_alone(group: Group, config: TrainConfig) -> tuple[dict[str, float], list[tuple[str, int]]]:
    reported = list[tuple[str, int]]()

    def report(kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        reported.append((kind, step))

    job = sequential(FillConfig.model_validate(config.model_dump()))
    classes, (loader, val_loader) = open_loaders(job, build_layout(group, 1))
    with contextlib.closing(loader), contextlib.closing(val_loader):
        return fill(job, group, build_cached_teachers(job, group, classes, loader), (loader, val_loader), report), reported


def fill_until_full(group: Group, config: TrainConfig) -> None:
    """The disk is full after the first epoch."""
    write = RowStore.write

    def full(store: RowStore, epoch: int, rows: Rows) -> None:
        if epoch:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(store, epoch, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowStore, "write", full)
        fill_alone(group, config)


def test_every_worker_count_reads_what_two_workers_filled_ahead(tmp_path: Path, ranks: RankPool) -> None:
    filled, reported = ranks.run(2, fill_alone, settings(tmp_path, "fill"))[0]
    assert filled == {"images": 2 * 1442, "missing": 0, "rows": 2 * 1442}
    assert reported[-1] == ("step", 2 * 15)
    dropping: dict[str, Any] = {"data": {"last_batch": "drop", "global_batch_size": 96}}
    assert ran_for(train(Group(), settings(tmp_path, "one", **dropping))) == [0, 0]
    assert ran_for(ranks.run(3, train, settings(tmp_path, "three"))[0]) == [0, 0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_ends_the_filling_and_what_is_written_stays(tmp_path: Path, ranks: RankPool, workers: int) -> None:
    with pytest.raises(DataError, match=r"teacher.cache: .* cannot be written \(No space left on device\): free room"):
        ranks.run(workers, fill_until_full, settings(tmp_path, "fill", epochs=3))
    assert fill_alone(Group(), settings(tmp_path, "fill", epochs=3))[0]["images"] == 2 * 1442


def test_filling_goes_on_where_it_was(tmp_path: Path) -> None:
    train(Group(), settings(tmp_path, "first", epochs=1))
    assert fill_alone(Group(), settings(tmp_path, "fill"))[0]["images"] == 1442
    assert fill_alone(Group(), settings(tmp_path, "fill"))[0]["images"] == 0
    assert ran_for(train(Group(), settings(tmp_path, "second"))) == [0, 0]
