"""1: `pytest -m gpu`."""

import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.gpu.contract import Check, Expected, Measured, Piece, Settings
from tests.gpu.work import folder_of

ROOT = Path(__file__).parents[2]
NO_RAY = "No module named 'ray'"


def run_pytest(settings: Settings) -> Measured:
    """The GPU's tests. On a CPU a single file of them, all of which are skipped."""
    report = folder_of(settings, "pytest") / "report.xml"
    where = "tests/trainables/metrics/test_phase_timer.py" if settings.small else "tests/trainables"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts=-q --strict-markers", "-p", "no:cacheprovider"]
    began = time.monotonic()
    subprocess.run([*command, "--continue-on-collection-errors", f"--junitxml={report}", where], cwd=ROOT, check=False)
    return outcomes(report) | {"minutes": (time.monotonic() - began) / 60}


def outcomes(report: Path) -> Measured:
    """How many tests passed, failed and were skipped, and which failed. A file without the Ray that it needs is apart."""
    passed, skipped, no_ray, failed = 0, 0, 0, list[str]()
    for case in ET.parse(report).getroot().iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        if any(NO_RAY in (problem.text or "") for problem in problems):
            no_ray += 1
        elif problems:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {
        "passed": passed,
        "failed": len(failed),
        "skipped": skipped,
        "files without Ray": no_ray,
        "which failed": ", ".join(failed) or "none",
    }


CHECK = Check(
    1,
    "pytest -m gpu",
    (
        Piece(
            "1-pytest",
            run_pytest,
            (
                Expected("failed", "all green: none failed", 0, 0, on_cpu=True),
                Expected("which failed", "which failed: recorded"),
                Expected("passed", "at least 50 have run", low=50),
                Expected("skipped", "skipped for want of a library: recorded"),
                Expected("minutes", "under 4 minutes", high=4, estimate=True),
            ),
            8,
        ),
    ),
)
