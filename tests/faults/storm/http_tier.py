"""The tier of servers: records that go to a real MLflow server, and records of images on S3, behind a proxy with faults."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.storm import jobs
from tests.faults.storm.children import Job
from tests.faults.storm.oracle import delivery_losses, lock_losses, sent_numbers, stage_losses
from tests.faults.storm.process_tier import unless_ended_well
from tests.faults.storm.proxy import FaultyProxy, Plan, proxy_to
from tests.faults.storm.table import Fault, Trial
from tests.integration.test_mlflow_server import Server
from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import encoded, photo
from tests.trainables.data.storage.test_remote import S3
from tests.trainables.jobs import config
from trainables.rundir import RunDir, StageDir

ANSWERS = ["HTTP 401", "HTTP 429", "HTTP 500", "HTTP 503", "garbage for an answer", "no HTTP"]
LINES = ["connection reset", "answer lost", "answer cut short", "10 s a call"]
MLFLOW, SERVER_KILLED = "MLflow server", "kill -9 of the server"
S3_WORKLOAD = "train from S3"
MAX_FAULTS = 4
"""Of one delivery or training: fewer than the times that a shard is fetched."""


@dataclass
class MlflowTier:
    """Deliveries to a real server; use `mlflow_tier`."""

    folder: Path
    rng: random.Random
    server: Server
    proxy: FaultyProxy
    _serial: Iterator[int] = field(default_factory=itertools.count)

    kinds = (*ANSWERS, *LINES, SERVER_KILLED)

    def trial(self, kinds: list[str] | None = None) -> Trial:
        """A delivery in which several answers go wrong, or the server is killed."""
        kinds = kinds or list(self.kinds)
        folder = self.folder / f"delivery-{next(self._serial)}"
        folder.mkdir()
        if of_requests := [kind for kind in kinds if kind != SERVER_KILLED]:
            self.proxy.plan = Plan(self.rng, of_requests, share=0.3, most=self.rng.randint(2, MAX_FAULTS))
        faults, losses = list[Fault](), list[str]()
        with Job(1, jobs.deliver, folder, self.proxy.uri, "run", [None]) as job:
            if SERVER_KILLED in kinds and self.rng.random() < 0.3:
                self.server.kill()
                self.server.start()
                self.server.ready()
                faults.append(Fault(SERVER_KILLED, MLFLOW))
            losses += [each for ended in job.end() for each in unless_ended_well(ended)]
        faults += [Fault(kind, MLFLOW) for kind in (self.proxy.plan.struck if self.proxy.plan else [])]
        self.proxy.plan = None
        run_dir = RunDir(folder / "run")
        if not losses:
            expected = sent_numbers(run_dir)
            losses += delivery_losses(self.server.root / "mlflow.db", run_dir, jobs.KEY, expected)
            losses += lock_losses(folder)
        return Trial(MLFLOW, tuple(faults), tuple(losses))


@contextlib.contextmanager
def mlflow_tier(folder: Path, rng: random.Random) -> Iterator[MlflowTier]:
    """A real MLflow server on a store of its own, and a proxy before it."""
    from service.tracking.sender import create_database

    folder.mkdir()
    server = Server(folder)
    create_database(folder / "mlflow.db", (folder / "artifacts").as_uri())
    server.start()
    try:
        server.ready()
        with proxy_to(server.port) as proxy:
            yield MlflowTier(folder, rng, server, proxy)
    finally:
        server.kill()


@dataclass
class S3Tier:
    """Trainings on a packed set behind a URI; use `s3_tier`."""

    folder: Path
    rng: random.Random
    proxy: FaultyProxy
    start: Callable[[Path], Job]
    _serial: Iterator[int] = field(default_factory=itertools.count)

    kinds = ("HTTP 500", "HTTP 503", "no HTTP", "connection reset", "answer cut short", "bytes that trickle", "a bit altered")

    def trial(self, kinds: list[str] | None = None) -> Trial:
        """A training of which several reads go wrong."""
        whole = self.folder / "whole"
        if not whole.exists():
            self._train(whole)
        self.proxy.plan = plan = Plan(
            self.rng, list(kinds or self.kinds), share=0.3, most=self.rng.randint(2, MAX_FAULTS), methods=("GET",)
        )
        folder = self.folder / f"training-{next(self._serial)}"
        losses = self._train(folder)
        self.proxy.plan = None
        losses = losses or [*stage_losses(StageDir(whole / "student"), StageDir(folder / "student")), *lock_losses(folder)]
        if not losses:
            shutil.rmtree(folder)
        return Trial(S3_WORKLOAD, tuple(Fault(kind, S3_WORKLOAD) for kind in plan.struck), tuple(losses))

    def _train(self, folder: Path) -> list[str]:
        folder.mkdir()
        with self.start(folder) as job:
            return [each for ended in job.end() for each in unless_ended_well(ended)]


@contextlib.contextmanager
def s3_tier(folder: Path, rng: random.Random) -> Iterator[S3Tier]:
    """moto's S3 with a packed set of images in several shards, and a proxy before it."""
    images = folder / "images"
    for split, count in (("train", 40), ("val", 4)):
        for label in range(4):
            (images / split / str(label)).mkdir(parents=True)
            for number in range(count):
                image = encoded(photo(100 * label + number, 32, 32), "JPEG", quality=90)
                (images / split / str(label) / f"{number}.jpg").write_bytes(image)
    pack_here(images, folder / "packed", shard_bytes=20_000)
    server = S3(folder / "packed")
    try:
        with proxy_to(server.port) as proxy:
            keys = {"AWS_ENDPOINT_URL": proxy.uri, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
            environment = {**keys, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}

            def start(out: Path) -> Job:
                data = {"path": "s3://bucket/set", "stage": str(out / "node"), "image_size": 32, "global_batch_size": 16}
                train = {"checkpoint_every": 4, "log_every": 2}
                settings = config(out / "student", teacher=None, data=data, optim={"epochs": 2}, train=train)
                return Job(1, jobs.train, out, settings, [None], environment=environment)

            yield S3Tier(folder, rng, proxy, start)
    finally:
        server.kill()
