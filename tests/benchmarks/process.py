"""Child processes of the benchmarks, and what a process says of itself."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


def peak_rss_mib() -> float:
    """The most memory that this process has held, in MiB.

    Linux: VmHWM. The kernel's `ru_maxrss` would do elsewhere, but here it begins with what the parent held before exec.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def pss_mib() -> float:
    """What this process and its children hold now, in MiB; a page that n processes map counts as 1/n in each (Linux only)."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in (me, *me.children(recursive=True))) / 2**20


def environment(**more: str) -> dict[str, str]:
    """This environment with one compute thread a process and the project's root to import from; no other cluster."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def answer_of(command: list[str], python: str = sys.executable, **more: str) -> dict[str, Any]:
    """The JSON object in the last line that a Python command line prints; its chatter before that is ignored. `more` is put
    into its environment.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run([python, *command], env=environment(**more), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
