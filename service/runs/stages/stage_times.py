"""The time that a stage took: of one session, and over all sessions of drivers that worked on it."""

import itertools
import math
import time
from collections.abc import Sequence

from service.runs.events import Event
from service.runs.outcome import Outcome


def accounted(outcome: Outcome, events: Sequence[Event], began_s: float, starts_began_s: Sequence[float]) -> Outcome:
    """The outcome with the time it took since `began_s`, and how much of that was its workers' end and starts.

    `events` are its stage's. The workers' starts began at `starts_began_s`; there are none where the workers were there already.
    All times are unix.
    """
    now_s = max(time.time(), began_s)  # a clock may be set back
    recorded = between(events, began_s, now_s)
    end_s = next((now_s - at_s for kind, at_s in reversed(recorded) if kind == "summary"), None)
    times = {
        "seconds": now_s - began_s,
        "start_s": total_start_s(recorded, starts_began_s),
        "end_s": end_s,
        "ended_s": now_s,
    }
    return outcome.model_copy(update=times)


def accounted_over_sessions(outcome: Outcome, events: Sequence[Event], starts_began_s: Sequence[float] | None = None) -> Outcome:
    """The outcome with the times of all sessions, of which the last one ends now.

    `events` are its stage's. Workers were started at `starts_began_s` (unix) in the last session; None: when it began.
    A session that did not come to the stage's end, as one whose driver was killed, counts to the last event before the next.
    """
    began_s = [event["time_ms"] / 1e3 for event in events if event["kind"] == "stage_begun"]
    starts_began_s = began_s[-1:] if starts_began_s is None else starts_began_s
    outcome = accounted(outcome, events, began_s[-1], starts_began_s)
    seconds = outcome.seconds
    for began, next_began in itertools.pairwise(began_s):
        recorded_s = [at_s for _, at_s in between(events, began, outcome.ended_s) if at_s < next_began]
        seconds += max([*recorded_s, began]) - began  # none: a clock was set back
    start_s = total_start_s(between(events, began_s[0], outcome.ended_s), [*began_s[:-1], *starts_began_s])
    return outcome.model_copy(update={"seconds": seconds, "start_s": start_s})


def between(events: Sequence[Event], began_s: float, now_s: float) -> list[tuple[str, float]]:
    """Kind and unix time of the events that are not older than `began_s`.

    Their times are those of a worker's clock, which may be ahead of the driver's: none of them is later than `now_s`.
    """
    recorded = [(event["kind"], min(event["time_ms"] / 1e3, now_s)) for event in events]
    return [(kind, at_s) for kind, at_s in recorded if at_s >= began_s]


def total_start_s(recorded: Sequence[tuple[str, float]], began_s: Sequence[float]) -> float | None:
    """Seconds of the workers' starts that began at these times, each until their loop began; None where it never did."""
    loops_s = [at_s for kind, at_s in recorded if kind in ("start", "resume")]
    starts_s = [
        next((at_s - since_s for at_s in loops_s if since_s <= at_s < next_s), None)
        for since_s, next_s in itertools.pairwise([*began_s, math.inf])
    ]
    known_s = [start_s for start_s in starts_s if start_s is not None]
    return math.fsum(known_s) if known_s or not starts_s else None
