"""Where the ranks of a running stage are, in `distill report`."""

import re
import time
from pathlib import Path
from typing import Any

from service.report.records import rank_lines, running_stage_lines
from tests.run_log import add, numbers
from tests.service.report.runs import bare_records, typed
from trainables.rundir import RunDir, StageDir, write_json


def write_heartbeats(stage: StageDir, ages_s: list[float]) -> None:
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "at": f"student of step {rank}", "age_s": age_s} for rank, age_s in enumerate(ages_s)
    ]
    write_json(stage.heartbeats, {"version": 1, "time_ms": time.time() * 1e3 - 2000, "ranks": ranks})


def test_a_running_stage_has_the_age_of_its_last_record_and_of_each_ranks_progress(tmp_path: Path) -> None:
    stage = RunDir(tmp_path).stage("student")
    add(RunDir(tmp_path), numbers("step", "student", 7, time_ms=int(time.time() * 1e3) - 40_000))
    write_heartbeats(stage, [0.5, 30.0])
    first, *ranks = running_stage_lines(bare_records(RunDir(tmp_path), typed({"kind": "train"})))
    assert re.fullmatch(r"student: step 7, – images/s, last update 4[0-9] s ago", first)
    assert re.fullmatch(r"  rank 1: student of step 1, last progress 3[2-9] s ago", ranks[0])
    assert re.fullmatch(r"  rank 0: student of step 0, last progress [2-9] s ago", ranks[1])


def test_of_many_ranks_those_are_shown_that_went_on_first(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    write_heartbeats(stage, [float(rank) for rank in range(64)])
    lines = rank_lines(stage)
    assert len(lines) == 9
    assert lines[0].startswith("  rank 63: ")
    assert lines[-1] == "  and 56 ranks with later progress"


def test_without_heartbeats_there_are_no_lines(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    assert rank_lines(stage) == []
    write_json(stage.heartbeats, {"version": 2})
    assert rank_lines(stage) == []
