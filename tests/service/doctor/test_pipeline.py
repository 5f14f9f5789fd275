"""What the doctor says of pipeline stages that wait for each other."""

from dataclasses import replace

import pytest

from service.doctor.causes import findings
from service.doctor.evidence import Evidence
from service.doctor.recorded import RankTimes
from tests.service.doctor.runs import RANK, run_of


def stage(work_ms: float, bubble_ms: float) -> RankTimes:
    """A stage without a teacher; the step takes what it works and waits."""
    backward_ms = 2 * (work_ms - 4.0) / 3
    times = {"teacher_ms": 0.0, "student_ms": backward_ms / 2, "backward_ms": backward_ms, "bubble_ms": bubble_ms}
    return replace(RANK, **times, step_ms=work_ms + bubble_ms, loader_batch_ms=None, loader_wait_ms=None)


def run_in_stages(*ranks: RankTimes, micro_batches: int = 4) -> Evidence:
    return run_of(*ranks, passes_ms={}, one_image_ms=None, pipeline_stages=2, micro_batches=micro_batches)


def test_a_bubble_is_named_with_what_twice_the_micro_batches_would_gain() -> None:
    (finding,) = findings(run_in_stages(stage(80.0, 20.0), stage(80.0, 20.0)))
    assert finding.cause == "pipeline bubble"
    assert "at least 20.0 of a step's 100.0 ms" in finding.sentence
    assert "--set scale.micro_batches=8" in finding.change
    assert finding.gain_pct == pytest.approx(20 / 2, abs=0.5)


def test_what_a_later_stage_waits_for_the_next_batch_is_of_the_bubble_and_no_wait_for_images() -> None:
    later = replace(stage(80.0, 8.0), data_ms=0.0, receive_ms=12.0 + RANK.data_ms, step_ms=100.0)
    evidence = run_in_stages(stage(80.0, 20.0), later)
    (finding,) = findings(evidence)
    assert finding.cause == "pipeline bubble"
    assert "at least 20.0 of a step's 100.0 ms" in finding.sentence
    assert evidence.typical.data_ms == RANK.data_ms
    assert later.rest_ms == stage(80.0, 20.0).rest_ms


def test_stages_of_uneven_work_are_told_apart_and_none_is_a_straggler() -> None:
    found = {finding.cause: finding for finding in findings(run_in_stages(stage(95.0, 5.0), stage(45.0, 55.0)))}
    assert set(found) == {"uneven pipeline stages"}
    assert "stage 0 computes 94.0 ms of a step, the mean stage 69.0" in found["uneven pipeline stages"].sentence
    assert found["uneven pipeline stages"].gain_pct == pytest.approx(25, abs=1)


def test_micro_batches_of_one_image_are_not_divided_further() -> None:
    waiting = (stage(80.0, 20.0), stage(80.0, 20.0))
    assert not findings(run_in_stages(*waiting, micro_batches=128))
    assert not findings(replace(run_in_stages(*waiting, micro_batches=33), accumulate=2)), "2 * 33 * 2 are more than 128 images"
    assert findings(replace(run_in_stages(*waiting, micro_batches=32), accumulate=2))
