"""What steps wait for while other programs have the node's cores."""

from __future__ import annotations

from service.doctor.evidence import Evidence
from service.doctor.step_model import Cause, Effect

OFTEN = 0.1
"""Other programs that have less of the cores than this part are not reported."""


def other_programs(e: Evidence) -> Cause | None:
    """Cores that other programs use while steps wait for one. Of that wait, their share of what competes for the cores.

    Where GPUs do the work a step does not wait for a core.
    """
    step_ms = e.typical.step_ms
    if not e.cores or e.others_cpu_ms < OFTEN * e.cores * step_ms:
        return None
    return Cause(
        "busy cores",
        f"every step waits {e.core_wait_ms:.1f} of its {step_ms:.1f} ms for a core, and other programs use "
        f"{100 * e.others_cpu_ms / (e.cores * step_ms):.0f}% of the cores",
        "see what else runs on that node (top), or leave it out",
        Effect(work_ms=e.core_wait_ms * e.others_cpu_ms / e.competing_cpu_ms),
    )
