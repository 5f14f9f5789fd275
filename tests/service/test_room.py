"""What a cluster can hold, how many jobs at a time, and what `auto` becomes."""

from __future__ import annotations

from pathlib import Path

from service.cluster import Cluster, Need, Node, auto_loader_workers, use_gpu
from service.experiment import load
from service.plan import Plan
from trainables.rundir import RunDir


def cluster(*nodes: tuple[float, float], cores: int | None = None) -> Cluster:
    return Cluster(tuple(Node(str(i), cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)), real_cpus=cores)


def test_a_worker_must_fit_on_one_node() -> None:
    two_small = cluster((3, 0), (3, 0))
    assert two_small.refusal(Need(2, 3)) is None
    refusal = two_small.refusal(Need(1, 4))
    assert refusal is not None
    assert refusal.startswith("1 workers of 4 CPUs each do not fit: 2 nodes with 6 CPUs and 0 GPUs in all hold 0")


def test_gpus_bound_workers_where_cpus_do_not() -> None:
    node = cluster((64, 4))
    assert node.refusal(Need(4, 5, gpus=1)) is None
    assert "hold" in str(node.refusal(Need(5, 5, gpus=1)))


def test_jobs_at_a_time_leave_each_its_whole_group() -> None:
    assert cluster((8, 0)).concurrent(Need(2, 2), wanted=10) == 2
    assert cluster((64, 4)).concurrent(Need(2, 2, gpus=1), wanted=10) == 2
    assert cluster((8, 0)).concurrent(Need(2, 2), wanted=1) == 1
    # 9 CPUs, but each node has a place for one worker of 2: the second group would wait for a third of the first's.
    assert cluster((3, 0), (3, 0), (3, 0)).concurrent(Need(2, 2), wanted=2) == 1


def test_more_reserved_than_real_cores_is_oversubscribed() -> None:
    local = cluster((8, 0), cores=2)
    assert local.oversubscribed(Need(2, 2))
    assert not local.oversubscribed(Need(1, 2))
    assert not cluster((8, 0)).oversubscribed(Need(2, 4))


def test_auto_takes_the_cores_that_a_worker_leaves_and_never_none() -> None:
    assert auto_loader_workers(cluster((2, 0), cores=2), num_workers=2, cpus_per_worker=1) == 1
    assert auto_loader_workers(cluster((16, 4)), num_workers=4, cpus_per_worker=1) == 3
    assert auto_loader_workers(cluster((256, 8)), num_workers=1, cpus_per_worker=1) == 8


def test_gpus_are_used_where_there_are_any() -> None:
    assert use_gpu("auto", cluster((8, 1)))
    assert not use_gpu("auto", cluster((8, 0)))
    assert not use_gpu(False, cluster((8, 1)))


def test_auto_is_a_limit_to_the_workers_and_a_number_is_an_order(tmp_path: Path) -> None:
    for written, limit in (("auto", True), ("2", False)):
        plan = Plan.on(load("digits", [f"data.loader_workers={written}"]).experiment, cluster((3, 0), cores=3))
        config = plan.assign("student", RunDir(tmp_path), {}).config
        assert (config.data.loader_workers, config.loader_auto) == (2, limit)
