"""Starts the actors of `teacher.service` before the students of a run or sweep, and stops them afterwards."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.cluster.local_ray import RayLostError, check_ray
from service.cluster.resources import Cluster, Reservation, nodes_for_actors
from service.runs.display import Display
from service.runs.plan import Plan
from service.runs.session import Session
from service.runs.stages.node_wait import NodeWait
from trainables.errors import ClusterError

WAIT_MESSAGE_S = 60.0
"""Time between two messages about actors that wait for free resources."""


@contextlib.contextmanager
def running_teacher_actors(session: Session, plan: Plan, cluster: Cluster, weights: str | None) -> Iterator[tuple[str, ...]]:
    """Start the actors that serve the teacher with these weights, and yield their names, which begin with the run's.

    None are started if the workers run the teacher themselves, or no method reads one. Ray restarts an actor that dies, on
    another node if its own is gone; rows that it had in memory are computed again on request. If other jobs hold the resources,
    actors wait, and the display says so; if they would not even fit on the empty cluster, they wait for at most
    `scale.wait_for_nodes_s`. Raises ClusterError: one cannot start.
    """
    teacher, need = plan.experiment.stage("student", Path("/"), {}).teacher, plan.reservation()
    if teacher is None or weights is None or need.service is None:
        yield ()
        return
    each, actors = need.service, dict[str, Any]()
    nodes = nodes_for_actors(cluster.nodes, need)
    try:
        for number in range(each.num_workers):
            name = f"{session.run_dir.root.name}-{time.time_ns():x}-teacher-{number}"
            actors[name] = start_actor(name, each, nodes[number].node_id if nodes else None)
        session.display.print(f"teacher.service: {each.num_workers} × {each} for {teacher.model}")
        limit_s = plan.experiment.scale.wait_for_nodes_s
        session.wait_for(lambda: wait_until_started(session.display, actors, each, limit_s))
        yield tuple(actors)
    finally:
        _end(actors)


def start_actor(name: str, each: Reservation, node_id: str | None = None) -> Any:
    """Start an actor and return its handle. A worker's `ActorConnection` finds it by its name.

    It runs on the node `node_id` while that node is alive.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trainables.teachers.service.actor import TeacherActor
    from trainables.worker.actor_connection import ACTOR_NAMESPACE
    from trainables.worker.trainer import runtime_env

    actor_class = ray.remote(TeacherActor).options(
        name=name,
        namespace=ACTOR_NAMESPACE,
        max_restarts=-1,
        num_cpus=each.cpus,
        num_gpus=each.gpus,
        runtime_env=runtime_env(bool(each.gpus)),
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True) if node_id else "DEFAULT",
    )
    return actor_class.remote("cuda" if each.gpus else "cpu", each.cpus)


def wait_until_started(display: Display, actors: dict[str, Any], reservation: Reservation, limit_s: float) -> None:
    """Wait until all actors have started. Raises ClusterError: one cannot start."""
    import ray

    node_wait = NodeWait()
    starting = [actor.counts.remote() for actor in actors.values()]
    while True:
        started, starting = ray.wait(starting, num_returns=len(starting), timeout=WAIT_MESSAGE_S)
        try:
            ray.get(started)
        except ray.exceptions.ActorUnavailableError:  # its first request waits for the restart
            display.print("teacher.service: an actor died while starting; Ray is restarting it")
        except ray.exceptions.RayError as error:
            raise ClusterError(f"teacher.service: its actors cannot start: {str(error).splitlines()[0]}") from error
        if not starting:
            return
        if refusal := node_wait.refusal(reservation, limit_s, lambda line: display.print(f"teacher.service: {line}")):
            raise ClusterError(f"teacher.service: {refusal}")
        if not node_wait.is_waiting:
            display.print("teacher.service: the cluster has no room for its actors yet; still waiting")


def _end(actors: dict[str, Any]) -> None:
    import ray

    with contextlib.suppress(RayLostError):  # a lost Ray takes its actors with it, and ray.kill would wait for it
        check_ray()
        for actor in actors.values():
            with contextlib.suppress(Exception):  # its node may be gone
                ray.kill(actor)
