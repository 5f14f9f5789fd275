"""The time that a stage took over all driver sessions that worked on it."""

import itertools
import math
import time
from collections.abc import Sequence

from service.runs.events import Event
from service.runs.outcome import Outcome


def with_session_times(outcome: Outcome, events: Sequence[Event], starts_began_s: Sequence[float] | None = None) -> Outcome:
    """Return the outcome with its times over all sessions of the stage, the last of which ends now.

    These include the worker starts of all sessions, and the shutdown of the last one. `events` are the stage's. In the last
    session workers were started at `starts_began_s` (unix), or when the session began if None. A session that was cut short,
    such as by a kill of its driver, counts until its last event.
    """
    began_s = [event["time_ms"] / 1e3 for event in events if event["kind"] == "stage_begun"]
    now_s = max(time.time(), began_s[-1])  # clocks may be set back, and workers' clocks may be ahead
    recorded = [(event["kind"], min(event["time_ms"] / 1e3, now_s)) for event in events]
    seconds = now_s - began_s[-1]
    for began, next_began in itertools.pairwise(began_s):
        seconds += max((at_s for _, at_s in recorded if began <= at_s < next_began), default=began) - began
    loops_s = [at_s for kind, at_s in recorded if kind in ("start", "resume")]
    starts_s = [
        next((at_s - since_s for at_s in loops_s if since_s <= at_s < next_s), None)  # None if the training loop never began
        for since_s, next_s in itertools.pairwise(
            [*began_s[:-1], *(began_s[-1:] if starts_began_s is None else starts_began_s), math.inf]
        )
    ]
    known_s = [start_s for start_s in starts_s if start_s is not None]
    times = {
        "seconds": seconds,
        "start_s": math.fsum(known_s) if known_s or not starts_s else None,
        "end_s": next((now_s - at_s for kind, at_s in reversed(recorded) if kind == "summary" and at_s >= began_s[-1]), None),
        "ended_s": now_s,
    }
    return outcome.model_copy(update=times)
