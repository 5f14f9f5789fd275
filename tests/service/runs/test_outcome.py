"""Several measurements as one outcome."""

import pytest

from service.runs.outcome import Outcome, combined
from service.runs.result import TrialRow
from service.runs.run_log import as_json

FAST = {"step_s": 0.1, "images_per_s": 1000.0, "phase/data_min_ms": 1.0, "phase/data_max_ms": 5.0, "peak_memory_mib": 900.0}
SLOW = {"step_s": 0.2, "images_per_s": 500.0, "phase/data_min_ms": 2.0, "phase/data_max_ms": 9.0, "peak_memory_mib": 800.0}


def measured(metrics: dict[str, float], steps: int, seconds: float, start_s: float | None) -> Outcome:
    step_s = metrics["step_s"]
    return Outcome(status="ok", metrics=metrics, steps_s=[step_s] * steps, seconds=seconds, start_s=start_s, ended_s=seconds)


def test_one_measurement_is_the_outcome() -> None:
    one = measured(FAST, 10, 30.0, 25.0)
    assert combined([one]) == one
    assert one.each_measurement == [one]


def test_the_precision_is_that_of_the_last_measurement_that_ran() -> None:
    ran = measured(FAST, 10, 30.0, 25.0).model_copy(update={"precision": "bf16", "precision_reason": "images of 224 px"})
    whole = combined([ran, Outcome(status="oom", reason="its memory ran out")])
    assert (whole.precision, whole.precision_reason) == ("bf16", "images of 224 px")


def test_speeds_are_all_images_over_all_seconds_and_times_means_over_all_steps() -> None:
    whole = combined([measured(FAST, 30, 30.0, 25.0), measured(SLOW, 10, 5.0, 0.0)])
    assert whole.metrics["step_s"] == pytest.approx((30 * 0.1 + 10 * 0.2) / 40)
    assert whole.metrics["images_per_s"] == pytest.approx(100 * 40 / (30 * 0.1 + 10 * 0.2))
    assert whole.metrics["phase/data_min_ms"] == 1.0
    assert whole.metrics["phase/data_max_ms"] == 9.0
    assert whole.metrics["peak_memory_mib"] == 900.0
    assert (len(whole.steps_s), whole.seconds, whole.start_s, whole.ended_s) == (40, 35.0, 25.0, 5.0)


def test_each_measurement_can_be_read_again_and_one_more_added() -> None:
    first, second = measured(FAST, 30, 30.0, 25.0), measured(SLOW, 10, 5.0, 0.0)
    scale = {"scale.num_workers": 1, "data.global_batch_size": 64, "data.loader_workers": 1}
    row = TrialRow.model_validate({"id": "000", "params": {}, "scale": scale, **as_json(combined([first, second]))})
    assert row.each_measurement == [first, second]
    assert len(combined([*row.each_measurement, first]).measurements) == 3


def test_a_point_that_ran_once_is_ok_whatever_else_befell_it() -> None:
    ran, failed = measured(FAST, 10, 30.0, 25.0), Outcome(status="failed", reason="its reason", seconds=3.0)
    for order in ([ran, failed], [failed, ran]):
        whole = combined(order)
        assert (whole.status, whole.reason, whole.metrics, whole.seconds) == ("ok", "", FAST, 33.0)
    assert (combined([failed, failed]).status, combined([failed, failed]).reason) == ("failed", "its reason")


def test_a_rank_that_was_on_several_nodes_is_on_none_between_them() -> None:
    first, second = FAST | {"rank0/node": 0.0, "rank1/node": 2.0}, SLOW | {"rank0/node": 2.0, "rank1/node": 2.0}
    metrics = combined([measured(first, 10, 5.0, 0.0), measured(second, 10, 5.0, 0.0)]).metrics
    assert {name: value for name, value in metrics.items() if name.endswith("/node")} == {"rank1/node": 2.0}
