"""The second simulator of clusters: what its users rely on."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from tests.benchmarks.simulation_b import PHASES, Cluster, Point, Testbed, bottleneck, draw_cluster, truth
from tests.benchmarks.simulation_b.cluster import CACHED_TEACHER, GPUS, PAIRS


@pytest.fixture(scope="module")
def clusters() -> list[Cluster]:
    return [draw_cluster(seed) for seed in range(100)]


def test_a_seed_gives_the_same_cluster_and_the_same_trials() -> None:
    cluster = draw_cluster(3)
    assert cluster == draw_cluster(3)
    assert cluster != draw_cluster(4)
    first, second, other = (Testbed(cluster, seed).measure(cluster.points[40], 20) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.phases_s, second.phases_s)
    assert first.wall_s == second.wall_s != other.wall_s


@pytest.mark.parametrize("size", [320, 700])
def test_grids_have_their_size_and_no_point_twice(size: int) -> None:
    for seed in range(30):
        points = draw_cluster(seed, size).points
        assert len(set(points)) == len(points) == size
        assert all(point.global_batch_size >= point.num_workers for point in points)


def test_the_truth_is_the_mean_of_a_long_run() -> None:
    for seed in (0, 1):
        drawn = draw_cluster(seed)
        fitting = [point for point, fits in zip(drawn.points, truth(drawn, 1).fits, strict=True) if fits]
        points = (fitting[len(fitting) // 2], fitting[-1])
        cluster = dataclasses.replace(drawn, points=points, tenant=None, failure=0.0)
        answer = truth(cluster, 1500)
        for point, step_time_s in zip(cluster.points, answer.step_time_s, strict=True):
            trial = Testbed(cluster, warm=True).measure(point, 1500)
            assert trial.outcome == "ok"
            assert trial.step_times_s[300:].mean() == pytest.approx(step_time_s, rel=0.04)


@pytest.mark.parametrize(
    ("gpu", "precision", "published"), [("V100", "fp32", 367), ("A100", "fp32", 938), ("A100", "bf16", 2470)]
)
def test_one_gpu_trains_as_fast_as_published(gpu: str, precision: str, published: float) -> None:
    """ResNet-50 v1.5 on one GPU: NVIDIA DeepLearningExamples, PyTorch, container 21.03."""
    resnet50 = next(student for student, _ in PAIRS if student.name == "ResNet-50")
    cluster = dataclasses.replace(
        draw_cluster(0),
        points=(Point(1, 128, 8, precision),),
        gpu=next(g for g in GPUS if g.name == gpu),
        student=resnet50,
        teacher=CACHED_TEACHER,
        rank_gpu_speed=(1.0,),
        rank_cpu_speed=(1.0,),
        cores=64,
        store="nvme",
        decode_s=1e-5,
        flops_fraction=0.45,
        kernel_spread=0.0,
        throttle=0.0,
        hiccup_s=0.0,
        tenant=None,
    )
    assert truth(cluster, 200).images_per_s[0] == pytest.approx(published, rel=0.2)


def test_a_tenant_slows_the_long_run() -> None:
    cluster = next(c for c in map(draw_cluster, range(100)) if c.tenant and bottleneck(c) != "compute")
    answer = truth(cluster, 100)
    assert answer.images_per_s[answer.best] < 0.98 * answer.quiet_images_per_s[answer.best]


def test_each_kind_of_bottleneck_occurs(clusters: list[Cluster]) -> None:
    kinds = Counter(map(bottleneck, clusters))
    assert min(kinds[kind] for kind in ("compute", "loading", "network", "storage")) >= 5, kinds


def test_the_best_point_is_not_always_the_largest(clusters: list[Cluster]) -> None:
    largest = 0
    for cluster in clusters[:20]:
        answer = truth(cluster, 40)
        best = cluster.points[answer.best]
        fitting = [p for p, fits in zip(cluster.points, answer.fits, strict=True) if fits]
        largest += (best.num_workers, best.global_batch_size) == max((p.num_workers, p.global_batch_size) for p in fitting)
    assert 5 < largest < 20


def test_a_point_that_fits_does_so_with_smaller_batches_too(clusters: list[Cluster]) -> None:
    for cluster in clusters[:10]:
        fits = dict(zip(cluster.points, truth(cluster, 1).fits, strict=True))
        for point, does in fits.items():
            smaller = [p for p in fits if p.global_batch_size < point.global_batch_size]
            like = [p for p in smaller if (p.num_workers, p.precision) == (point.num_workers, point.precision)]
            assert not does or all(fits[p] for p in like)


def test_memory_may_run_out_late_and_at_once(clusters: list[Cluster]) -> None:
    late = at_once = 0
    for drawn in clusters[:10]:
        cluster = dataclasses.replace(drawn, failure=0.0)
        testbed, fits = Testbed(cluster), truth(cluster, 1).fits
        too_large = [point for point, does in zip(cluster.points, fits, strict=True) if not does and point.loader_workers == 8]
        outcomes = {point: testbed.measure(point, 1).outcome for point in too_large}
        at_once += sum(outcome == "oom" for outcome in outcomes.values())
        for point in [point for point, outcome in outcomes.items() if outcome == "ok"][:1]:
            trial = testbed.measure(point, 800)
            assert (trial.outcome, trial.peak_memory_fraction) == ("oom", 1)
            late += len(trial.step_times_s) > 10
    assert late
    assert at_once


def test_a_row_of_phases_adds_up_to_its_step_and_the_first_step_is_slow(clusters: list[Cluster]) -> None:
    cluster = clusters[0]
    testbed = Testbed(dataclasses.replace(cluster, failure=0.0))
    trial = testbed.measure(cluster.points[0], 30)
    assert trial.phases_s.shape == (30, len(PHASES))
    assert (trial.phases_s >= -1e-9).all()
    np.testing.assert_allclose(trial.phases_s.sum(1), trial.step_times_s)
    assert trial.step_times_s[0] > 2 * np.median(trial.step_times_s)
    assert testbed.now_s == pytest.approx(trial.wall_s) == pytest.approx(trial.startup_s + trial.step_times_s.sum())


def test_workers_fail_now_and_then() -> None:
    cluster = dataclasses.replace(draw_cluster(0), failure=0.02)
    testbed = Testbed(cluster)
    point = next(p for p in cluster.points if p.num_workers == 8)
    outcomes = Counter(testbed.measure(point, 3).outcome for _ in range(100))
    assert 4 <= outcomes["failed"] <= 30, outcomes
