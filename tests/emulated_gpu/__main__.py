"""`python -m tests.emulated_gpu [--numbers] COMMAND …`: runs a command and all that it starts on an emulated GPU.

The command `python` is the Python that runs this module.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.emulated_gpu.build import LIBRARY, build, obstacle


def environment(*, numbers: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a process on the emulated GPU."""
    libraries, folder = build(), Path(__file__).parent
    paths = [str(folder / "site"), str(folder.parents[1])]
    return {
        **base,
        "LD_PRELOAD": str(libraries / LIBRARY),
        "LD_LIBRARY_PATH": _joined(str(libraries), base.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(*paths, base.get("PYTHONPATH")),
        "EMULATED_GPU_NUMBERS": "1" if numbers else "",
        "TORCH_DIST_USE_NCCL2": "0",  # whose communicators have calls of their own
    }


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(filter(None, paths))


def main() -> None:
    numbers = sys.argv[1:2] == ["--numbers"]
    command = sys.argv[2:] if numbers else sys.argv[1:]
    reason = obstacle()
    if reason is not None or not command:
        sys.exit(reason or (__doc__ or "").strip())
    if command[0] == "python":
        command[0] = sys.executable
    os.execvpe(command[0], command, environment(numbers=numbers))


if __name__ == "__main__":
    main()
