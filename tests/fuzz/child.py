"""`python -m tests.fuzz.child SUBJECT SEED FIRST LAST`: tries inputs and writes a line of JSON about each.

In a process of its own, so that a crash, a hang or memory without end is seen and not suffered.
"""

import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.images import Images, Largest
from tests.fuzz.shards import Shards
from tests.fuzz.subject import Subject, outcome, reason

MAX_S = {"images": 4.0, "largest": 10.0, "shards": 2.0}
"""For one call: one view of an image, or one split of a packed set. The largest images are whole, and take what PIL takes."""
MAX_MIB = {"images": 3600, "largest": 3600, "shards": 64}
"""Memory that a call may take, above what the process had before."""
SUBJECTS: dict[str, Callable[[int, Path], Subject]] = {
    "images": lambda seed, folder: Images(seed),
    "largest": lambda seed, folder: Largest(seed),
    "shards": Shards,
}
_ROOM_MIB = 8192  # of addresses: what would take more is refused it, and the machine lives


def main() -> None:
    name, seed, first, last = sys.argv[1], *map(int, sys.argv[2:])
    warnings.simplefilter("ignore")  # PIL's about damaged files
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        subject = SUBJECTS[name](seed, Path(folder))
        limit = (_status("VmSize") + _ROOM_MIB) << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for index in range(first, last):
            print(json.dumps(_try(subject, index, MAX_S[name], MAX_MIB[name])), flush=True)


def _try(subject: Subject, index: int, max_s: float, max_mib: int) -> dict[str, object]:
    given, found = subject.make(index), Counter[str]()
    slowest_s, peak_mib, wrong, num_calls = 0.0, 0, None, 0
    for call in subject.calls(given):
        (lines, problem), took_s, mib = _measured(call)
        if took_s > max_s:  # or the machine had something else to do
            took_s = min(took_s, _measured(call)[1])
        if took_s > max_s:
            problem = problem or f"{took_s:.1f} s"
        if mib > max_mib:
            problem = problem or f"{mib} MiB"
        num_calls += 1
        slowest_s, peak_mib, wrong = max(slowest_s, took_s), max(peak_mib, mib), wrong or problem
        found.update(reason(line) if line else "" for line in lines)
    return {
        "index": index,
        "kind": given.kind,
        "calls": num_calls,
        "found": found,
        "slowest_s": slowest_s,
        "peak_mib": peak_mib,
        "wrong": wrong,
    }


def _measured(call: Callable[[], list[str]]) -> tuple[tuple[list[str], str | None], float, int]:
    """Outcome, seconds, and the most MiB that the process took above what it has now."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before_mib, began_s = _status("VmRSS"), time.perf_counter()
    result = outcome(call)
    return result, time.perf_counter() - began_s, _status("VmHWM") - before_mib


def _status(field: str) -> int:
    """A line of /proc/self/status, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) >> 10


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries' threads have nothing to tidy
