"""The time that a stage took: of one session, and over all sessions of drivers that worked on it."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence

from service.runs.outcome import Outcome
from trainables.rundir import StageDir, append_line, read_lines


@contextlib.contextmanager
def stage_session(stage: StageDir) -> Iterator[None]:
    """Note that this driver works on a stage, for `accounted_over_sessions`."""
    append_line(stage.sessions, {"began_s": time.time()})
    try:
        yield
    finally:
        end_session(stage)


def end_session(stage: StageDir, since_s: float = 0.0) -> None:
    """Note that the work on a stage ends, if its last session began at `since_s` (unix) or later.

    Of a session that is killed nothing says when it ended.
    """
    with contextlib.suppress(OSError):  # as of a full disk: what ended the work matters more
        for session in read_lines(stage.sessions)[-1:]:
            if session["began_s"] >= since_s:
                append_line(stage.sessions, session | {"ended_s": time.time()})


def accounted(outcome: Outcome, stage: StageDir, began_s: float, starts_began_s: Sequence[float]) -> Outcome:
    """The outcome with the time it took since `began_s`, and how much of that was its workers' end and starts.

    These began at `starts_began_s`; there are none where the workers were there already. All times are unix.
    """
    now_s = max(time.time(), began_s)  # a clock may be set back
    records = records_between(stage, began_s, now_s)
    end_s = next((now_s - at_s for kind, at_s in reversed(records) if kind == "summary"), None)
    times = {
        "seconds": now_s - began_s,
        "start_s": total_start_s(records, starts_began_s),
        "end_s": end_s,
        "ended_s": now_s,
    }
    return outcome.model_copy(update=times)


def accounted_over_sessions(outcome: Outcome, stage: StageDir) -> Outcome:
    """The outcome with the times of all sessions, of which the last one ends now.

    A session whose driver was killed counts to its last record.
    """
    ends_s = {line["began_s"]: line.get("ended_s") for line in read_lines(stage.sessions)}
    began_s = list(ends_s)
    outcome = accounted(outcome, stage, began_s[-1], began_s[-1:])
    seconds = outcome.seconds
    for began, next_began in itertools.pairwise(began_s):
        records = [(kind, at_s) for kind, at_s in records_between(stage, began, outcome.ended_s) if at_s < next_began]
        last_s = records[-1][1] if records else began
        seconds += max(ends_s[began] or last_s, began) - began
    start_s = total_start_s(records_between(stage, began_s[0], outcome.ended_s), began_s)
    return outcome.model_copy(update={"seconds": seconds, "start_s": start_s})


def records_between(stage: StageDir, began_s: float, now_s: float) -> list[tuple[str, float]]:
    """Kind and unix time of the stage's records that are not older than `began_s`.

    Their times are those of a worker's clock, which may be ahead of the driver's: none of them is later than `now_s`.
    """
    records = [(record["kind"], min(record["time_ms"] / 1e3, now_s)) for record in read_lines(stage.metrics)]
    return [(kind, at_s) for kind, at_s in records if at_s >= began_s]


def total_start_s(records: Sequence[tuple[str, float]], began_s: Sequence[float]) -> float | None:
    """Seconds of the workers' starts that began at these times, each until their loop began; None where it never did."""
    loops_s = [at_s for kind, at_s in records if kind in ("start", "resume")]
    starts_s = [
        next((at_s - since_s for at_s in loops_s if since_s <= at_s < next_s), None)
        for since_s, next_s in itertools.pairwise([*began_s, math.inf])
    ]
    known_s = [start_s for start_s in starts_s if start_s is not None]
    return math.fsum(known_s) if known_s or not starts_s else None
