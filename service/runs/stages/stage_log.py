"""The driver's lines in a stage's log, which the display shows."""

from datetime import datetime

from service.runs.stored.stored_runs import run_store
from trainables.redact import redact
from trainables.rundir import StageDir


def append_to_log(stage: StageDir, line: str) -> None:
    """Append a line to the stage's log."""
    path = stage.driver_log if run_store(stage.root) else stage.log
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(f"{datetime.now():%H:%M:%S} {redact(line)}\n")
