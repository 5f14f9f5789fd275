"""The emulated GPU is one as far as torch can tell, and a training runs on it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.emulated_gpu.__main__ import environment
from tests.emulated_gpu.build import obstacle

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=f"no emulated GPU: {obstacle()}")
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""As workers have it."""


def run(job: str, *arguments: str, numbers: bool = True, **variables: str) -> dict[str, Any]:
    """The findings of a job of `tests.emulated_gpu.jobs` in a process of its own."""
    command = [sys.executable, "-m", "tests.emulated_gpu.jobs", job, *arguments]
    variables = environment(numbers=numbers, base=os.environ | variables)
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.processes
def test_a_training_on_it_gives_the_numbers_of_the_cpu() -> None:
    assert run("same_as_on_cpu")["difference"] < 1e-5


@pytest.mark.processes
def test_a_step_launches_what_was_counted_and_never_synchronises() -> None:
    found = run("counts_of_a_step", numbers=False)
    assert found["launches"] <= 200
    assert found["synchronisations"] == 0


@pytest.mark.processes
def test_a_log_line_waits_for_nothing_but_the_line_before_it() -> None:
    assert run("waits_of_log_lines", numbers=False)["waits"] == [0, 1]


@pytest.mark.processes
@pytest.mark.slow
def test_no_two_streams_of_a_training_use_the_same_memory_without_an_order() -> None:
    found = run("races")
    assert found["races"] == 0
    assert found["steps"] >= 2 * 8


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["batches", "rows"])
def test_a_wait_between_streams_that_is_left_out_is_found(broken: str) -> None:
    assert run("races", broken)["races"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, EXPANDABLE_SEGMENTS], ids=["segments", "expandable segments"])
def test_memory_beyond_the_limit_is_torchs_own_error(variables: dict[str, str]) -> None:
    found = run("out_of_memory", numbers=False, EMULATED_GPU_MEMORY_GIB="3", **variables)
    assert "CUDA out of memory" in found["message"]
    assert "3.00 GiB" in found["message"]
    assert found["fits"] == 3 * 2**29
