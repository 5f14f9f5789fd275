"""Hangs of a stage: recorded as they happen, and read for reports and MLflow."""

import time
from collections.abc import Iterable
from datetime import datetime

from trainables.failures import Failure
from trainables.redact import redact
from trainables.rundir import StageDir, append_line, read_lines


def record_hang(stage: StageDir, failure: Failure, stacks: str) -> None:
    """Write a hang to the stage's `hangs.jsonl`, and what all threads were doing to `logs/hangs.txt`. Raises OSError."""
    append_line(stage.hangs, {"time_ms": time.time_ns() // 1_000_000, "message": redact(str(failure))})
    stage.stacks.parent.mkdir(parents=True, exist_ok=True)
    with open(stage.stacks, "a", encoding="utf-8") as file:
        file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {redact(stacks)}\n\n")


def hang_lines(stages: Iterable[tuple[str, StageDir]]) -> list[str]:
    """A line for each hang of the named stages."""
    return [
        f"{name} hung at {datetime.fromtimestamp(record['time_ms'] / 1e3):%Y-%m-%d %H:%M:%S}: {record['message']}"
        for name, stage in stages
        for record in read_lines(stage.hangs)
        if record.keys() >= {"time_ms", "message"}
    ]


def hang_tags(stage: StageDir) -> dict[str, str]:
    """The latest hang as a tag of MLflow; none where there was none."""
    records = read_lines(stage.hangs)
    return {"hang": str(records[-1].get("message"))} if records else {}
