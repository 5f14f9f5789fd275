"""What `teacher.cache` saves: an epoch from kept logits beside the student alone, one from kept embeddings beside one with the
teacher, and students that share a teacher.

They are kept for images that are cropped and flipped anew in each epoch, as in training; a round trains on the first images of
epoch 0, in one process without evaluation.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.pairs import Pair
from tests.benchmarks.rounds import Bar, Comparison, in_turn
from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.engine.job import Job
from trainables.engine.train import build, train_epoch
from trainables.teachers.service.protocol import TeacherConnection

STUDENTS = 3
EMBED = {"distill": {"method": ["embed"], "options": {"embed": {"map": 0}}}}
PAIRS = {name: Pair(name, "resnet8", 32, 64, warmup_steps=0, steps=1) for name in ("resnet56", "wrn-40-2")}
COSTLY = 4.0
"""A teacher costs so many steps of its student, or is told and not judged: sharing saves k students at most (k − 1)/k of it."""
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@contextlib.contextmanager
def comparisons(short: bool, records: Path | None = None) -> Iterator[list[Comparison]]:
    """`records`: packed CIFAR-10; without it the images are noise."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as jobs:
        folder = Path(name)
        lines = []
        for teacher, pair in PAIRS.items():
            bench = Bench(pair, folder / teacher, records, steps=2 if short else 16)
            title = f"{teacher} → resnet8, {'CIFAR-10' if records else 'noise'}"
            if not lines:  # with a full cache it is all the same whose it is
                for what, ours, peer, bar in (
                    ("KD with a full cache / student alone", bench.full(jobs), bench.job(jobs, teacher=None), Bar("≤", 1.1)),
                    (
                        "embed with a full cache / with the teacher",
                        bench.full(jobs, **EMBED),
                        bench.job(jobs, **EMBED),
                        Bar("≤", 0.6),
                    ),
                ):
                    measure = partial(bench.blocks_s, ours, peer, 1 if short else 5)
                    lines.append(Comparison(f"{title}: {what}", "s/step", measure, bar))
            sides = partial(bench.students_s, shared=True), partial(bench.students_s, shared=False)
            who = f"{STUDENTS} students that share a cache, filling it / {STUDENTS} that do not"
            about, bar = bench.judged()
            lines.append(Comparison(f"{title}: {who} ({about})", "s", in_turn(*sides), bar))
            if short:
                break
        yield lines


class Bench:
    """One teacher and its students."""

    def __init__(self, pair: Pair, folder: Path, records: Path | None, steps: int) -> None:
        folder.mkdir()
        self._folder, self._steps = folder, steps
        config = pair.config(folder, 1, CIFAR10 if records else tuple(str(label) for label in range(10)))
        data = {"augment": "pad_crop_flip", "synthetic_images": steps * pair.global_batch_size}
        if records:
            data["path"] = str(records)
        tree = config.model_dump()
        self._tree = {
            **tree,
            "data": {**tree["data"], **data},
            "train": {**tree["train"], "max_steps": None},
            "optim": {"epochs": 1},
            "distill": {},
        }

    @property
    def num_images(self) -> int:
        """Of a round."""
        return int(self._steps * self._tree["data"]["global_batch_size"])

    def job(self, jobs: contextlib.ExitStack, *, connections: Sequence[TeacherConnection] = (), **changes: Any) -> Job:
        """A job that is closed with `jobs`. `teacher`: None, or what is changed of it."""
        teacher = changes.pop("teacher", {})
        taught = {"teacher": {**self._tree["teacher"], **teacher}} if teacher is not None else {"teacher": None, "distill": None}
        tree = {**self._tree, **taught, **changes, "output_dir": tempfile.mkdtemp(dir=self._folder)}
        config = TrainConfig.model_validate(tree)
        return jobs.enter_context(contextlib.closing(build(config, Group(), Recorded(), no_telemetry, connections=connections)))

    def full(self, jobs: contextlib.ExitStack, **changes: Any) -> Job:
        """A job whose cache holds all that it asks for; its teacher was never built."""
        kept = {"cache": str(self._folder / "full")}
        with contextlib.ExitStack() as filling:
            self.train_s(self.job(filling, teacher=kept, **changes))
        return self.job(jobs, teacher=kept, **changes)

    def judged(self) -> tuple[str, Bar | None]:
        """What the teacher costs beside a step of the student alone, as text, and what sharing it is held to."""
        taken: dict[bool, list[float]] = {True: [], False: []}
        with contextlib.ExitStack() as jobs:
            sides = {True: self.job(jobs), False: self.job(jobs, teacher=None)}
            for job in sides.values():
                self.train_s(job)
            for _ in range(3):
                for taught, job in sides.items():
                    taken[taught].append(self.train_s(job))
        cost = statistics.median(taken[True]) / statistics.median(taken[False]) - 1
        least = (STUDENTS + cost) / (STUDENTS * (1 + cost))
        return f"teacher = {cost:.1f} steps of the student, at best {least:.2f}", Bar("≤", 0.6) if cost >= COSTLY else None

    def train_s(self, job: Job) -> float:
        """Seconds of the steps, and of what has to be on disk after them."""
        progress, began = job.progress, time.perf_counter()
        train_epoch(job, stop_at=progress.step + self._steps)
        job.train_state.teacher.end_epoch()
        progress.position = 0
        return time.perf_counter() - began

    def blocks_s(self, ours: Job, peer: Job, blocks: int, number: int) -> tuple[float, float]:
        """Seconds of a step on either side, medians over short blocks that take turns."""
        taken: dict[int, list[float]] = {id(ours): [], id(peer): []}
        for block in range(blocks):
            for job in (ours, peer) if (block + number) % 2 else (peer, ours):
                taken[id(job)].append(self.train_s(job) / self._steps)
        return statistics.median(taken[id(ours)]), statistics.median(taken[id(peer)])

    def students_s(self, *, shared: bool) -> float:
        """Seconds of students one after the other, their starts included; the shared cache is empty at first."""
        cache = tempfile.mkdtemp(dir=self._folder) if shared else None
        began = time.perf_counter()
        for seed in range(STUDENTS):
            with contextlib.ExitStack() as jobs:
                self.train_s(self.job(jobs, teacher={"cache": cache}, optim={"epochs": 1, "lr": 0.1 + 0.01 * seed}))
        return time.perf_counter() - began
