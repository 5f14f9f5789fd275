"""What a cluster has room for, how many jobs at a time, and what `auto` becomes."""

from dataclasses import replace

import pytest

from service.cluster.resources import Cluster, Node, Reservation, auto_loader_workers, nodes_for_actors, use_gpu


def cluster(*nodes: tuple[float, float], cores: int | None = None) -> Cluster:
    return Cluster(tuple(Node(str(i), cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)), real_cpus=cores)


def test_a_worker_must_fit_on_one_node() -> None:
    two_small = cluster((3, 0), (3, 0))
    assert two_small.refusal(Reservation(2, 3)) is None
    refusal = two_small.refusal(Reservation(1, 4))
    assert refusal is not None
    assert refusal == "1 worker needs 4 CPUs; the largest node has 3 CPUs and 0 GPUs"
    assert cluster((64, 0), (8, 1)).refusal(Reservation(1, 9, gpus=1)) == (
        "1 worker needs 9 CPUs and 1 GPU; the largest node has 8 CPUs and 1 GPU"
    )


def test_of_a_ray_of_our_own_the_cores_are_named_and_not_only_what_they_count_as() -> None:
    refusal = cluster((8, 0), cores=2).refusal(Reservation(3, 4))
    assert refusal is not None
    assert refusal.endswith("do not fit: 1 node with 2 cores (counted as 8 CPUs) and 0 GPUs in all has room for 2 workers")


def test_gpus_bound_workers_where_cpus_do_not() -> None:
    node = cluster((64, 4))
    assert node.refusal(Reservation(4, 5, gpus=1)) is None
    assert "has room for 4" in str(node.refusal(Reservation(5, 5, gpus=1)))


def test_jobs_at_a_time_leave_each_its_whole_group() -> None:
    assert cluster((8, 0)).max_concurrent(Reservation(2, 2), limit=10) == 2
    assert cluster((64, 4)).max_concurrent(Reservation(2, 2, gpus=1), limit=10) == 2
    assert cluster((8, 0)).max_concurrent(Reservation(2, 2), limit=1) == 1
    # 9 CPUs, but each node has a place for one worker of 2: the second group would wait for a third of the first's.
    assert cluster((3, 0), (3, 0), (3, 0)).max_concurrent(Reservation(2, 2), limit=2) == 1


@pytest.mark.parametrize(("head_gib", "num_trials"), [(float("inf"), 40), (64 * 0.7, 35), (16 * 0.7, 8), (0.7, 1)])
def test_no_more_trials_run_at_a_time_than_the_head_has_memory_for(head_gib: float, num_trials: int) -> None:
    big = replace(cluster((400, 0)), head_bytes=head_gib * 2**30)
    assert big.max_concurrent(Reservation(num_workers=1, cpus=1), limit=40) == num_trials
    reserved = big.trial_resources().get("memory", 0)
    assert num_trials * reserved <= big.head_bytes
    assert bool(reserved) == (head_gib < float("inf"))


def test_the_actors_of_a_service_are_reserved_once_for_all_jobs() -> None:
    two = Reservation(2, 3, gpus=1, service=Reservation(2, 1, gpus=1))
    assert two.total_cpus == 8
    node = cluster((64, 8))
    assert node.max_workers(two) == 6
    assert node.max_concurrent(two, limit=10) == 3
    refusal = cluster((64, 3)).refusal(two)
    assert refusal is not None
    assert refusal.startswith("2 workers of 3 CPUs and 1 GPU each and 2 actors of teacher.service of 1 CPU and 1 GPU each ")
    assert refusal.endswith("has room for the actors and 1 worker")
    assert cluster((64, 1)).max_workers(two) == 0


def test_actors_go_where_workers_lose_least() -> None:
    # Of 3 CPUs a worker of 2 leaves one, which is enough for an actor: a node of 4 would lose a worker.
    reservation = Reservation(1, 2, service=Reservation(2, 1))
    nodes = cluster((4, 0), (3, 0), (3, 0))
    assert [node.node_id for node in nodes_for_actors(nodes.nodes, reservation)] == ["1", "2"]
    assert nodes.max_workers(reservation) == 4
    assert [
        node.node_id for node in nodes_for_actors(cluster((2, 0), (2, 0)).nodes, Reservation(1, 2, service=Reservation(2, 1)))
    ] == ["0", "0"]
    assert nodes_for_actors(cluster((1, 0)).nodes, reservation) == []


def test_more_reserved_than_real_cores_is_oversubscribed() -> None:
    local = cluster((8, 0), cores=2)
    assert local.oversubscribed(Reservation(2, 2))
    assert not local.oversubscribed(Reservation(1, 2))
    assert not cluster((8, 0)).oversubscribed(Reservation(2, 4))


def test_auto_takes_the_cores_that_a_worker_leaves_and_never_none() -> None:
    assert auto_loader_workers(cluster((2, 0), cores=2), num_workers=2, cpus_per_worker=1, use_gpu=False) == 1
    assert auto_loader_workers(cluster((16, 4)), num_workers=4, cpus_per_worker=1, use_gpu=False) == 3
    assert auto_loader_workers(cluster((256, 0)), num_workers=1, cpus_per_worker=1, use_gpu=False) == 8
    assert auto_loader_workers(cluster((256, 0), cores=4), num_workers=1, cpus_per_worker=2, use_gpu=False) == 2


@pytest.mark.parametrize(("num_workers", "threads"), [(1, 31), (8, 31), (9, 1)])
def test_auto_takes_a_gpus_share_of_its_node_whatever_the_job_uses(num_workers: int, threads: int) -> None:
    assert auto_loader_workers(cluster((256, 8)), num_workers=num_workers, cpus_per_worker=1, use_gpu=True) == threads


def test_auto_takes_no_more_than_fits_on_every_node_that_is_needed() -> None:
    uneven = cluster((4, 0), (64, 4), (32, 4))
    assert auto_loader_workers(uneven, num_workers=2, cpus_per_worker=2, use_gpu=True) == 6
    assert uneven.refusal(Reservation(8, 2 + 6, gpus=1)) is None
    assert auto_loader_workers(cluster((3, 0), (3, 0)), num_workers=2, cpus_per_worker=1, use_gpu=False) == 2


def test_gpus_are_used_where_there_are_any() -> None:
    assert use_gpu("auto", cluster((8, 1)))
    assert not use_gpu("auto", cluster((8, 0)))
    assert not use_gpu(False, cluster((8, 1)))


def test_what_an_autoscaler_may_start_nodes_for_is_not_refused() -> None:
    assert Cluster((), autoscaled=True).refusal(Reservation(2, 2, gpus=1)) is None
    assert Cluster(()).refusal(Reservation(2, 2, gpus=1)) is not None
