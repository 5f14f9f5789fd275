"""What a user sees where there is no Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONNECT = """
import sys
from pathlib import Path
from service.cluster.connect import connect
from trainables.errors import ClusterError
try:
    with connect(1, Path(sys.argv[1])):
        print("there is a Ray")
except ClusterError as error:
    print(error)
"""


@pytest.mark.processes
def test_a_ray_that_cannot_start_here_is_one_line(tmp_path: Path) -> None:
    deep = tmp_path / ("far" * 40)  # sockets lie below it, and their paths have 107 bytes at most
    deep.mkdir()
    # In a process of its own: Ray turns its authentication on for the rest of a process, whether it starts or not.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": str(deep)}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    words = r"Ray does not start on this machine: .*AF_UNIX path length cannot exceed 107 bytes.*\n"
    assert re.fullmatch(words, done.stdout)
