"""Log lines that are written with the next one, as on a GPU, say what they say at once."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainables.jobs import Recorded, config, no_telemetry, with_noise_scale
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, run_job
from trainables.errors import TrainingError

SETTINGS: dict[str, Any] = {"optim": {"epochs": 2, "lr": 0.05}, "train": {"log_every": 2, "checkpoint_every": 5}}


def steps_of(group: Group, settings: TrainConfig, late: bool) -> list[tuple[int, dict[str, float]]]:
    """The records of steps, without times."""
    report = Recorded()
    with contextlib.closing(build(with_noise_scale(settings), group, report, no_telemetry)) as job:
        job.writes_log_late = late
        run_job(job)
    timed = ("_ms", "images_per_s", "data_pct")
    return [
        (step, {name: value for name, value in values.items() if not name.endswith(timed)})
        for kind, step, values in report.calls
        if kind == "step"
    ]


def test_late_lines_say_of_each_step_what_lines_at_once_say(ranks: RankPool, tmp_path: Path) -> None:
    at_once, late = (ranks.run(2, steps_of, config(tmp_path / str(late), **SETTINGS), late) for late in (False, True))
    assert late == at_once
    assert len(late[0]) > 15


def diverge(group: Group, settings: TrainConfig) -> list[int]:
    """Rank 1's parameters are spoiled in the third step. The steps that were recorded before the error."""
    report = Recorded()
    with contextlib.closing(build(settings, group, report, no_telemetry)) as job:
        job.writes_log_late, train_step = True, job.train_step

        def spoiled(*arguments: Any) -> None:
            train_step(*arguments)
            if job.progress.step == 2 and group.rank == 1:
                with torch.no_grad():
                    next(iter(job.student.parameters())).add_(1.0)

        job.train_step = spoiled
        with pytest.raises(TrainingError, match=r"^step 4: the parameters of rank 1 differ from rank 0's"):
            run_job(job)
    return [step for kind, step, _ in report.calls if kind == "step"]


def test_a_late_line_still_ends_all_ranks_at_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, diverge, config(tmp_path, **SETTINGS)) == [[2], [2]]
