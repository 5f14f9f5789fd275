"""The simulated clusters: right where a hand can reckon, never faster than their parts, the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.peers.searchers import PEERS
from tests.benchmarks.simulation.cluster import Cluster, Measured
from tests.benchmarks.simulation.draw import MAX_POINTS, MIN_POINTS, Drawn
from tests.benchmarks.simulation.parts import (
    Computing,
    Copying,
    Cores,
    Kernels,
    Linking,
    Loading,
    Memory,
    Plant,
    Setting,
    Trouble,
)
from tests.benchmarks.simulation.queueing import Luck, simulate
from tests.benchmarks.simulation.session import Session, grid_gpu_s
from trainables.phases import PHASES

SEEDS = range(12)


def one_kernel(image_s: float, multiprocessors: int = 100) -> Kernels:
    """A pass of 10 kernels alike with a tile for each image and multiprocessor: the time is linear in the batch."""
    return Kernels(np.array([10.0]), np.array([float(multiprocessors)]), np.array([image_s / 10]))


def quiet(nodes: int = 1, gpus: int = 1) -> Trouble:
    """No noise at all."""
    return Trouble(0.0, 0.0, 0.0, 0.0, np.zeros((nodes, gpus), bool), 0.0, 5, 1.5, np.ones((nodes, gpus)), 0.0, 1.0)


def plant(nodes: int = 1, gpus: int = 1, **parts: Any) -> Plant:
    """A cluster without noise: 1 + 2 + 4 ms an image on the GPU, data for nothing, no links but what is given."""
    usual: dict[str, Any] = {
        "cores": Cores(cores=64, smt_gain=0.0, main_load=0.0),
        "loading": Loading(1e-5, 0.0, 0.0, 1e5, 1e12, 1e12, 1.0, depth=2, chunk=1, whole_batches=False),
        "copying": Copying(1e5, 1e10, 1e10, exposed=1.0),
        "computing": Computing(1e-6, 100, one_kernel(2e-3), one_kernel(4e-3), one_kernel(1e-3), 0.0, 3e-3),
        "linking": Linking(1e8, 1e7, gpus, (1e9, 1e9, 1e9), (0.0, 0.0, 0.0), 0.0),
        "memory": Memory(1000.0, 100.0, 10_000.0, 0.0),
        "trouble": quiet(nodes, gpus),
    }
    return Plant(nodes, gpus, 50_000, 20.0, **(usual | parts))


def steps(plant: Plant, *settings: Setting, num: int = 200) -> Any:
    """Mean step of each point in the long run, and the phases."""
    seen = simulate(plant, list(settings), Luck.draw(plant, num, np.random.default_rng(0)))
    return seen.steps_s_TP[num // 2 :].mean(0), {name: values[num // 2 :].mean(0) for name, values in seen.phases_s_TP.items()}


def test_one_gpu_that_computes_takes_the_sum_of_its_phases() -> None:
    mean_P, phases = steps(plant(), Setting(1, 32, 4))
    assert phases["h2d"] == pytest.approx(32 * 1e5 / 1e10)
    assert (phases["teacher"], phases["student"], phases["backward"]) == pytest.approx((0.032, 0.064, 0.128))
    assert mean_P == pytest.approx(32 * 1e5 / 1e10 + 32 * 7e-3 + 3e-3)


def test_one_gpu_that_waits_for_decoding_goes_at_the_threads_speed_or_the_cores() -> None:
    loading = Loading(0.05, 0.0, 0.0, 1e5, 1e12, 1e12, 1.0, depth=2, chunk=1, whole_batches=False)
    two_cores = plant(loading=loading, cores=Cores(2, 0.0, 0.0))
    mean_P, phases = steps(two_cores, Setting(1, 32, 1), Setting(1, 32, 2), Setting(1, 32, 4))
    crowding = 1.0 + 0.15 * 0.5  # twice as many threads as cores
    assert mean_P == pytest.approx([32 * 0.05, 32 * 0.05 / 2, 32 * 0.05 / 2 * crowding], rel=0.01)
    assert phases["data"] == pytest.approx(mean_P - 32 * 7e-3 - 32e-5 - 3e-3, rel=0.02)


def test_a_loader_of_whole_batches_is_as_fast_in_the_long_run_and_comes_in_bursts() -> None:
    loading = Loading(0.05, 0.0, 0.0, 1e5, 1e12, 1e12, 1.0, depth=2, chunk=1, whole_batches=True)
    bursts = plant(loading=loading)
    seen = simulate(bursts, [Setting(1, 32, 4)], Luck.draw(bursts, 400, np.random.default_rng(0)))
    steps_s = seen.steps_s_TP[200:, 0]
    assert steps_s.mean() == pytest.approx(32 * 0.05 / 4, rel=0.02)
    waits = seen.phases_s_TP["data"][200:, 0] > 0.01
    assert waits.sum() == 50
    assert set(np.diff(np.flatnonzero(waits))) == {4}


def test_storage_that_nodes_share_is_shared() -> None:
    loading = Loading(1e-5, 0.0, 0.0, 1e5, 1e12, 1e7, 1.0, depth=2, chunk=1, whole_batches=False)  # 100 images a second
    free = Linking(1.0, 1.0, 1, (1e12, 1e12, 1e12), (0.0, 0.0, 0.0), 0.0)
    mean_P, _ = steps(plant(4, 2, loading=loading, linking=free), Setting(8, 32, 4))
    assert mean_P == pytest.approx(8 * 32 / 100, rel=0.02)


def test_a_ring_that_is_slow_takes_its_rounds_and_one_that_is_fast_hides_but_its_last_bucket() -> None:
    compute_s = 32 * 7e-3 + 3e-3 + 32 * 1e5 * 4 / 1e10
    fast = Linking(1e8, 1e7, 4, (1e10, 1e10, 1e10), (1e-6, 1e-6, 1e-6), 0.0)
    mean_P, _ = steps(plant(1, 4, linking=fast), Setting(4, 32, 4))
    assert mean_P == pytest.approx(compute_s + 6 * (1e-6 + 1e7 / 4 / 1e10))
    slow = Linking(1e8, 1e7, 4, (1e8, 1e8, 1e8), (0.0, 0.0, 0.0), 0.0)
    mean_P, phases = steps(plant(1, 4, linking=slow), Setting(4, 32, 4))
    ring_s = 10 * 6 * 1e7 / 4 / 1e8
    assert mean_P == pytest.approx(compute_s - 0.9 * 0.128 + ring_s)
    assert phases["backward"] == pytest.approx(0.1 * 0.128 + ring_s)


def test_the_ring_equals_a_queue_of_buckets_played_through_one_by_one() -> None:
    rng = np.random.default_rng(3)
    trouble = replace(quiet(2, 4), rank_noise=0.3, lasting_NG=np.exp(0.3 * rng.standard_normal((2, 4))))
    for seed, link in enumerate((1e8, 1e9, 2e9, 1e10)):
        ring = plant(2, 4, trouble=trouble, linking=Linking(1e8, 1e7, 4, (link,) * 3, (1e-5,) * 3, 0.0))
        luck = Luck.draw(ring, 50, np.random.default_rng(seed))
        seen = simulate(ring, [Setting(8, 16, 8)], luck)
        t = 49
        assert seen.phases_s_TP["data"][t, 0] == 0.0
        speed_R = luck.speed_TNG[t].ravel()
        ready_R, backward_R, bucket_s = (
            16 * 1e5 * 4 / 1e10 + 16 * 3e-3 * speed_R,
            16 * 4e-3 * speed_R,
            14 * (1e-5 + 1e7 / 8 / link),
        )
        free_s = 0.0
        for i in range(1, 11):
            free_s = max(free_s, (ready_R + backward_R * i / 10).max()) + bucket_s
        assert seen.steps_s_TP[t, 0] == pytest.approx(free_s + 3e-3 * speed_R[0])


def test_a_slow_gpu_slows_all_that_work_with_it_and_none_that_do_not() -> None:
    trouble = quiet(1, 4)
    trouble.lasting_NG[0, 3] = 2.0
    free = Linking(1.0, 1.0, 4, (1e12, 1e12, 1e12), (0.0, 0.0, 0.0), 0.0)
    limping = plant(1, 4, trouble=trouble, linking=free)
    without, _ = steps(limping, Setting(3, 32, 4))
    with_it, _ = steps(limping, Setting(4, 32, 4))
    assert with_it - without == pytest.approx(32 * 7e-3, rel=0.01)


def test_kernels_run_in_waves_and_small_batches_wait_for_launches() -> None:
    kernels = Kernels(np.array([4.0]), np.array([10.0]), np.array([1e-3]))
    times = [kernels.times(batch, 1e-5, 100, 1.0)[0] for batch in (1, 10, 11, 20, 21)]
    assert times == pytest.approx([4e-3, 4e-3, 8e-3, 8e-3, 12e-3])
    assert kernels.times(1, 2e-3, 100, 1.0) == pytest.approx((8e-3, 8e-3))


def test_a_gpu_that_warms_up_slows_down() -> None:
    warm = plant(trouble=replace(quiet(), drift=0.1, drift_s=10.0))
    setting, luck = Setting(1, 32, 4), Luck.draw(warm, 20, np.random.default_rng(0))
    cold, hot = (simulate(warm, [setting], luck, at_s).steps_s_TP[:, 0] for at_s in (0.0, np.inf))
    assert (np.diff(cold[2:]) > 0).all()
    assert hot[-1] == pytest.approx(1.1 * (32 * 7e-3) + 3e-3 + 32e-5)


def test_memory_is_linear_in_the_batch_of_a_rank_and_ends() -> None:
    space: dict[str, list[Any]] = {
        "scale.num_workers": [1, 2],
        "data.global_batch_size": [32, 64, 128],
        "data.loader_workers": [2, 40],
    }
    cluster = Cluster(0, Drawn("memory", plant(1, 2, cores=Cores(32, 0.0, 0.5)), space, reserved=True))
    found = {tuple(point.values()): cluster.status(point) for point in cluster.points}
    assert {key: status for key, status in found.items() if key[2] == 2} == {
        (1, 32, 2): "ok", (1, 64, 2): "ok", (1, 128, 2): "oom", (2, 32, 2): "ok", (2, 64, 2): "ok", (2, 128, 2): "ok"
    }  # fmt: skip
    assert {status for key, status in found.items() if key[2] == 40} == {"infeasible"}
    peaks = [cluster.peak_memory_mib(point) for point in cluster.points if point["scale.num_workers"] == 1][::2]
    assert peaks == [4200.0, 7400.0, 13_800.0]
    big = next(point for point in cluster.points if tuple(point.values()) == (1, 128, 2))
    assert cluster.measure(big, 10, np.random.default_rng(0)) == "oom"
    assert (cluster.truth(big), cluster.regret(big), cluster.regret(None)) == (np.inf, 1.0, 1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_point_is_faster_than_any_of_the_parts_it_needs(seed: int) -> None:
    cluster = Cluster(seed)
    calm = replace(cluster.plant, trouble=quiet(cluster.plant.nodes, cluster.plant.gpus_per_node))
    loading = calm.loading
    for point in [point for point in cluster.points if cluster.status(point) == "ok"][::17]:
        setting = cluster.setting(point)
        (mean_s,), phases = steps(calm, setting, num=120)
        nodes = -(-setting.num_workers // calm.gpus_per_node)
        ranks = min(setting.num_workers, calm.gpus_per_node)
        decode_s = loading.decode_s * setting.decode
        images_per_s = setting.num_workers * setting.batch / mean_s
        slack = 1.02  # the batches that the queue held at the beginning of the window
        cores_speed = calm.cores.cores * (1.0 + calm.cores.smt_gain)
        assert images_per_s <= slack * nodes * cores_speed / decode_s
        assert images_per_s <= slack * setting.num_workers * setting.loader_workers / (loading.read_latency_s + decode_s)
        assert images_per_s * loading.image_bytes * loading.uncached <= slack * loading.shared_bytes_per_s
        assert images_per_s * loading.image_bytes * loading.uncached <= slack * nodes * loading.node_bytes_per_s
        assert mean_s >= calm.copying.exposed * setting.batch * calm.copying.image_bytes * ranks / calm.copying.node_bytes_per_s
        bucket_s, num_buckets = calm.linking.bucket_s(setting.num_workers, calm.gpus_per_node)
        assert mean_s >= bucket_s * num_buckets
        assert sum(phases[name][0] for name in PHASES) == pytest.approx(mean_s)


def test_more_of_what_binds_is_never_slower() -> None:
    loading = Loading(0.02, 0.3, 1e-4, 1e5, 1e12, 1e12, 1.0, depth=2, chunk=1, whole_batches=False)
    threads, _ = steps(plant(loading=loading), *(Setting(1, 32, workers) for workers in (1, 2, 3, 4, 8)))
    assert (np.diff(threads) <= 0).all()
    batches, _ = steps(plant(), *(Setting(1, batch, 8) for batch in (8, 16, 32, 64)))
    assert (np.diff(batches) > 0).all()
    links = [
        steps(plant(1, 4, linking=Linking(4e8, 2.5e7, 4, (speed,) * 3, (1e-5,) * 3, 0.0)), Setting(4, 16, 8))[0][0]
        for speed in (1e9, 2e9, 4e9, 8e9)
    ]
    assert (np.diff(links) <= 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_is_a_cluster_whose_probes_are_noisy_and_repeat(seed: int) -> None:
    cluster, again = Cluster(seed), Cluster(seed)
    assert MIN_POINTS <= len(cluster.points) <= MAX_POINTS
    assert cluster.points == again.points
    point = next(point for point in reversed(cluster.points) if cluster.status(point) == "ok")
    seen, repeated, other = (c.measure(point, 100, np.random.default_rng(s)) for c, s in ((cluster, 1), (again, 1), (cluster, 2)))
    assert isinstance(seen, Measured)
    assert isinstance(repeated, Measured)
    assert isinstance(other, Measured)
    assert (seen.steps_s == repeated.steps_s).all()
    assert (seen.steps_s != other.steps_s).any()
    assert 0.01 < seen.steps_s.std() / seen.steps_s.mean() < 1.5
    assert seen.phases_s.keys() == set(PHASES)


def test_probes_agree_with_the_truth() -> None:
    cluster = Cluster(7)
    points = [point for point in cluster.points if cluster.status(point) == "ok"][::9]
    seen = [cluster.measure(p, 300, np.random.default_rng(i), warm_up=50, at_s=1e6) for i, p in enumerate(points)]
    ratios = [m.steps_s.mean() / cluster.truth(p) for m, p in zip(seen, points, strict=True) if isinstance(m, Measured)]
    assert len(ratios) == len(points)
    assert np.abs(np.array(ratios) - 1.0).max() < 0.04
    assert min(cluster.regret(point) for point in cluster.points) == 0.0


def test_a_front_without_one_of_its_points_regrets_what_that_one_is_best_at() -> None:
    cluster = Cluster(7)
    fastest, cheapest = (
        max(cluster.possible, key=lambda point: cluster.figure(point, metric)) for metric in ("images_per_s", "gpu_s_per_epoch")
    )
    assert (fastest["scale.num_workers"], cheapest["scale.num_workers"]) == (2, 1)  # there are no others
    assert cluster.front_regret([cheapest, fastest]) == 0.0
    assert cluster.front_regret([cheapest]) == pytest.approx(cluster.regret(cheapest))
    assert cluster.front_regret([fastest]) == pytest.approx(cluster.regret(fastest, "gpu_s_per_epoch"))
    assert cluster.front_regret([]) == 1.0


def test_a_session_pays_for_a_start_where_the_group_changes_and_for_every_step() -> None:
    space: dict[str, list[Any]] = {
        "scale.num_workers": [1, 2],
        "data.global_batch_size": [32, 128],
        "data.loader_workers": [4, 40],
    }
    session = Session(Cluster(0, Drawn("compute", plant(1, 2, cores=Cores(32, 0.0, 0.5)), space, reserved=True)), 0)
    small, too_many, big, *_, two_small, _, two_big, _ = session.cluster.points
    assert session.probe(too_many, 10).status == "infeasible"
    assert (session.gpu_s, session.num_probes) == (0.0, 0)
    seen = session.probe(small, 100, enough=lambda steps_s: len(steps_s) >= 20)
    assert len(seen.steps_s) == 20
    assert session.gpu_s == pytest.approx(20.0 + 30 * seen.steps_s.mean(), rel=0.01)
    costs = []
    for point in (small, big, small, two_small, two_big):
        before = session.gpu_s
        seen = session.probe(point, 20)
        costs.append(
            session.gpu_s - before - point["scale.num_workers"] * 30 * (seen.steps_s.mean() if len(seen.steps_s) else 0.0)
        )
    assert costs == pytest.approx([0.0, 5.0, 20.0, 40.0, 0.0], abs=0.1)  # the third after memory ran out


@pytest.mark.parametrize("name", ["random, short probes", "ASHA"])
def test_a_peer_spends_its_budget_and_finds_the_best_with_enough_of_it(name: str) -> None:
    cluster = Cluster(7)
    found = [cluster.regret(PEERS[name](cluster, share * grid_gpu_s(cluster), 1, "images_per_s")) for share in (0.02, 2.0)]
    assert found[1] <= min(found[0], 0.03)
    assert PEERS[name](cluster, 0.0, 1, "images_per_s") is None


def test_a_machine_like_that_of_the_published_diaries_tells_their_story() -> None:
    """8 GPUs at batch 256 are slower than 4 at the same, since the ring across sockets weighs more; at 512 they win."""
    computing = Computing(
        launch_s=1.5e-5,
        multiprocessors=68,
        student=Kernels(np.array([100.0, 10.0]), np.array([0.1, 68.0]), np.array([1e-6, 4e-5])),
        backward=Kernels(np.array([200.0, 20.0]), np.array([0.1, 68.0]), np.array([1e-6, 4e-5])),
        teacher=Kernels(np.array([100.0, 10.0]), np.array([0.1, 68.0]), np.array([1e-6, 5e-5])),
        augment_image_s=1e-5,
        optimizer_s=5e-3,
    )
    machine = plant(
        1,
        8,
        cores=Cores(32, 0.3, 0.8),
        loading=Loading(5.5e-3, 0.5, 5e-4, 1.1e5, 2e9, 2e9, 1.0, depth=2, chunk=8, whole_batches=False),
        copying=Copying(3 * 224 * 224, 1.2e10, 1.2e10, exposed=1.0),
        computing=computing,
        linking=Linking(1.8e8, 2.5e7, 4, (4e9, 3e9, 1e9), (2e-5, 4e-5, 5e-5), 0.05),
        trouble=replace(quiet(1, 8), step_noise=0.05, rank_noise=0.02),
    )
    rows = ((4, 256, 16, 0.150), (8, 256, 16, 0.161), (8, 512, 32, 0.229), (6, 384, 24, 0.185))
    step_s = [float(steps(machine, Setting(gpus, batch // gpus, threads // gpus))[0][0]) for gpus, batch, threads, _ in rows]
    assert step_s == pytest.approx([row[3] for row in rows], rel=0.15)
    epoch_s = [1_281_167 / row[1] * seconds for row, seconds in zip(rows, step_s, strict=True)]
    assert np.argsort(epoch_s).tolist() == [2, 3, 0, 1]
