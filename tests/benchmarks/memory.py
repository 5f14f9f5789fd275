"""Peak resident memory of a Ray Train worker of ours beside the plain script's process, at the same work.

The plain script's loader is a process of its own, whose memory is not counted; ours are threads in the worker.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch

from service import cluster
from tests.benchmarks.pairs import Pair
from tests.benchmarks.process import peak_rss_mib
from tests.benchmarks.rounds import Bar, Comparison, in_turn
from trainables import worker

RATIO, MORE_MIB = 1.05, 50.0


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    pair = Pair("resnet20", "resnet8", 32, 64, warmup_steps=5, steps=10 if short else 40)
    with tempfile.TemporaryDirectory() as name, cluster.connect(4, Path(name)):
        yield [compare(pair, num_workers, Path(name)) for num_workers in ((1,) if short else (1, 2))]


def compare(pair: Pair, num_workers: int, folder: Path) -> Comparison:
    """The figure is our memory's part of what the bar allows."""
    return Comparison(
        f"memory of rank 0, {num_workers} worker{'s' if num_workers > 1 else ''}; ours / ({RATIO} · peer + {MORE_MIB:g} MiB)",
        "MiB",
        in_turn(lambda: worker_mib(pair, num_workers, folder), lambda: pair.plain(num_workers)["peak_rss_mib"]),
        Bar("≤", 1.0),
        figure=lambda ours, peer: ours / (RATIO * peer + MORE_MIB),
    )


def worker_mib(pair: Pair, num_workers: int, folder: Path) -> float:
    """Peak memory of rank 0 over a whole stage, as `worker.fit` runs it."""
    config = pair.config(folder, num_workers)
    answer = Path(config.output_dir) / "peak_mib"
    ray.train.torch.TorchTrainer(
        train_and_tell,
        train_loop_config={"config": config.model_dump(mode="json"), "answer": str(answer)},
        torch_config=worker.ProcessGroup(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 2.0}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "ray"), name=Path(config.output_dir).name),
    ).fit()
    return float(answer.read_text())


def train_and_tell(settings: dict[str, Any]) -> None:
    """In the worker: the product's own train function, then what it has held."""
    worker.train_loop_per_worker(settings["config"])
    if ray.train.get_context().get_world_rank() == 0:
        Path(settings["answer"]).write_text(str(peak_rss_mib()))
