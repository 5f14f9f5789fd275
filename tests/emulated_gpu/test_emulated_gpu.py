"""The emulated GPU is one as far as torch can tell, and the graphs of a step work on it."""

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
    assert found["eager"]["launches"] <= 200
    assert found["graphed"]["launches"] == 3
    assert found["graphed"]["graph_launches"] == 3
    assert [counts["synchronisations"] for counts in found.values()] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{}, EXPANDABLE_SEGMENTS],
    ids=["segments", "expandable segments"],
)
def test_a_method_that_captures_anew_is_replayed_in_every_epoch(variables: dict[str, str]) -> None:
    found = run("recapture", "crd", **variables)
    assert found["off"] is None
    assert found["captures"] == 2
    assert found["replays"] >= 4
    assert found["difference"] < 1e-5


@pytest.mark.slow
def test_a_synchronisation_in_a_capture_is_an_error() -> None:
    found = run("synchronise_in_capture")
    assert "operation not permitted when stream is capturing" in found["error"]
    assert found["replayable"] == 3


@pytest.mark.processes
def test_no_two_streams_of_a_training_use_the_same_memory_without_an_order() -> None:
    found = run("races")
    assert found["races"] == 0
    assert found["replays"] >= 2 * 4


@pytest.mark.slow
def test_a_step_is_timed_as_it_is_launched_and_as_it_runs() -> None:
    found = run("choice")
    assert found["graphed"] == found["is_launch_bound"]
    assert found["device_s"] > 0
    # In each round the device sleeps for longer than the launches take.
    assert len(found["cycles"]) == 3
    assert min(found["cycles"]) > found["launch_s"] * 2e9


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["batches", "rows", "wait", "release"])
def test_a_wait_between_streams_that_is_left_out_is_found(broken: str) -> None:
    assert run("races", broken)["races"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, EXPANDABLE_SEGMENTS], ids=["segments", "expandable segments"])
def test_memory_beyond_the_limit_is_torchs_own_error(variables: dict[str, str]) -> None:
    found = run("out_of_memory", numbers=False, EMULATED_GPU_MEMORY_GIB="3", **variables)
    assert "CUDA out of memory" in found["message"]
    assert "3.00 GiB" in found["message"]
    assert found["fits"] == 3 * 2**29


@pytest.mark.slow
def test_graphs_are_freed_and_recaptured_where_an_eager_step_would_not_fit_in_memory() -> None:
    found = run("crowded")
    assert found["off"] is None
    assert found["captures"] == 2
    assert found["difference"] < 1e-5


@pytest.mark.slow
def test_two_ranks_on_it_replay_their_steps() -> None:
    assert set(run("workers").values()) == {"ok"}
