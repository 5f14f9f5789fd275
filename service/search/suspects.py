"""Points that may only look slow for the time at which they were measured, and what measuring them again may bring."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.search.disturbance import APART_PROBES, MAX_DISTURBED_SHARE, MAX_OCCASIONS, occasions

MEAN_EXCESS = 0.25  # of the logarithm of a disturbed measurement
PERSISTENCE = 0.3  # chance that who disturbed one occasion is there at the next
EQUAL_COST = 0.06  # points that differ by less (logarithm of the cost) are as good


@dataclass(frozen=True, eq=False)
class MeasuredPoint:
    """A point, and the turns of the search at which it was measured."""

    group: tuple[float, int]  # its number of workers, and its kind
    batch: float
    cost: float  # logarithm
    turns: Sequence[int]  # those at which nobody disturbed it
    last_turn: int  # of all
    disturbed_share: float  # of occasions, for its number of workers


def suspects(points: Sequence[MeasuredPoint], ended_s: Sequence[float]) -> list[tuple[int, float]]:
    """Indices of points to measure again, each with the relative gain to expect of it; the largest first.

    `ended_s`: when each turn of the search ended.
    A group are the points of one number of workers and one kind; of each the best point is a suspect. Of points that are as good
    it is the one with the largest batch: it has most to gain where something that all share was slow.
    A group that was never measured at about the time of the best point of all may have lost by its time alone: more suspect.
    What was measured just before, or at several times, is no suspect: it would meet the same conditions, or is well known.
    """
    best = min(points, key=lambda point: point.cost)
    found = []
    for group in dict.fromkeys(point.group for point in points):
        members = [point for point in points if point.group == group]
        if group == best.group:
            members = _measured_at_another_time(members, best, ended_s)
        if not members or best in members:
            continue
        least = min(point.cost for point in members)
        suspect = max(members, key=lambda point: point.batch if point.cost <= least + EQUAL_COST else 0.0)
        witnesses = [suspect] if group == best.group else members
        turns = sorted(turn for point in witnesses for turn in point.turns)
        times = _occasions(turns, ended_s)
        if times < MAX_OCCASIONS and len(ended_s) - suspect.last_turn > APART_PROBES:
            share = suspect.disturbed_share if _are_near(turns, best.turns) else MAX_DISTURBED_SHARE
            chance = share * PERSISTENCE ** (times - 1) if times else 1.0
            gain = chance * MEAN_EXCESS * math.exp(-(suspect.cost - best.cost) / MEAN_EXCESS)
            found.append((points.index(suspect), gain))
    return sorted(found, key=lambda pair: -pair[1])


def _measured_at_another_time(
    members: Sequence[MeasuredPoint], best: MeasuredPoint, ended_s: Sequence[float]
) -> list[MeasuredPoint]:
    """Those of the best point's group that may have lost by their time alone.

    They were measured at another time than the best point, and than all that was also measured at about that one's time.
    """
    witnesses = [turn for point in members if _are_near(point.turns, best.turns) for turn in point.turns]
    apart = [point for point in members if not _are_near(point.turns, witnesses)]
    return [point for point in apart if _occasions(point.turns, ended_s) < MAX_OCCASIONS]


def _occasions(turns: Sequence[int], ended_s: Sequence[float]) -> int:
    return occasions([ended_s[turn] for turn in turns])


def _are_near(turns: Sequence[int], others: Sequence[int]) -> bool:
    """Whether some of them were at about the same time."""
    return any(abs(turn - other) < APART_PROBES for turn in turns for other in others)
