"""Memory of a Ray Train worker of ours beside the plain script's, at the same work, told in two ways.

A worker with its loader, by proportional set size: the script's loader is a process of its own, ours are threads in the worker.
And the peak resident size of the worker's process alone, which leaves the script's loader out, and counts libraries as if no
other process had them.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch

from service.cluster.connect import connect
from tests.benchmarks.pairs import Pair
from tests.benchmarks.process import peak_rss_mib, pss_mib
from tests.benchmarks.rounds import Bar, Comparison
from trainables.engine.job import Job
from trainables.worker import entry_points
from trainables.worker.entry_points import train_loop_per_worker
from trainables.worker.process_group import ProcessGroup
from trainables.worker.trainer import CPU_MALLOC

RATIO, MORE_MIB = 1.05, 50.0


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    pair = Pair("resnet20", "resnet8", 32, 64, warmup_steps=5, steps=10 if short else 40)
    with tempfile.TemporaryDirectory() as name, connect(4, Path(name)):
        yield [line for num_workers in ((1,) if short else (1, 2)) for line in compare(pair, num_workers, Path(name))]


def compare(pair: Pair, num_workers: int, folder: Path) -> list[Comparison]:
    """One world size. The other lines are of the first one's rounds; the last tells what the work adds to an empty process."""
    alone: dict[int, tuple[float, float]] = {}
    added: dict[int, tuple[float, float]] = {}

    def measure(number: int) -> tuple[float, float]:
        ours, peer = of_worker(pair, num_workers, folder), pair.plain(num_workers)
        alone[number] = ours["peak_mib"], peer["peak_mib"]
        added[number] = ours["peak_mib"] - ours["empty_mib"], peer["peak_mib"] - peer["empty_mib"]
        return ours["pss_mib"], peer["pss_mib"]

    title = f"memory of rank 0, {num_workers} worker{'s' if num_workers > 1 else ''}"
    part = f"ours / ({RATIO} · peer + {MORE_MIB:g} MiB)"
    return [
        Comparison(f"{title}, with its loader: {part}", "MiB", measure, Bar("≤", 1.0), figure=part_of_allowed),
        Comparison(f"{title}, its process alone: {part}", "MiB", alone.__getitem__, None, figure=part_of_allowed),
        Comparison(
            f"{title}: what the work adds to an empty Ray Train worker / to the imports of the script",
            "MiB",
            added.__getitem__,
            None,
        ),
    ]


def part_of_allowed(ours: float, peer: float) -> float:
    """Our memory as a part of what the bar allows."""
    return ours / (RATIO * peer + MORE_MIB)


def of_worker(pair: Pair, num_workers: int, folder: Path) -> dict[str, float]:
    """`peak_mib` of rank 0 over a whole stage, as `trainer.fit` runs it, `pss_mib` at its end and `empty_mib` before its work."""
    config = pair.config(folder, num_workers)
    answer = Path(config.output_dir) / "memory.json"
    ray.train.torch.TorchTrainer(
        train_and_tell,
        train_loop_config={"config": config.model_dump(mode="json"), "answer": str(answer)},
        torch_config=ProcessGroup(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 2.0}),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"),
            name=Path(config.output_dir).name,
            worker_runtime_env={"env_vars": CPU_MALLOC},
        ),
    ).fit()
    memory: dict[str, float] = json.loads(answer.read_text())
    return memory


def train_and_tell(settings: dict[str, Any]) -> None:
    """In the worker: the product's own train function, then what it has held."""
    empty_mib, at_the_end = peak_rss_mib(), list[float]()
    run = entry_points.run_job

    def run_and_measure(job: Job) -> dict[str, float]:
        summary = run(job)
        at_the_end.append(pss_mib())  # as in the script: models, gradients and loader still stand
        return summary

    entry_points.run_job = run_and_measure
    train_loop_per_worker(settings["config"])
    if ray.train.get_context().get_world_rank() == 0:
        memory = {"peak_mib": peak_rss_mib(), "pss_mib": at_the_end[0], "empty_mib": empty_mib}
        Path(settings["answer"]).write_text(json.dumps(memory))
