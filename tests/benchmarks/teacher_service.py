"""What `teacher.service` saves: students side by side that share an actor of a real Ray, beside students with a teacher each.

Both sides train the same students at the same time, each a thread of this process with one compute thread, on the first images of
epoch 0, their models' building included; the actor, a process of its own, stands before, and knows nothing yet.
"""

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ray

from service.cluster.connect import connect
from service.cluster.resources import Reservation
from service.runs.stages import teacher_actors as teachers
from tests.benchmarks.rounds import Comparison, in_turn
from tests.benchmarks.teacher_cache import PAIRS, STUDENTS, Bench
from trainables.engine.job import Job
from trainables.worker.actor_connection import ActorConnection


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    with tempfile.TemporaryDirectory() as name, connect(2, Path(name)):
        lines = []
        for teacher, pair in PAIRS.items():
            bench = Bench(pair, Path(name) / teacher, None, steps=2 if short else 16)
            title = f"{teacher} → resnet8, noise: {STUDENTS} students that share a service / "
            sides = in_turn(partial(served_s, bench), partial(together_s, bench))
            about, bar = bench.judged()
            lines.append(Comparison(f"{title}{STUDENTS} with a teacher each ({about})", "s", sides, bar))
            if short:
                break
        yield lines


def served_s(bench: Bench) -> float:
    """Seconds of students side by side whom a new actor answers."""
    name = f"benchmark-{time.time_ns():x}"
    actor = teachers.start_actor(name, Reservation(1, 1))
    try:
        ray.get(actor.counts.remote())
        taken_s = together_s(bench, name)
        assert ray.get(actor.counts.remote())["computed"] == bench.num_images
        return taken_s
    finally:
        ray.kill(actor)


def together_s(bench: Bench, actor: str | None = None) -> float:
    """Seconds of students side by side."""
    began = time.perf_counter()
    with contextlib.ExitStack() as jobs:
        built = list[Job]()
        for number in range(STUDENTS):
            connections = [ActorConnection(actor)] if actor else []
            optim = {"epochs": 1, "lr": 0.1 + 0.01 * number}
            built.append(bench.job(jobs, connections=connections, teacher={"service": 1 if actor else None}, optim=optim))
        students = [threading.Thread(target=bench.train_s, args=(job,)) for job in built]
        for student in students:
            student.start()
        for student in students:
            student.join()
    return time.perf_counter() - began
