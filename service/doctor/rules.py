"""What a run loses its time to: one function a cause, from evidence to a finding or none.

Gains follow the project's model of a step (`service/search/formulas.py`): step = max(supply, work), where the wait for data is
supply - work. What is removed from the work shortens the step by itself; what is removed from the supply shortens it down to the
work. In the rules' words T is the step, T' the step predicted, and the gain 100 · (1 - T'/T) percent.
"""

from __future__ import annotations

from service.doctor.computing import launches, teacher
from service.doctor.evidence import LEAST_PCT, Evidence, Finding
from service.doctor.feeding import copy, loading, no_prefetch
from service.doctor.over_time import evaluation, thermal_drift
from service.doctor.ranks import all_reduce, straggler, uneven
from service.doctor.serving import service_waits

RULES = (no_prefetch, loading, copy, straggler, uneven, all_reduce, launches, teacher, service_waits, thermal_drift, evaluation)


def findings(e: Evidence) -> list[Finding]:
    """All that is predicted to gain 5% or more, the most first."""
    found = [finding for rule in RULES if (finding := rule(e)) is not None]
    return sorted((finding for finding in found if finding.gain_pct >= LEAST_PCT), key=lambda finding: -finding.gain_pct)
