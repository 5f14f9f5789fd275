"""A process ends with its exit code, after Python's handlers and without those of libraries."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
from trainables.process_exit import skip_exit_handlers
if {skips}:
    skip_exit_handlers()
    skip_exit_handlers()
atexit.register(print, "the handler of Python")
{end}
"""


def ended(skips: bool, end: str) -> tuple[int, str]:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(skips=skips, end=end)], capture_output=True, text=True, check=False
    )
    return process.returncode, process.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's on_exit")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(7)", 7), ("raise ValueError", 1)])
def test_a_process_ends_with_its_code_and_skips_the_handlers_of_libraries(end: str, code: int) -> None:
    assert ended(True, end) == (code, "the handler of Python")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's on_exit")
def test_without_it_a_handler_of_a_library_runs() -> None:
    assert ended(False, "sys.exit(7)")[0] == -6
