"""When `teacher.service` pays, and when not: compared with a teacher in each worker, and with `teacher.cache`.

A step of a worker is t of the teacher and s of all else; k students run side by side on n workers each, all with the same images,
and m more GPUs (without GPUs: cores) are free for a service. Each image is then computed once for all k, so that a step takes
B = max(s, n·t/m). As workers that lose nothing the m would give steps of A = (s + t)·k·n/(k·n + m).

The service pays where B < A: for k·n·t/(k·s + (k-1)·t) < m < k·n·t/s. With fewer actors all students wait, with more it is they
that idle. For k = 1 it never does: A = (n·s + m·(n·t/m))/(n + m) is a mean of s and n·t/m, of which B is the larger. One student
alone does better with one GPU more as a worker, but where another worker does not help it: a batch too small to part, a network
too slow, or GPUs whose memory is too small for teacher and student together.

A cache costs no GPU, and what is in it is never computed again: it is better where images repeat, and for trials and runs that
come later. While it is filled it does nothing for students side by side.
"""

import math

from service.doctor.evidence import Evidence
from service.doctor.step_model import Cause, Effect


def hiding(teacher_ms: float, rest_ms: float, workers: int) -> int:
    """m₀ = ⌈n·t/s⌉: the fewest actors that compute as fast as one student's n workers take steps of `rest_ms`."""
    return max(1, math.ceil(workers * teacher_ms / max(rest_ms, 1e-9) - 1e-9))


def served_ms(teacher_ms: float, rest_ms: float, workers: int, actors: int) -> float:
    """B = max(s, n·t/m): a step of students who share so many actors."""
    return max(rest_ms, workers * teacher_ms / actors)


def least_students(teacher_ms: float, rest_ms: float, workers: int, actors: int) -> int:
    """From how many students side by side on the service pays: the least k with B < A.

    B·(k·n + m) < (s + t)·k·n, hence k > B·m/(n·(s + t - B)); there is always one, since m₀ actors have B = s < s + t.
    """
    served = served_ms(teacher_ms, rest_ms, workers, actors)
    return math.floor(served * actors / (workers * (rest_ms + teacher_ms - served)) + 1e-9) + 1


def advice(e: Evidence) -> str:
    """A sentence on a service, for where the teacher of each worker takes longer than its student."""
    step = e.typical
    rest_ms = max(step.step_ms - step.teacher_ms, 1e-9)
    actors = hiding(step.teacher_ms, rest_ms, e.num_workers)
    least = least_students(step.teacher_ms, rest_ms, e.num_workers, actors)
    of = "GPU" if e.on_gpu else "core"
    those = f"{actors} {of}s that compute" if actors > 1 else f"one {of} that computes"
    it, workers = ("them", "workers") if actors > 1 else ("it", "a worker")
    return (
        f"with {least} or more students side by side (sweep.max_concurrent), {those} the teacher once for all of them "
        f"(--set teacher.service={actors}); one student alone gains more from {it} as {workers}"
    )


def service_bound(e: Evidence) -> Cause | None:
    """Steps that wait for `teacher.service`: it is busy all the time, and m actors need m·T for a step's requests.

    Without the wait w a step takes s = T - w, which m' = ⌈m·T/s⌉ actors would allow: T' = max(s, m·T/m'). Nothing where none is.
    """
    step = e.typical
    if e.teacher_actors is None or not step.teacher_ms:
        return None
    rest_ms = max(step.step_ms - step.teacher_ms, 1e-9)
    work_ms = e.teacher_actors * step.step_ms
    actors = hiding(work_ms, rest_ms, 1)
    return Cause(
        "service-bound",
        f"a step waits {step.teacher_ms:.1f} of its {step.step_ms:.1f} ms for the teacher's service",
        f"--set teacher.service={actors}; or, where images repeat or runs follow, cache its outputs (--set teacher.cache=FOLDER "
        "instead)",
        Effect(work_ms=step.step_ms - served_ms(work_ms, rest_ms, 1, actors)),
    )
