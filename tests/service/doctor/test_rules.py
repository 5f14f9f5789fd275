"""Each rule alone: what it names, what it predicts, and when it is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.doctor.computing import launches, teacher
from service.doctor.evidence import EpochUse, Finding, GpuUse, LoaderCosts, NodeUse
from service.doctor.feeding import copy, loading, no_prefetch
from service.doctor.over_time import evaluation, thermal_drift
from service.doctor.ranks import all_reduce, straggler
from service.doctor.rules import findings
from service.doctor.serving import service_waits
from tests.service.doctor.runs import HEALTHY, LOADER, RANK, longer, run_of, waiting, waits


def the(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


def test_a_healthy_run_has_no_finding() -> None:
    assert findings(HEALTHY) == []
    assert findings(run_of(waits(RANK, 1.0), waits(RANK, 2.0))) == []


def test_findings_come_with_the_largest_gain_first() -> None:
    found = findings(run_of(longer(RANK, h2d=20, teacher=100)))
    assert [finding.cause for finding in found] == ["teacher-bound", "copy-bound"]
    assert found[0].gain_pct > found[1].gain_pct


# Before the step computes


def test_threads_that_compute_are_decode_bound_and_the_wait_is_the_gain() -> None:
    slow = LoaderCosts(image_ms=200 / 64, read_ms=0.05, cpu_ms=190 / 64, threads=1)
    found = the(loading(run_of(longer(RANK, data=100), loader=slow, nodes=(NodeUse(60.0, 0.0),))))
    assert found.cause == "decode-bound"
    assert found.gain_pct == pytest.approx(100 * 101 / 200)
    assert found.change.startswith("--set data.loader_workers=3")


def test_where_the_cores_are_busy_more_threads_are_not_proposed() -> None:
    slow = LoaderCosts(image_ms=200 / 64, read_ms=0.05, cpu_ms=100 / 64, threads=1)
    found = the(loading(run_of(longer(RANK, data=100), loader=slow, nodes=(NodeUse(99.0, 0.0),))))
    assert found.cause == "decode-bound"
    assert "--set data.loader_workers" not in found.change


def test_threads_that_wait_inside_the_source_are_storage_bound() -> None:
    slow = LoaderCosts(image_ms=200 / 64, read_ms=190 / 64, cpu_ms=10 / 64, threads=1)
    found = the(loading(run_of(longer(RANK, data=100), loader=slow)))
    assert found.cause == "storage-bound"
    assert found.gain_pct == pytest.approx(100 * 101 / 200)


def test_threads_that_wait_for_pages_of_a_mapped_file_are_storage_bound_where_cores_are_free_and_disks_are_read() -> None:
    mapped = LoaderCosts(image_ms=200 / 64, read_ms=0.0, cpu_ms=20 / 64, threads=1)
    slow = run_of(longer(RANK, data=100), loader=mapped)
    assert the(loading(replace(slow, nodes=(NodeUse(40.0, 90.0),)))).cause == "storage-bound"
    assert the(loading(replace(slow, nodes=(NodeUse(99.0, 90.0),)))).cause == "decode-bound"
    assert the(loading(replace(slow, nodes=(NodeUse(40.0, 0.0),)))).cause == "decode-bound"


def test_what_decoding_still_takes_bounds_the_gain_of_a_faster_disk() -> None:
    both = LoaderCosts(image_ms=400 / 64, read_ms=240 / 64, cpu_ms=160 / 64, threads=1)
    found = the(loading(run_of(longer(RANK, data=300), loader=both)))
    assert found.cause == "storage-bound"
    assert found.gain_pct == pytest.approx(100 * (1 - 160 / 400))  # and not 301 of 400 ms


def test_records_without_the_loaders_costs_go_by_the_nodes_cores() -> None:
    slow = run_of(longer(RANK, data=100), loader=None)
    assert the(loading(replace(slow, nodes=(NodeUse(97.0, 0.0),)))).cause == "decode-bound"
    assert the(loading(replace(slow, nodes=(NodeUse(30.0, 0.0),)))).cause == "storage-bound"


def test_records_that_say_nothing_of_loader_and_node_leave_the_cause_open() -> None:
    for silent in ((), (NodeUse(None, 90.0),)):
        found = the(loading(run_of(longer(RANK, data=100), loader=None, nodes=silent)))
        assert found.cause == "data-bound"
        assert found.gain_pct == pytest.approx(100 * 101 / 200)


def test_a_rank_that_alone_waits_for_data_makes_no_run_decode_bound() -> None:
    assert loading(run_of(waiting(RANK, 100), longer(RANK, data=100))) is None


def test_without_loader_workers_loading_beside_the_work_is_the_gain() -> None:
    found = the(no_prefetch(run_of(longer(RANK, data=49), loader_workers=0)))
    assert (found.cause, found.change) == ("no prefetch", "--set data.loader_workers=1")
    assert found.gain_pct == pytest.approx(100 * 50 / 149)
    more = the(no_prefetch(run_of(longer(RANK, data=299), loader_workers=0)))
    assert more.change == "--set data.loader_workers=4"
    assert more.gain_pct == pytest.approx(100 * (1 - 99 / 399))
    assert loading(run_of(longer(RANK, data=49), loader_workers=0)) is None
    assert no_prefetch(HEALTHY) is None


def test_a_slow_copy_is_its_own_gain_and_decoding_on_the_device_has_its_own_words() -> None:
    slow = run_of(longer(RANK, h2d=99.5))
    assert the(copy(slow)).gain_pct == pytest.approx(50, abs=0.2)
    assert the(copy(replace(slow, decodes_on_device=True))).cause == "device decode"


# Ranks


@pytest.mark.parametrize("phase", ["augment", "teacher", "student", "backward", "data", "optimizer"])
def test_a_slow_rank_is_named_with_the_phase_in_which_it_is_slow(phase: str) -> None:
    slow = waits(longer(RANK, **{phase: 60.0}), 1.0)
    found = the(straggler(run_of(waiting(RANK, 60, 1), slow, waiting(RANK, 60, 1))))
    assert found.sentence.startswith("rank 1 (node0) is slow")
    assert found.sentence.endswith(f"in {phase}")
    assert found.gain_pct == pytest.approx(100 * 60 / 160, rel=0.03)


def test_rank_0_is_named_though_the_others_wait_for_its_batch_statistics_in_their_forward() -> None:
    slow, fast = waits(longer(RANK, data=60), 1.0), waits(longer(RANK, student=60), 1.0)
    found = the(straggler(run_of(slow, fast)))
    assert found.sentence.startswith("rank 0 (node0) is slow")
    assert found.sentence.endswith("in data")
    assert found.gain_pct == pytest.approx(100 * 60 / 160)


def test_all_ranks_of_a_slow_node_are_one_slow_node() -> None:
    slow, fast = waits(longer(RANK, teacher=60), 1.0), waiting(RANK, 60, 1)
    two = (NodeUse(50.0), NodeUse(50.0))
    assert the(straggler(run_of(fast, fast, fast, fast, slow, nodes=two[:1]))).sentence.startswith("rank 4 (node0) is slow")
    found = the(straggler(run_of(fast, fast, slow, slow, nodes=two)))
    assert found.sentence.startswith("node1 (ranks 2, 3) are slow")


def test_no_node_is_named_where_nodes_have_unlike_numbers_of_ranks() -> None:
    slow, fast = waits(longer(RANK, teacher=60), 1.0), waiting(RANK, 60, 1)
    found = the(straggler(run_of(fast, fast, fast, slow, fast, nodes=(NodeUse(50.0), NodeUse(50.0)))))
    assert found.sentence.startswith("rank 3 is slow")


def test_a_rank_is_slow_where_its_lateness_stands_out_of_what_the_waits_vary_by() -> None:
    late, prompt = waits(longer(RANK, student=12), 1.0), waiting(RANK, 12, 1)

    def named(error_ms: float) -> bool:
        return straggler(run_of(*(replace(rank, allreduce_wait_error_ms=error_ms) for rank in (late, prompt)))) is not None

    assert named(1.0)  # 12 ms, known to 2
    assert not named(3.0)


def test_a_slow_network_keeps_every_rank_waiting_and_is_no_straggler() -> None:
    slow = run_of(waiting(RANK, 0, 80), waiting(RANK, 0, 82))
    found = the(all_reduce(slow))
    assert found.gain_pct == pytest.approx(100 * 80 / 180, rel=0.02)
    assert straggler(slow) is None
    assert findings(slow)[0].cause == "all-reduce-bound"


def test_waits_for_a_slow_rank_are_not_the_networks() -> None:
    slow = waits(longer(RANK, student=60), 1.0)
    assert the(all_reduce(run_of(waiting(RANK, 60, 1), slow))).gain_pct < 1
    assert all_reduce(HEALTHY) is None


def test_ranks_that_are_late_in_turn_are_neither_a_straggler_nor_the_network() -> None:
    late = replace(longer(RANK, backward=30), allreduce_wait_ms=30.0, allreduce_wait_p50_ms=1.0)
    (found,) = findings(run_of(late, late))
    assert found.cause == "uneven ranks"
    assert found.gain_pct == pytest.approx(100 * 29 / 130)
    few_steps = replace(late, allreduce_wait_error_ms=12.0)
    assert findings(run_of(few_steps, few_steps)) == []


# The work


def test_a_tiny_batch_pays_for_launches_and_a_larger_one_is_proposed() -> None:
    tiny = replace(
        RANK, teacher_ms=3.0, student_ms=3.0, backward_ms=4.0, optimizer_ms=2.0, data_ms=0.0, h2d_ms=0.0, augment_ms=0.0
    )
    found = the(launches(replace(run_of(replace(tiny, step_ms=13.0)), global_batch=2, one_image_ms=9.0, further_image_ms=1.0)))
    # 8 of the models' 10 ms are fixed; with the optimizer and the rest 11 ms a step: a tenth of 2 ms an old batch at 64 times
    assert found.change.startswith("--set data.global_batch_size=128")
    assert found.gain_pct == pytest.approx(100 * 11 / 13 * (1 - 1 / 64))


IDLE = replace(HEALTHY, one_image_ms=70.0, gpus=(GpuUse("node0/gpu0", util_pct=40.0),))


def test_a_gpu_that_waits_for_launches_is_told_by_its_idle_time() -> None:
    found = the(launches(IDLE))
    assert found.cause == "launch-bound"
    assert found.gain_pct == pytest.approx(60 - 1.5)
    assert found.change.startswith("--set data.global_batch_size=256")  # 64 images are 40% of what it could do
    assert the(launches(replace(IDLE, one_image_ms=None))).gain_pct == found.gain_pct


def test_launches_that_a_busy_gpu_hides_cost_nothing() -> None:
    assert launches(replace(IDLE, one_image_ms=20.0)) is None
    assert launches(replace(IDLE, gpus=(GpuUse("node0/gpu0"),))) is None


def test_a_larger_batch_must_fit_into_the_gpus_memory() -> None:
    full = replace(IDLE, peak_memory_mib=10_000.0, gpu_memory_mib=24_000.0)
    assert the(launches(full)).change.startswith("--set data.global_batch_size=128")
    assert launches(replace(full, peak_memory_mib=20_000.0)) is None


def test_micro_batches_that_the_memory_could_hold_as_one_are_named_before_a_larger_batch() -> None:
    cut = replace(IDLE, accumulate=4, one_image_ms=20.0, peak_memory_mib=5_000.0, gpu_memory_mib=80_000.0)
    found = the(launches(cut))
    assert (found.cause, found.change) == ("memory unused", "--set optim.accumulate=1")
    assert "5,000 of 80,000 MiB" in found.sentence
    assert launches(replace(cut, peak_memory_mib=70_000.0)) is None


def test_a_teacher_that_outweighs_the_student_is_named_and_a_smaller_one_is_not() -> None:
    assert the(teacher(run_of(longer(RANK, teacher=100)))).gain_pct == pytest.approx(100 * 125 / 200)
    assert teacher(HEALTHY) is None
    assert teacher(run_of(longer(RANK, teacher=100), teacher_actors=1)) is None


def test_a_step_that_waits_for_a_service_names_how_many_actors_do() -> None:
    found = the(service_waits(run_of(longer(RANK, teacher=100), teacher_actors=1)))
    # 200 ms of work a step for what else takes 75: three actors do it in 67.
    assert found.change.startswith("--set teacher.service=3; or, ")
    assert found.gain_pct == pytest.approx(100 * 125 / 200)
    assert service_waits(run_of(longer(RANK, teacher=100))) is None
    assert findings(run_of(longer(RANK, teacher=100), teacher_actors=2))[0].cause == "service-bound"


# Over time


def epoch(step_ms: float, clock_mhz: float, temperature_c: float, reasons: int = 0, eval_s: float = 1.0) -> EpochUse:
    return EpochUse(step_ms, eval_s, (GpuUse("node0/gpu1", 99.0, temperature_c, clock_mhz, reasons),))


def test_epochs_that_grow_while_a_hot_gpus_clock_falls_are_thermal_drift() -> None:
    epochs = (epoch(175, 1410, 60), epoch(185, 1330, 74, 0x20), epoch(199, 1240, 80, 0x20))
    found = the(thermal_drift(replace(HEALTHY, epochs=epochs, steps_per_epoch=1000)))
    assert found.gain_pct == pytest.approx(100 * (1 - 175 / 199))
    assert "from 175.0 to 199.0 s" in found.sentence
    assert "node0/gpu1 fell from 1,410 to 1,240 MHz at 80 °C" in found.sentence


def test_epochs_that_grow_at_full_clocks_or_on_a_cool_gpu_are_not() -> None:
    for epochs in ((epoch(175, 1410, 60), epoch(199, 1410, 80)), (epoch(175, 1410, 60), epoch(199, 1240, 61))):
        assert thermal_drift(replace(HEALTHY, epochs=epochs, steps_per_epoch=1000)) is None


def test_an_evaluation_is_too_long_by_what_it_takes_beyond_the_students_forward() -> None:
    long = replace(HEALTHY, epochs=(epoch(100, 1410, 60, eval_s=30.0),) * 2, steps_per_epoch=1000, val_images=6400)
    found = the(evaluation(long))
    assert found.gain_pct == pytest.approx(100 * (30 - 2.5) / 130)
    short = replace(long, epochs=(epoch(100, 1410, 60, eval_s=3.0),) * 2)
    assert the(evaluation(short)).gain_pct < 1
    assert evaluation(HEALTHY) is None


def test_a_loader_that_keeps_up_is_never_blamed() -> None:
    assert loading(run_of(RANK, loader=replace(LOADER, read_ms=0.5))) is None
