"""Where the ranks of a running stage are, and for how long, by the heartbeats that the watch over its workers writes."""

import json
import time
from typing import Any

from trainables.rundir import StageDir

_SHOWN = 8


def ago(time_ms: float) -> str:
    """`12 s ago`, of a unix time."""
    return f"{max(time.time() - time_ms / 1e3, 0.0):.0f} s ago"


def rank_lines(stage: StageDir) -> list[str]:
    """A line for each rank, the one that has been where it is for longest first; of many ranks only the first of these."""
    try:
        record = json.loads(stage.heartbeats.read_bytes())
        ranks = sorted(record["ranks"], key=lambda rank: rank["age_s"], reverse=True)
        lines = [_line(rank, record["time_ms"]) for rank in ranks[:_SHOWN]]
    except (OSError, ValueError, KeyError, TypeError):  # none so far, or another version's
        return []
    return lines if len(ranks) <= _SHOWN else [*lines, f"  and {len(ranks) - _SHOWN} ranks that went on later"]


def _line(rank: dict[str, Any], time_ms: float) -> str:
    return f"  rank {rank['rank']}: {rank['at']}, went on {ago(time_ms - 1e3 * rank['age_s'])}"
