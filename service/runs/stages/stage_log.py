"""The driver's lines in a stage's log, which the display shows."""

import logging
from datetime import datetime

from service.runs.stored.stored_runs import run_store
from trainables.redact import redact
from trainables.rundir import StageDir

log = logging.getLogger("raydistill")


def append_to_log(stage: StageDir, line: str) -> None:
    """Append a line to the stage's log. A disk that does not take it, as the one that failed the stage, ends nothing."""
    path = stage.driver_log if run_store(stage.root) else stage.log
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%H:%M:%S} {redact(line)}\n")
    except OSError as error:
        log.warning("%s (not in %s: %s)", redact(line), path, error.strerror)
