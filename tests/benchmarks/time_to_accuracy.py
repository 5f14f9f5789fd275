"""Time to a fixed accuracy at several global batches, predicted from one training and short probes, beside what it takes.

`python -m tests.benchmarks.time_to_accuracy` trains on digits with two ranks. The prediction knows a pilot (one training at the
batch --pilot, its noise scale and its steps) and the time of a step at each batch; it sees none of the trainings that it is
compared with. Learning rates follow McCandlish et al. 2018, lr(B) = lr_max/(1 + B_noise/B), through the pilot's: what is said
holds for that rule. An order of two batches is judged where their times differ by more than twice the error of that difference.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau, spearmanr

from service.search.time_to_accuracy import BatchScaling, Training
from tests.trainables.jobs import train
from trainables.config import TrainConfig
from trainables.distributed.rank_pool import RankPool

WORKERS = 2
PROBE_STEPS = 30
PILOT_SEED = 1000
"""No training that is predicted has it."""


@dataclass
class Row:
    """One global batch."""

    batch: int
    lr: float
    step_s: float
    """Of a probe."""
    every: int
    predicted_steps: float
    predicted_s: float
    noise_scales: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    missed: int = 0
    """Trainings that never reached the target."""

    def mean(self, values: list[float]) -> float:
        return math.exp(statistics.fmean(map(math.log, values)))

    def error(self, values: list[float]) -> float:
        """Of the mean, relative."""
        return statistics.stdev(map(math.log, values)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


class Trainings:
    """Trainings of one model on the same ranks."""

    def __init__(self, args: argparse.Namespace, ranks: RankPool, folder: Path):
        self._args, self._ranks, self._folder = args, ranks, folder

    def run(self, batch: int, lr: float, seed: int, **train_section: Any) -> dict[str, Any]:
        """What rank 0 has of a training."""
        tree = {
            "output_dir": tempfile.mkdtemp(dir=self._folder),
            "model": self._args.model,
            "precision": "fp32",
            "seed": seed,
            "data": {
                "path": self._args.data,
                "image_size": self._args.image_size,
                "global_batch_size": batch,
                "loader_workers": 0,
                "augment": self._args.augment,
                "mean": (0.5, 0.5, 0.5),
                "std": (0.5, 0.5, 0.5),
            },
            "optim": {
                "epochs": self._args.epochs,
                "lr": lr,
                "schedule": "constant",
                "momentum": self._args.momentum,
                "weight_decay": 5e-4,
            },
            "train": {"warmup_steps": 5, "log_every": 20, "checkpoint_every": 10**6, **train_section},
        }
        found: dict[str, Any] = self._ranks.run(WORKERS, train, TrainConfig.model_validate(tree))[0]
        return found

    def to_target(self, batch: int, lr: float, seed: int) -> tuple[dict[str, float], int]:
        """The summary of a training to the target, and the steps between its evaluations."""
        found = self.run(batch, lr, seed, until_top1_pct=self._args.target)
        return found["calls"][-1][2], found["calls"][0][2]["steps_per_epoch"]

    def step_s(self, batch: int, lr: float) -> float:
        """Of a probe that trains nothing through."""
        speed: float = self.run(batch, lr, PILOT_SEED, max_steps=PROBE_STEPS)["calls"][-1][2]["step_s"]
        return speed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.time_to_accuracy", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--pilot", type=int, default=64, help="global batch of the training that the prediction knows")
    parser.add_argument("--lr", type=float, default=0.01, help="the pilot's learning rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=97.0, help="validation top-1 in percent")
    parser.add_argument("--model", default="convnet_large")
    parser.add_argument("--data", default="digits", help="digits, or a path")
    parser.add_argument("--image-size", type=int, default=8)
    parser.add_argument("--augment", default="none")
    parser.add_argument("--epochs", type=int, default=60, help="after which a training has missed the target")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(RankPool(WORKERS)) as ranks:
        rows, scaling, after = measure(args, Trainings(args, ranks, Path(folder)))
    summary = tell(rows, scaling, after)
    if args.json:
        args.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], **summary}, indent=2) + "\n")


def measure(args: argparse.Namespace, trainings: Trainings) -> tuple[list[Row], BatchScaling, BatchScaling]:
    """The rows, and what is believed before and after all trainings."""
    pilot, every = trainings.to_target(args.pilot, args.lr, PILOT_SEED)
    noise = pilot["noise_scale"]
    steps, reached = pilot.get("steps_to_accuracy", pilot["steps"]), "steps_to_accuracy" in pilot
    print(
        f"{args.model} on {args.data} to {args.target:g}%, {WORKERS} ranks; pilot at batch {args.pilot}, lr {args.lr:g}: "
        f"{steps:.0f} steps, noise scale {noise:.0f} images, {pilot['train_s']:.1f} s",
        flush=True,
    )
    scaling = BatchScaling.of([noise], [Training(args.pilot, steps, every, reached)])
    top = args.lr * (1 + noise / args.pilot)
    lrs = [top / (1 + noise / batch) for batch in args.batches]
    speeds = [trainings.step_s(batch, lr) for batch, lr in zip(args.batches, lrs, strict=True)]
    batch_M = np.array(args.batches, dtype=float)
    samples = every * args.pilot
    every_M = np.array([max(1, samples // batch) for batch in args.batches])
    steps_M = scaling.steps_M(batch_M) + every_M / 2
    rows = [
        Row(batch, lr, step_s, int(wait), float(steps), float(steps * step_s))
        for batch, lr, step_s, wait, steps in zip(args.batches, lrs, speeds, every_M, steps_M, strict=True)
    ]
    seen = []
    for seed, row in itertools.product(range(args.seeds), rows):
        summary, row.every = trainings.to_target(row.batch, row.lr, seed)
        row.noise_scales.append(summary.get("noise_scale", math.nan))
        if "time_to_accuracy_s" in summary:
            row.steps.append(summary["steps_to_accuracy"])
            row.seconds.append(summary["time_to_accuracy_s"])
        else:
            row.missed += 1
        seen.append(Training(row.batch, summary["steps"], row.every, "time_to_accuracy_s" in summary))
        print(
            f"  seed {seed}, batch {row.batch}: {summary['steps']:.0f} steps, {summary['train_s']:.2f} s"
            f"{'' if 'time_to_accuracy_s' in summary else ', target missed'}",
            flush=True,
        )
    return rows, scaling, BatchScaling.of([noise], seen)


def tell(rows: list[Row], before: BatchScaling, after: BatchScaling) -> dict[str, Any]:
    """The table and the verdict on the orders."""
    print(
        f"\n{'batch':>6} {'lr':>8} {'step ms':>8} {'noise':>7} | {'steps':>6} {'measured':>9} {'±%':>4} | {'seconds':>8} "
        f"{'measured':>9} {'±%':>4} | runs"
    )
    for row in rows:
        steps, seconds = (row.mean(values) if values else math.nan for values in (row.steps, row.seconds))
        off_steps, off_s = (100 * row.error(values) if values else math.nan for values in (row.steps, row.seconds))
        print(
            f"{row.batch:6d} {row.lr:8.4f} {1e3 * row.step_s:8.1f} {statistics.median(row.noise_scales):7.0f} | "
            f"{row.predicted_steps:6.0f} {steps:9.0f} {off_steps:4.0f} | {row.predicted_s:8.2f} {seconds:9.2f} {off_s:4.0f} | "
            f"{len(row.steps)} of {len(row.steps) + row.missed}"
        )
    whole = [row for row in rows if row.steps and not row.missed]
    summary: dict[str, Any] = {"b_noise": {"predicted": before.b_noise, "of all trainings": after.b_noise}}
    print(
        f"B_noise: {before.b_noise:.0f} predicted, {after.b_noise:.0f} by all trainings; "
        f"S_min: {before.s_min:.0f} and {after.s_min:.0f}"
    )
    for name, predicted, measured in (
        ("steps", [row.predicted_steps for row in whole], [row.steps for row in whole]),
        ("time", [row.predicted_s for row in whole], [row.seconds for row in whole]),
    ):
        summary[name] = order(name, whole, predicted, measured)
    return summary


def order(name: str, rows: list[Row], predicted: list[float], measured: list[list[float]]) -> dict[str, Any]:
    """Rank correlations of predicted and measured figures, and which pairs of batches are told apart and in which order."""
    means = [row.mean(values) for row, values in zip(rows, measured, strict=True)]
    apart, right, wrong = 0, 0, []
    for i, j in itertools.combinations(range(len(rows)), 2):
        error = math.hypot(rows[i].error(measured[i]), rows[j].error(measured[j]))
        if abs(math.log(means[i] / means[j])) > 2 * error:
            apart += 1
            if (predicted[i] < predicted[j]) == (means[i] < means[j]):
                right += 1
            else:
                wrong.append(f"{rows[i].batch} and {rows[j].batch}")
    pairs = len(rows) * (len(rows) - 1) // 2
    rho, tau = float(spearmanr(predicted, means).statistic), float(kendalltau(predicted, means).statistic)
    error = statistics.median(abs(math.log(p / m)) for p, m in zip(predicted, means, strict=True))
    by_order = [rows[place].batch for place in np.argsort(means)], [rows[place].batch for place in np.argsort(predicted)]
    but = f" (not {', '.join(wrong)})" if wrong else ""
    print(
        f"{name}: measured order {by_order[0]}, predicted {by_order[1]}; Spearman {rho:.2f}, Kendall {tau:.2f}; {apart} of "
        f"{pairs} pairs told apart, {right} of them in the predicted order{but}; "
        f"median error {100 * math.expm1(error):.0f}%"
    )
    return {
        "measured": by_order[0],
        "predicted": by_order[1],
        "spearman": rho,
        "kendall": tau,
        "pairs": pairs,
        "apart": apart,
        "right": right,
        "median_error_pct": 100 * math.expm1(error),
    }


if __name__ == "__main__":
    main()
