"""Where a step's time goes: its phases, and which part of it each one is."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from trainables.metrics.phases import ALL_PHASES

MIN_SHARE = 0.005  # of a step, below which a phase is not worth its name in a sentence


class PhaseShare(NamedTuple):
    phase: str
    ms: float
    share: float


def phase_shares(metrics: Mapping[str, float]) -> list[PhaseShare]:
    """The phases that are recorded, `phase/data_ms` and so on, in their order."""
    known = {phase: metrics[f"phase/{phase}_ms"] for phase in ALL_PHASES if f"phase/{phase}_ms" in metrics}
    step_ms = metrics.get("phase/step_ms") or sum(known.values()) or math.nan
    return [PhaseShare(phase, ms, ms / step_ms) for phase, ms in known.items()]


def shares_text(metrics: Mapping[str, float]) -> str:
    """The same as words, the longest phase first: `student 45%, teacher 30%, data 25%`."""
    ranked = sorted(phase_shares(metrics), key=lambda one: -one.ms)
    return ", ".join(f"{one.phase} {100 * one.share:.0f}%" for one in ranked if one.share >= MIN_SHARE)
