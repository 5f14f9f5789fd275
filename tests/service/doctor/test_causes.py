"""Each rule alone: what it names, what it predicts, and when it is silent."""

from dataclasses import replace
from typing import Any

import pytest

from service.config.experiment import load
from service.doctor.causes import causes, findings
from service.doctor.evidence import Evidence
from service.doctor.read_run import evidence_of, loader_costs
from service.doctor.recorded import Clock, EpochUse, GpuUse, LoaderCosts, NodeUse, RankTimes
from service.doctor.step_model import Cause, Finding, predicted_pct
from tests.service.doctor.runs import HEALTHY, LOADER, RANK, loader, longer, run_of, waiting, waits


def cause(name: str, e: Evidence) -> Cause | None:
    """A cause of a run, whatever it gains."""
    return next((one for one in causes(e) if one.name == name), None)


def the(name: str, e: Evidence) -> Finding:
    """A cause of a run, and what it alone gains."""
    found = cause(name, e)
    assert found is not None
    return Finding((found,), predicted_pct(e, found))


def names(e: Evidence) -> list[str]:
    return [finding.cause for finding in findings(e)]


def test_a_healthy_run_has_no_finding() -> None:
    assert findings(HEALTHY) == []
    assert findings(run_of(waits(RANK, 1.0), waits(RANK, 2.0))) == []


def test_findings_come_with_the_largest_gain_first() -> None:
    found = findings(run_of(longer(RANK, h2d=20, teacher=100)))
    assert [finding.cause for finding in found] == ["teacher-bound", "copy-bound"]
    assert found[0].gain_pct > found[1].gain_pct


# Before the step computes

SLOW = longer(RANK, data=100)
"""Of its 200 ms a step 101 wait for the loader."""


def test_threads_that_compute_are_decode_bound_and_the_wait_is_the_gain() -> None:
    e = run_of(SLOW, loader=loader(200 / 64, read_wait=0.05, cpu=190 / 64))
    found = the("decode-bound", e)
    assert found.gain_pct == pytest.approx(100 * 101 / 200)
    assert found.change.startswith("--set data.loader_workers=3")
    assert names(e)[0] == "decode-bound"


def test_where_the_cores_are_busy_more_threads_are_not_proposed() -> None:
    busy = run_of(SLOW, loader=loader(200 / 64, cpu=100 / 64, core_wait=95 / 64), nodes=(NodeUse(99.0),))
    assert names(busy)[0] == "decode-bound"
    assert "--set data.loader_workers" not in the("decode-bound", busy).change
    pinned = replace(busy, nodes=(NodeUse(40.0),), loader=loader(200 / 64, cpu=80 / 64, core_wait=115 / 64))
    assert (
        "--set data.loader_workers" not in the("decode-bound", pinned).change
    )  # the node has free cores, these threads have none
    assert "waiting for a free core" in the("decode-bound", pinned).sentence


def test_no_more_threads_that_decode_are_proposed_than_a_worker_has_cores() -> None:
    e = run_of(longer(RANK, data=300), loader=loader(400 / 64, cpu=400 / 64), nodes=(NodeUse(40.0, cpu_cores=8.0),))
    assert the("decode-bound", e).change.startswith("--set data.loader_workers=5")
    assert the("decode-bound", replace(e, nodes=(NodeUse(40.0, cpu_cores=2.0),))).change.startswith("--set data.loader_workers=2")
    assert the("decode-bound", replace(e, nodes=(NodeUse(40.0, cpu_cores=1.0),))).change.startswith("cheaper images")


def test_threads_that_wait_inside_the_source_are_storage_bound() -> None:
    e = run_of(SLOW, loader=loader(200 / 64, read_wait=195 / 64, cpu=5 / 64))
    assert the("storage-bound", e).gain_pct == pytest.approx(100 * 101 / 200)
    assert names(e) == ["storage-bound"]


def test_time_inside_the_source_that_the_cpu_covers_is_not_storage() -> None:
    computing = run_of(SLOW, loader=loader(200 / 64, read_wait=0.0, cpu=200 / 64))
    assert names(computing) == ["decode-bound"]
    crowded = run_of(SLOW, loader=loader(200 / 64, read_wait=100 / 64, cpu=100 / 64, core_wait=100 / 64))
    assert names(crowded) == ["decode-bound"]


def test_a_loader_that_has_nothing_to_do_with_the_data_phase_is_not_blamed() -> None:
    """The step's own thread hands out batches: 10 ms of the data phase, none of which waits for the loader's threads."""
    own = replace(longer(RANK, data=10), loader_wait_ms=0.2, loader_batch_ms=5.0)
    assert names(run_of(own, loader=loader(0.08, read_wait=0.07, cpu=0.01))) == []


def test_threads_that_wait_elsewhere_while_cores_are_free_wait_for_pythons_lock() -> None:
    e = run_of(SLOW, loader=loader(200 / 64, read_wait=0.1, cpu=60 / 64), nodes=(NodeUse(30.0),))
    (found, *rest) = findings(e)
    assert found.cause == "GIL-bound"
    assert found.change.startswith("fewer loader workers")
    assert "decode-bound" not in [other.cause for other in rest if other.gain_pct > found.gain_pct]


def test_a_node_that_swaps_is_named_and_neither_its_storage_nor_pythons_lock_is_blamed() -> None:
    e = run_of(SLOW, loader=loader(200 / 64, read_wait=100 / 64, cpu=5 / 64), nodes=(NodeUse(30.0, 20.0),))
    assert names(e) == ["swapping"]
    assert "20 MiB/s from swap space" in the("swapping", e).sentence
    assert the("swapping", e).gain_pct == pytest.approx(100 * 101 / 200)
    assert cause("swapping", replace(e, nodes=(NodeUse(30.0, 0.0),))) is None


def test_single_batches_that_are_late_though_the_loader_has_time_to_spare_are_a_finding_of_their_own() -> None:
    late = replace(longer(RANK, data=30), loader_batch_ms=40.0)
    e = run_of(late, loader=loader(40 / 64, read_wait=30 / 64, cpu=10 / 64))
    assert names(e) == ["late batches"]
    found = the("late batches", e)
    assert found.gain_pct == pytest.approx(100 * 31 / 130)
    assert found.change.startswith("--set data.prefetch_batches=8")


@pytest.mark.parametrize("prefetch_batches", [16, 32])
def test_where_many_batches_are_prefetched_no_smaller_number_is_proposed(prefetch_batches: int) -> None:
    late = replace(longer(RANK, data=30), loader_batch_ms=40.0)
    found = the("late batches", run_of(late, loader=loader(40 / 64, cpu=40 / 64), prefetch_batches=prefetch_batches))
    assert found.change == "see what else uses the disk, the network and the cores at such times"


def test_what_decoding_still_takes_bounds_the_gain_of_a_faster_disk() -> None:
    both = loader(400 / 64, read_wait=240 / 64, cpu=160 / 64)
    found = the("storage-bound", run_of(longer(RANK, data=300), loader=both))
    assert found.gain_pct == pytest.approx(100 * (1 - 160 / 400))  # and not 301 of 400 ms


def test_records_without_the_loaders_costs_leave_the_cause_open() -> None:
    for nodes in ((), (NodeUse(),), (NodeUse(97.0),)):
        silent = run_of(replace(SLOW, loader_batch_ms=None, loader_wait_ms=None), loader=LoaderCosts(), nodes=nodes)
        assert names(silent) == ["data-bound"]
        assert the("data-bound", silent).gain_pct == pytest.approx(100 * 101 / 200)


def test_late_batches_are_one_finding_also_where_the_loaders_costs_are_not_recorded() -> None:
    late = replace(longer(RANK, data=30), loader_batch_ms=40.0)
    assert names(run_of(late, loader=LoaderCosts())) == ["late batches"]


def test_a_rank_that_alone_waits_for_data_makes_no_run_storage_bound() -> None:
    """Rank 0 needs 32 ms for a batch, rank 1 waits 168 ms more for the disk; the records have the means of both."""
    recorded = {"image": 116 / 64, "read_wait": 84 / 64, "cpu": 32 / 64, "core_wait": 0.0}
    metrics = {f"loader/{name}_ms": ms for name, ms in recorded.items()} | {"loader/threads": 1.0}
    metrics |= {"rank0/loader_batch_ms": 32.0, "rank1/loader_batch_ms": 200.0}
    e = run_of(waiting(RANK, 100, 1), waits(SLOW, 1), loader=loader_costs(metrics))
    assert names(e) == ["straggler", "decode-bound"]
    assert the("decode-bound", e).gain_pct == pytest.approx(100 * 32 / 200)  # of both ranks


def test_a_slow_loader_behind_a_slow_network_is_named_after_it() -> None:
    """A step of 200 ms: 100 of work, 100 of the all-reduce. Rank 1's loader needs 180, rank 0's 32."""
    fast = waits(longer(RANK, backward=100), 100)
    found = findings(run_of(fast, replace(fast, loader_batch_ms=180.0), loader=loader(32 / 64, cpu=32 / 64)))
    assert [(one.cause, one.after) for one in found][:2] == [("all-reduce-bound", None), ("straggler", "all-reduce-bound")]
    assert found[0].gain_pct == pytest.approx(100 * 20 / 200, abs=0.5)
    assert found[1].gain_pct == pytest.approx(100 * 100 / 200, abs=1)


# Supply


def test_what_a_step_computes_gains_nothing_while_it_waits_for_images() -> None:
    e = run_of(longer(RANK, data=100, teacher=100), loader=loader(300 / 64, read_wait=290 / 64, cpu=10 / 64))
    assert the("teacher-bound", e).gain_pct == 0
    assert the("storage-bound", e).gain_pct == pytest.approx(100 * 101 / 300)
    first, then = findings(e)
    assert (first.cause, first.after) == ("storage-bound", None)
    assert (then.cause, then.after) == ("teacher-bound", "storage-bound")
    assert then.gain_pct == pytest.approx(100 * (101 + 125) / 300)


def test_two_causes_of_which_neither_gains_alone_are_one_finding() -> None:
    e = run_of(replace(longer(RANK, teacher=100), loader_batch_ms=199.0), loader=loader(199 / 64, read_wait=190 / 64, cpu=9 / 64))
    (both,) = findings(e)
    assert both.cause == "storage-bound and teacher-bound"
    assert both.gain_pct == pytest.approx(100 * 125 / 200, abs=0.5)
    assert "; and " in both.change


def test_a_loader_that_is_nearly_as_slow_as_the_step_bounds_what_less_work_gains() -> None:
    near = run_of(replace(longer(RANK, teacher=100), loader_batch_ms=150.0), loader=loader(150 / 64, cpu=150 / 64))
    assert the("teacher-bound", near).gain_pct == pytest.approx(100 * 50 / 200, abs=0.5)
    assert [(found.cause, found.after) for found in findings(near)][1] == ("decode-bound", "teacher-bound")


def test_without_loader_workers_loading_during_the_work_is_the_gain() -> None:
    found = the("no prefetch", run_of(longer(RANK, data=49), loader_workers=0))
    assert (found.cause, found.change) == ("no prefetch", "--set data.loader_workers=1")
    assert found.gain_pct == pytest.approx(100 * 50 / 149)
    more = the("no prefetch", run_of(longer(RANK, data=299), loader_workers=0))
    assert more.change == "--set data.loader_workers=3"  # a fourth would bring 1 ms
    assert more.gain_pct == pytest.approx(100 * (1 - 100 / 399))
    assert names(run_of(longer(RANK, data=49), loader_workers=0, loader=LoaderCosts())) == ["no prefetch"]
    assert cause("no prefetch", HEALTHY) is None


def test_a_slow_copy_is_its_own_gain_and_decoding_on_the_device_has_its_own_words() -> None:
    slow = run_of(longer(RANK, h2d=99.5))
    assert the("copy-bound", slow).gain_pct == pytest.approx(50, abs=0.2)
    on_device = the("copy-bound", replace(slow, decodes_on_device=True))
    assert "wait for images that the GPU decodes" in on_device.sentence
    assert on_device.change.startswith("--set data.decoder=auto")


# Cores


def on_cores(e: Evidence, cores: float) -> Evidence:
    return replace(e, nodes=(NodeUse(60.0, cpu_cores=cores),))


def test_loader_threads_gain_no_more_than_the_cores_allow() -> None:
    """A batch takes a thread 200 ms, all of it computing, and a step 100: on two cores no less than 150 for both."""
    e = run_of(longer(RANK, data=199), loader_workers=0, loader=loader(200 / 64, cpu=200 / 64))
    assert the("no prefetch", on_cores(e, 8)).change == "--set data.loader_workers=2"
    assert the("no prefetch", on_cores(e, 8)).gain_pct == pytest.approx(100 * 199 / 299, abs=0.5)
    assert the("no prefetch", on_cores(e, 2)).gain_pct == pytest.approx(100 * (1 - 150 / 299), abs=0.5)


# Ranks


@pytest.mark.parametrize("phase", ["augment", "teacher", "student", "backward", "data", "optimizer"])
def test_a_slow_rank_is_named_with_the_phase_in_which_it_is_slow(phase: str) -> None:
    slow = waits(longer(RANK, **{phase: 60.0}), 1.0)
    found = the("straggler", run_of(waiting(RANK, 60, 1), slow, waiting(RANK, 60, 1)))
    assert found.sentence.startswith("rank 1 is slow")
    assert found.sentence.endswith(f"in {phase}")
    assert found.gain_pct == pytest.approx(100 * 60 / 160, rel=0.03)


def test_rank_0_is_named_though_the_others_wait_for_its_batch_statistics_in_their_forward() -> None:
    slow, fast = waits(longer(RANK, data=60), 1.0), waits(longer(RANK, student=60), 1.0)
    found = the("straggler", run_of(slow, fast))
    assert found.sentence.startswith("rank 0 is slow")
    assert found.sentence.endswith("in data")
    assert found.gain_pct == pytest.approx(100 * 60 / 160, abs=0.5)


def test_a_late_loaders_wait_is_gained_once_where_the_other_ranks_wait_for_images_too() -> None:
    """Four ranks, a step of 100 ms: 30 of work. Three wait 25 for images and 45 for the fourth, which waits 70 for images."""
    rank = RankTimes(
        data_ms=25.0,
        h2d_ms=0.0,
        augment_ms=0.0,
        teacher_ms=0.0,
        student_ms=10.0,
        backward_ms=65.0,
        optimizer_ms=0.0,
        step_ms=100.0,
        allreduce_wait_ms=45.0,
        loader_batch_ms=55.0,
        loader_wait_ms=25.0,
    )
    slow = replace(rank, data_ms=70.0, backward_ms=20.0, allreduce_wait_ms=0.0, loader_batch_ms=100.0, loader_wait_ms=70.0)
    found = the("straggler", run_of(rank, rank, rank, slow, exposed_ms=0.0, loader=loader(55 / 64, cpu=55 / 64)))
    assert found.sentence.startswith("rank 3 is slow")
    assert found.gain_pct == pytest.approx(45)


def test_without_its_loaders_times_a_rank_is_as_slow_as_it_waits_longer_than_the_others() -> None:
    def older(rank: RankTimes) -> RankTimes:
        return replace(rank, loader_batch_ms=None, loader_wait_ms=None)

    alike = run_of(older(waits(longer(RANK, data=3, backward=4), 4.0)), older(waits(longer(RANK, data=6, backward=1), 1.0)))
    assert cause("straggler", alike) is None  # one waits for more than 5% of its step, the other for less
    slow = run_of(older(waiting(RANK, 60, 1)), older(waits(longer(RANK, data=60, backward=1), 1.0)))
    assert the("straggler", slow).gain_pct == pytest.approx(100 * 60 / 161, rel=0.03)


def test_all_ranks_of_a_slow_node_are_one_slow_node() -> None:
    slow, fast = waits(longer(RANK, teacher=60), 1.0), waiting(RANK, 60, 1)
    two = (NodeUse(50.0), NodeUse(50.0))
    assert the("straggler", run_of(fast, fast, fast, fast, slow, nodes=two[:1])).sentence.startswith("rank 4 is slow")
    found = the("straggler", run_of(fast, fast, slow, slow, nodes=two, rank_nodes=(0, 0, 1, 1)))
    assert found.sentence.startswith("ranks 2, 3 (node1) are slow")


def test_slow_ranks_are_named_though_they_are_the_most() -> None:
    slow, fast = waits(longer(RANK, teacher=60), 1.0), waiting(RANK, 60, 1)
    e = run_of(slow, fast, slow, slow, fast, slow, slow, fast)
    found = the("straggler", e)
    assert found.sentence.startswith("ranks 0, 2, 3, 5, 6 are slow and 3 of 8 ranks wait")
    assert found.sentence.endswith("in teacher")
    assert found.gain_pct == pytest.approx(100 * 60 / 160, rel=0.03)


def test_a_slow_rank_is_on_its_own_node_also_where_nodes_have_unlike_numbers_of_ranks() -> None:
    slow, fast = waits(longer(RANK, teacher=60), 1.0), waiting(RANK, 60, 1)
    six = run_of(fast, fast, fast, slow, fast, fast, nodes=(NodeUse(50.0), NodeUse(50.0)))
    found = the("straggler", replace(six, rank_nodes=(0, 0, 0, 0, 1, 1)))
    assert found.sentence.startswith("rank 3 (node0) is slow")
    assert the("straggler", six).sentence.startswith("rank 3 is slow")  # an older record


def test_the_nodes_of_ranks_are_read_from_the_summary() -> None:
    experiment = load("digits").experiment
    nodes = {f"rank{rank}/node": float(rank // 4) for rank in range(6)}
    assert evidence_of(experiment, {"num_workers": 6.0, **nodes}).rank_nodes == (0, 0, 0, 0, 1, 1)
    assert evidence_of(experiment, {"num_workers": 6.0}).rank_nodes == ()


def test_a_rank_is_slow_where_its_lateness_stands_out_of_what_the_waits_vary_by() -> None:
    late, prompt = waits(longer(RANK, student=12), 1.0), waiting(RANK, 12, 1)

    def named(error_ms: float) -> bool:
        return (
            cause("straggler", run_of(*(replace(rank, allreduce_wait_error_ms=error_ms) for rank in (late, prompt)))) is not None
        )

    assert named(1.0)  # 12 ms, known to 2
    assert not named(3.0)


def test_a_slow_network_keeps_every_rank_waiting_and_is_no_straggler() -> None:
    slow = run_of(waiting(RANK, 0, 80), waiting(RANK, 0, 82))
    found = the("all-reduce-bound", slow)
    assert found.gain_pct == pytest.approx(100 * 80 / 180, rel=0.02)
    assert cause("straggler", slow) is None
    assert findings(slow)[0].cause == "all-reduce-bound"


def test_waits_for_a_slow_rank_are_not_the_networks() -> None:
    slow = waits(longer(RANK, student=60), 1.0)
    assert the("all-reduce-bound", run_of(waiting(RANK, 60, 1), slow)).gain_pct < 1
    assert cause("all-reduce-bound", HEALTHY) is None


def test_ranks_that_are_late_in_turn_are_neither_a_straggler_nor_the_network() -> None:
    late = replace(longer(RANK, backward=30), allreduce_wait_ms=30.0)
    (found,) = findings(run_of(late, late, exposed_ms=1.0))
    assert found.cause == "uneven ranks"
    assert found.gain_pct == pytest.approx(100 * 29 / 130)
    few_steps = replace(late, allreduce_wait_error_ms=12.0)
    assert findings(run_of(few_steps, few_steps, exposed_ms=1.0)) == []


# The work


def test_a_tiny_batch_pays_for_launches_and_a_larger_one_is_proposed() -> None:
    tiny = replace(
        RANK,
        teacher_ms=3.0,
        student_ms=3.0,
        backward_ms=4.0,
        optimizer_ms=2.0,
        data_ms=0.0,
        h2d_ms=0.0,
        augment_ms=0.0,
        loader_batch_ms=1.0,
    )
    passes_ms = {2: 9.0, 4: 10.0, 8: 12.0, 16: 17.6, 32: 35.2}
    found = the("launch-bound", replace(run_of(replace(tiny, step_ms=13.0)), global_batch=2, passes_ms=passes_ms))
    # Of 9 ms of passes 2.2 are left at 8 times as many images, and an eighth of 3 ms that any step takes.
    assert found.change.startswith("--set data.global_batch_size=16 ")
    assert found.gain_pct == pytest.approx(100 * (9 - 2.2 + 3 * 7 / 8) / 13)


def test_a_larger_batch_whose_images_take_as_long_is_not_proposed() -> None:
    assert "launch-bound" not in names(HEALTHY)
    assert cause("launch-bound", replace(HEALTHY, passes_ms={})) is None


def test_a_batch_that_is_too_large_for_a_gpu_is_not_proposed() -> None:
    passes_ms = {64: 95.0, 128: 120.0, 256: 200.0}
    timed = replace(IDLE, passes_ms=passes_ms)
    assert the("launch-bound", timed).change.startswith("--set data.global_batch_size=256")
    assert the("launch-bound", timed).gain_pct == pytest.approx(98.5 * (1 - 200 / (4 * 95)), abs=1)
    assert the("launch-bound", replace(timed, out_of_memory_images=256.0)).change.startswith("--set data.global_batch_size=128")


IDLE = replace(HEALTHY, one_image_ms=70.0, passes_ms={}, gpus=(GpuUse("node0/gpu0", util_pct=40.0),))


def test_a_gpu_that_waits_for_launches_is_recognised_by_its_idle_time() -> None:
    found = the("launch-bound", IDLE)
    assert found.cause == "launch-bound"
    assert found.gain_pct == pytest.approx(60 - 1.0)
    assert found.change.startswith("--set data.global_batch_size=256")  # 64 images are 40% of what it could do
    assert the("launch-bound", replace(IDLE, one_image_ms=None)).gain_pct == found.gain_pct


def test_an_idle_gpu_whose_host_could_launch_faster_waits_for_something_else() -> None:
    waiting_gpu = replace(IDLE, one_image_ms=20.0)
    assert the("host-bound", waiting_gpu).cause == "host-bound"
    assert the("host-bound", waiting_gpu).gain_pct == pytest.approx(60 - 1.0)
    assert cause("launch-bound", replace(IDLE, gpus=(GpuUse("node0/gpu0"),))) is None


def test_torch_compile_is_proposed_where_models_are_not_launched_as_cuda_graphs() -> None:
    proposal = "; or, with this batch, --set train.compile=reduce-overhead, which launches models as CUDA graphs"
    for compile_mode in (False, True):
        assert the("launch-bound", replace(IDLE, compile=compile_mode)).change.endswith(proposal)
    assert "train.compile" not in the("launch-bound", replace(IDLE, pipeline_stages=2)).change


def test_an_idle_gpu_whose_models_are_launched_as_graphs_waits_for_something_else() -> None:
    found = the("host-bound", replace(IDLE, compile="reduce-overhead"))
    assert found.cause == "host-bound"
    assert "although models are launched as CUDA graphs" in found.sentence


def test_a_busy_gpu_has_nothing_to_gain_from_launches() -> None:
    assert names(replace(IDLE, gpus=(GpuUse("node0/gpu0", util_pct=98.0),))) == []


def test_a_larger_batch_must_fit_into_the_gpus_memory() -> None:
    full = replace(IDLE, peak_memory_mib=10_000.0, gpu_memory_mib=24_000.0)
    assert the("launch-bound", full).change.startswith("--set data.global_batch_size=128")


def test_an_idle_gpu_whose_memory_is_full_is_not_reported_as_having_nothing_to_gain() -> None:
    full = replace(IDLE, peak_memory_mib=20_000.0, gpu_memory_mib=24_000.0)
    found = the("launch-bound", full)
    assert found.gain_pct == pytest.approx(60 - 1.0)
    assert found.change.startswith(
        "no larger batch is possible: --set train.compile=reduce-overhead, which launches models as CUDA graphs; "
        "--set precision=bf16"
    )
    assert names(full) == ["launch-bound"]


def test_no_batch_is_proposed_that_has_more_images_than_there_are() -> None:
    few = replace(IDLE, train_images=1442)  # 64 images a batch
    assert the("launch-bound", replace(few, gpus=(GpuUse("node0/gpu0", util_pct=1.0),))).change.startswith(
        "--set data.global_batch_size=1024"
    )
    assert "global_batch_size" not in the("launch-bound", replace(few, train_images=100)).change
    tiny = replace(few, gpus=(), passes_ms={64 * times: 90.0 + times for times in (1, 2, 4, 8, 16, 32, 64)})
    assert the("launch-bound", tiny).change.startswith("--set data.global_batch_size=1024")
    assert cause("launch-bound", replace(tiny, train_images=100)) is None
    slow = run_of(waiting(RANK, 0, 80), waiting(RANK, 0, 82), train_images=200)
    assert "global_batch_size" not in the("all-reduce-bound", slow).change
    assert "global_batch_size=256" in the("all-reduce-bound", replace(slow, train_images=1442)).change


def test_micro_batches_that_the_memory_could_hold_as_one_are_named_before_a_larger_batch() -> None:
    cut = replace(IDLE, accumulate=4, one_image_ms=20.0, peak_memory_mib=5_000.0, gpu_memory_mib=80_000.0)
    found = the("memory unused", cut)
    assert (found.cause, found.change) == ("memory unused", "--set optim.accumulate=1")
    assert "5,000 of 80,000 MiB" in found.sentence
    assert the("launch-bound", replace(cut, peak_memory_mib=70_000.0)).change.startswith("no larger batch is possible")


def test_a_teacher_that_outweighs_the_student_is_named_and_a_smaller_one_is_not() -> None:
    assert the("teacher-bound", run_of(longer(RANK, teacher=100))).gain_pct == pytest.approx(100 * 125 / 200)
    assert cause("teacher-bound", HEALTHY) is None
    assert cause("teacher-bound", run_of(longer(RANK, teacher=100), teacher_actors=1)) is None


def test_a_step_that_waits_for_a_service_names_how_many_actors_do() -> None:
    found = the("service-bound", run_of(longer(RANK, teacher=100), teacher_actors=1))
    # 200 ms of work a step for what else takes 75: three actors do it in 67.
    assert found.change.startswith("--set teacher.service=3; or, ")
    assert found.gain_pct == pytest.approx(100 * 125 / 200)
    assert cause("service-bound", run_of(longer(RANK, teacher=100))) is None
    assert findings(run_of(longer(RANK, teacher=100), teacher_actors=2))[0].cause == "service-bound"


# Over time


def epoch(
    step_ms: float, clock_mhz: float, temperature_c: float, reasons: int = 0, eval_s: float = 1.0, data_ms: float = 1.0
) -> EpochUse:
    gpu = GpuUse("node0/gpu1", 99.0, temperature_c, clock_mhz, 1980, reasons, 100.0 if reasons else 0.0)
    return EpochUse(step_ms, eval_s, (gpu,), {"data": data_ms, "backward": step_ms - data_ms})


def over(*epochs: EpochUse, steps_per_epoch: int = 1000, **changes: Any) -> Evidence:
    return replace(HEALTHY, epochs=epochs, gpus=epochs[-1].gpus, steps_per_epoch=steps_per_epoch, **changes)


def test_epochs_that_grow_while_a_hot_gpus_clock_falls_are_thermal_drift() -> None:
    e = over(epoch(175, 1410, 60), epoch(185, 1330, 74, 0x20), epoch(199, 1240, 80, 0x20))
    found = the("thermal drift", e)
    assert found.cause == "thermal drift"
    assert found.gain_pct == pytest.approx(100 * (1 - 1240 / 1410), abs=0.5)
    assert "from 175.0 to 199.0 s" in found.sentence
    assert "node0/gpu1 fell from 1,410 to 1,240 MHz at 80 °C (sw_thermal_slowdown)" in found.sentence
    assert names(e) == ["thermal drift"]


def test_epochs_that_grow_at_full_clocks_or_on_a_cool_gpu_have_no_thermal_cause() -> None:
    for epochs in ((epoch(175, 1410, 60), epoch(199, 1410, 80)), (epoch(175, 1410, 60), epoch(199, 1240, 61))):
        assert cause("thermal drift", over(*epochs)) is None


def test_a_gpu_that_is_throttled_from_the_start_is_a_finding() -> None:
    e = over(*(epoch(100, 1188, 88, 0x40) for _ in range(3)))
    found = the("thermal throttling", e)
    assert found.cause == "thermal throttling"
    assert "1,188 of 1,980 MHz all the time at 88 °C (hw_thermal_slowdown)" in found.sentence
    assert found.gain_pct == pytest.approx(40, abs=2)
    timing_run = replace(e, epochs=(), steps_per_epoch=None)
    assert names(timing_run) == ["thermal throttling"]


def test_other_gpus_that_are_not_throttled_show_what_a_throttled_one_could_have() -> None:
    gpus = tuple(GpuUse(f"node0/gpu{n}", 99.0, 60 + 20 * n, (1700, 1190)[n], 1980, 0x20 * n, 100.0 * n) for n in (0, 1))
    found = the("thermal throttling", replace(HEALTHY, gpus=gpus))
    assert "1,190 of 1,700 MHz" in found.sentence


def test_a_power_cap_and_a_throttled_moment_are_no_finding() -> None:
    capped = GpuUse("node0/gpu0", 99.0, 60.0, 1500.0, 1980.0, 0x4, 0.0)
    momentary = GpuUse("node0/gpu0", 99.0, 70.0, 1960.0, 1980.0, 0x24, 2.0)
    assert names(replace(HEALTHY, gpus=(capped,))) == names(replace(HEALTHY, gpus=(momentary,))) == []


def test_of_a_slowdown_only_the_clocks_share_is_heat_and_the_rest_has_another_cause() -> None:
    tenant = over(*(epoch(100, 1410, 70) for _ in range(4)), *(epoch(140, 1382, 76, 0x20) for _ in range(4)))
    (found,) = findings(tenant)
    assert found.cause == "slowdown"
    assert found.gain_pct == pytest.approx(100 * 40 / 140 - 2, abs=0.5)
    assert "compute grew from 99.0 to 139.0 s, most of it in backward" in found.sentence
    assert "lower clocks cost 2% of a step, the rest has another cause: perhaps another job on the node" in found.sentence
    assert "nvidia-smi" in found.change


def test_a_slowdown_of_the_loader_names_what_the_loader_shares() -> None:
    later = over(*(epoch(100, 1410, 70) for _ in range(4)), *(epoch(140, 1410, 70, data_ms=41.0) for _ in range(4)))
    slow = replace(later, ranks=(longer(RANK, data=20),))
    found = the("slowdown", slow)
    assert "most of it in data" in found.sentence
    assert "disk" in found.change
    assert found.gain_pct > 0


def test_epochs_that_differ_by_chance_have_not_slowed_down() -> None:
    noisy = over(*(epoch(ms, 1410, 60) for ms in (100, 107, 101, 108, 100, 106, 102, 107)))
    assert cause("slowdown", noisy) is None
    assert cause("slowdown", over(*(epoch(ms, 1410, 60) for ms in (140, 100, 100, 100, 100)))) is None or names(noisy) == []


def test_evaluations_that_take_much_of_an_epoch_are_proposed_less_often() -> None:
    """48% of the time: 92 s beside 100 s of steps."""
    half = over(*(epoch(100, 1410, 60, eval_s=92.3) for _ in range(2)), val_images=6400, num_epochs=100)
    found = the("evaluation", half)
    assert found.change.startswith("--set train.evaluate_every=19, or load its images faster")
    assert found.gain_pct == pytest.approx(48 * (1 - 1 / 19), abs=0.1)
    assert names(half) == ["evaluation"]
    assert the("evaluation", replace(half, num_epochs=4)).change.startswith("--set train.evaluate_every=4")
    short = over(*(epoch(100, 1410, 60, eval_s=3.0) for _ in range(2)), val_images=6400)
    assert names(short) == []
    assert cause("evaluation", HEALTHY) is None


def test_what_lies_between_steps_is_part_of_the_time_that_gains_are_of() -> None:
    clock = Clock(train_s=100.0, eval_s=0.0, checkpoint_s=60.0, other_s=40.0)
    e = replace(HEALTHY, clock=clock)
    assert the("checkpoints", e).gain_pct == pytest.approx(30)
    assert the("between epochs", e).gain_pct == pytest.approx(20)
    assert names(e) == ["checkpoints", "between epochs"]
    heavy = replace(run_of(longer(RANK, teacher=100)), clock=clock)
    assert the("teacher-bound", heavy).gain_pct == pytest.approx(100 * 125 / 400)


def test_a_loader_that_keeps_up_is_never_blamed() -> None:
    assert names(run_of(RANK, loader=replace(LOADER, read_wait_ms=0.5, cpu_ms=0.0))) == []


def test_passes_that_are_timed_after_a_training_are_no_time_between_epochs() -> None:
    clock = Clock(train_s=5.0, eval_s=0.2, checkpoint_s=0.2, other_s=0.1, timing_s=3.0)
    assert clock.wall_s == pytest.approx(8.5)
    assert names(replace(HEALTHY, clock=clock)) == []
