"""The doctor given an experiment: a short timing run on a Ray of its own, which it then reads."""

import pytest

from tests.integration.conftest import Distill, records, result

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_an_experiment_is_probed_and_its_fault_named(distill: Distill) -> None:
    tiny_batch = ("--set", "data.global_batch_size=2", "--set", "train.max_steps=10")
    output = distill.run("doctor", distill.experiment, *tiny_batch, "--measure")
    measured = [line.partition(":")[0] for line in output.splitlines() if line.startswith("measured ")]
    assert measured[:2] == ["measured unchanged, once more", "measured with one batch kept in memory"]
    assert "launch-bound, " in output
    assert "change: --set data.global_batch_size=" in output
    (run,) = distill.runs.iterdir()
    assert run.name.startswith("tiny-doctor-")
    assert result(run)["status"] == "complete"
    summary = records(run, "summary")[0]["metrics"]
    assert {
        "one_image_ms",
        "passes/2_images_ms",
        "phase/cpu_ms",
        "loader/image_ms",
        "loader/read_wait_ms",
        "loader/wait_ms",
    } <= summary.keys()
    again = distill.run("doctor", run)
    assert again.splitlines()[0] in output.splitlines()
