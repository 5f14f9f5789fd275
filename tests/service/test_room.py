"""What a cluster can hold, how many jobs at a time, and what `auto` becomes."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import psutil
import pytest

from service.cluster import resources as clusters
from service.cluster.resources import Cluster, Need, Node, auto_loader_workers, beside, connect, use_gpu
from service.config.experiment import load
from service.runs.plan import Plan
from service.runs.trial import need
from trainables.errors import ClusterError
from trainables.rundir import RunDir


def cluster(*nodes: tuple[float, float], cores: int | None = None) -> Cluster:
    return Cluster(tuple(Node(str(i), cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)), real_cpus=cores)


def test_a_worker_must_fit_on_one_node() -> None:
    two_small = cluster((3, 0), (3, 0))
    assert two_small.refusal(Need(2, 3)) is None
    refusal = two_small.refusal(Need(1, 4))
    assert refusal is not None
    assert refusal.startswith("1 workers of 4 CPUs each do not fit: 2 nodes with 6 CPUs and 0 GPUs in all hold 0")


def test_of_a_ray_of_our_own_the_cores_are_named_and_not_only_what_they_count_as() -> None:
    refusal = cluster((8, 0), cores=2).refusal(Need(3, 4))
    assert refusal is not None
    assert refusal.endswith("do not fit: 1 node with 2 cores (counted as 8 CPUs) and 0 GPUs in all holds 2")


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


def test_the_actors_of_a_service_are_reserved_once_for_all_jobs() -> None:
    two = Need(2, 3, gpus=1, service=Need(2, 1, gpus=1))
    assert two.total_cpus == 8
    node = cluster((64, 8))
    assert node.places(two) == 6
    assert node.concurrent(two, wanted=10) == 3
    refusal = cluster((64, 3)).refusal(two)
    assert refusal is not None
    assert refusal.startswith("2 workers of 3 CPUs and 1 GPU each and teacher.service's 2 actors of 1 CPU and 1 GPU do not fit: ")
    assert refusal.endswith("holds 1 workers beside them")
    assert cluster((64, 1)).places(two) == 0


def test_actors_go_where_workers_lose_least() -> None:
    # Of 3 CPUs a worker of 2 leaves one, which is enough for an actor: a node of 4 would lose a worker.
    need = Need(1, 2, service=Need(2, 1))
    nodes = cluster((4, 0), (3, 0), (3, 0))
    assert [node.node_id for node in beside(nodes.nodes, need)] == ["1", "2"]
    assert nodes.places(need) == 4
    assert [node.node_id for node in beside(cluster((2, 0), (2, 0)).nodes, Need(1, 2, service=Need(2, 1)))] == ["0", "0"]
    assert beside(cluster((1, 0)).nodes, need) == []


def test_only_students_have_a_service_and_an_experiment_says_what_it_takes(tmp_path: Path) -> None:
    asked = ["teacher.service=2", "scale.cpus_per_worker=2", "data.loader_workers=1"]
    plan = Plan.on(load("digits", asked).experiment, cluster((16, 0)))
    assert plan.need() == Need(1, 3, service=Need(2, 2))
    assert plan.describe(cluster((16, 0))).endswith("on 1 node, and 2 for the teacher")
    student = plan.assign("student", RunDir(tmp_path), {}, "/teacher", ("first", "second"))
    assert (student.config.teachers, student.config.teacher and student.config.teacher.service) == (("first", "second"), 2)
    assert need(student.config, student.loader_workers, student.use_gpu) == plan.need()
    assert plan.assign("teacher", RunDir(tmp_path), {}).config.teacher is None
    refusal = Plan.on(load("digits", asked).experiment, cluster((6, 0))).refusal(cluster((6, 0)))
    assert refusal is not None
    assert refusal.endswith(": lower scale.num_workers or data.loader_workers, or teacher.service")


def test_an_assistant_learns_from_the_network_and_its_student_from_the_service(tmp_path: Path) -> None:
    experiment = load("digits", ["teacher.service=1", "assistants=[{model: convnet_small}]"]).experiment
    stages = {name: experiment.stage(name, tmp_path, {}, "/weights").teacher for name in ("assistant1", "student")}
    assert {name: (t.model, t.service) for name, t in stages.items() if t} == {
        "assistant1": ("convnet_large", None), "student": ("convnet_small", 1),
    }  # fmt: skip


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


def test_a_ray_that_cannot_start_here_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("far" * 40)  # sockets lie below it, and their paths have 107 bytes at most
    deep.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    words = r"Ray does not start on this machine: .*AF_UNIX path length cannot exceed 107 bytes"
    with pytest.raises(ClusterError, match=words) as refused, connect(1, tmp_path):
        raise AssertionError("there is a Ray")
    assert "\n" not in str(refused.value)


def test_a_child_that_ends_while_rays_daemons_are_looked_up_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["sleep", None, "raylet"])

    def name(child: psutil.Process) -> str:
        if (found := next(names)) is None:
            raise psutil.NoSuchProcess(child.pid)
        return found

    with contextlib.ExitStack() as stack:
        children = [psutil.Process(stack.enter_context(subprocess.Popen(["sleep", "60"])).pid) for _ in range(3)]
        monkeypatch.setattr(psutil.Process, "children", lambda _: children)
        monkeypatch.setattr(psutil.Process, "name", name)
        found = clusters._daemons()
        for child in children:
            child.kill()
    assert found == {"raylet": children[2]}
