"""The actors of `teacher.service`: started before the students of a run or sweep, ended after them, however they end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.cluster.local_ray import RayLostError, check_ray
from service.cluster.resources import Cluster, Reservation, nodes_for_actors
from service.runs.display import Display, wait_for
from service.runs.plan import Plan
from trainables.errors import ClusterError

WORD_S = 60.0
"""Between two words about actors that find no room."""


@contextlib.contextmanager
def serving(run: str, display: Display, plan: Plan, cluster: Cluster, weights: str | None) -> Iterator[tuple[str, ...]]:
    """The names of the actors that answer for the teacher with these weights; none where workers run it, or where none is asked.

    An actor that dies Ray starts again, on another node where its own is gone; what it remembered is computed again when it is
    asked for. Actors that other jobs leave no room for wait, and say so. Their names begin with that of the `run`.

    Raises:
        ClusterError: one cannot start.
    """
    teacher, need = plan.experiment.stage("student", Path("/"), {}).teacher, plan.reservation()
    if teacher is None or weights is None or need.service is None:
        yield ()
        return
    import ray

    each, actors = need.service, dict[str, Any]()
    nodes = nodes_for_actors(cluster.nodes, need)
    try:
        for number in range(each.num_workers):
            name = f"{run}-{time.time_ns():x}-teacher-{number}"
            actors[name] = start(name, each, nodes[number].node_id if nodes else None)
        kind = "GPU" if plan.use_gpu else f"{each.cpus} CPU{'s' if each.cpus > 1 else ''}"
        display.say(f"teacher.service: {each.num_workers} × {kind} for {teacher.model}")
        wait_for(lambda: _stand(display, actors), display)
        yield tuple(actors)
        with contextlib.suppress(ray.exceptions.RayError):  # it is only told
            counts = ray.get([actor.counts.remote() for actor in actors.values()], timeout=5)
            computed, answered = (sum(count[name] for count in counts) for name in ("computed", "answered"))
            display.say(
                f"teacher.service: since its actors were last started {teacher.model} ran for {computed:,} images, "
                f"and {answered:,} were answered"
            )
    finally:
        with contextlib.suppress(RayLostError):  # the actors end with their Ray, which would be waited for
            check_ray()
            for actor in actors.values():
                with contextlib.suppress(Exception):  # its node may be gone
                    ray.kill(actor)


def start(name: str, each: Reservation, node_id: str | None = None) -> Any:
    """The handle of a new actor of a teacher's service, which `trainables.worker.entry_points.ActorLine` finds by its name.

    `node_id`: where it stands, as long as that node does.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trainables.teachers.service.actor import TeacherActor
    from trainables.worker.entry_points import CPU_MALLOC, TEACHERS

    environment = {} if each.gpus else {"env_vars": {k: v for k, v in CPU_MALLOC.items() if k not in os.environ}}
    return (
        ray.remote(TeacherActor)
        .options(
            name=name, namespace=TEACHERS, max_restarts=-1, num_cpus=each.cpus, num_gpus=each.gpus, runtime_env=environment,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True) if node_id else "DEFAULT",
        )
        .remote("cuda" if each.gpus else "cpu", each.cpus)
    )  # fmt: skip


def _stand(display: Display, actors: dict[str, Any]) -> None:
    """Return once all actors have been started. Raises ClusterError where one cannot."""
    import ray

    waiting = [actor.counts.remote() for actor in actors.values()]
    while True:
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=WORD_S)
        try:
            ray.get(ready)
        except ray.exceptions.ActorUnavailableError:  # it died and is being started again; whoever asks it first waits for that
            display.say("teacher.service: an actor died while it started: Ray starts it again")
        except ray.exceptions.RayError as error:
            raise ClusterError(f"teacher.service: its actors cannot start: {str(error).splitlines()[0]}") from error
        if not waiting:
            return
        display.say("teacher.service: the cluster has no room for its actors yet: still waiting")
