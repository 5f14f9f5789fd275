"""`python -m tests.faults storm`: the tiers in turn, each trial a line, and the table."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from service.tracking.stores import NO_TELEMETRY
from tests.faults.storm import supervised_head
from tests.faults.storm.http_tier import mlflow_tier, s3_tier
from tests.faults.storm.process_tier import ProcessTier, small_disk, workloads
from tests.faults.storm.ray_tier import RayTier, Scenario
from tests.faults.storm.scenarios import cluster_scenarios, scenarios
from tests.faults.storm.table import Table, Trial
from tests.integration.conftest import RayCluster

SHARES = {"processes": 0.25, "servers": 0.15, "ray": 0.4, "cluster": 0.2}
"""Of the minutes; those of a tier that is not asked for go to the others."""
Draw = Callable[[], Trial]


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 where something was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tier", action="append", choices=list(SHARES), help="all, unless some are named")
    parser.add_argument("--only", default="", help="kinds of faults whose names hold this text, and the workloads that know them")
    options = parser.parse_args(arguments)
    os.environ |= NO_TELEMETRY
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    console, table = Console(width=200, highlight=False, soft_wrap=True), Table()
    tiers = options.tier or list(SHARES)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for tier in tiers:
                seconds = 60 * options.minutes * SHARES[tier] / sum(SHARES[each] for each in tiers)
                # A generator of its own each: what one tier draws does not depend on how far another came.
                run_tier(tier, random.Random(f"{options.seed} {tier}"), options.only, seconds, table, console)
    finally:  # whoever has enough sees what there is so far, and so does who finds an error of the storm's own
        console.print(
            f"seed {options.seed}: {table.num_faults} faults in {len(table.trials)} jobs, {table.num_losses} with losses"
        )
        for line in table.markdown():
            console.print(line)
    return 1 if table.num_losses else 0


def run_tier(tier: str, rng: random.Random, only: str, seconds: float, table: Table, console: Console) -> None:
    """Trials of a tier's workloads in turn, for so long. Its folder stays where something was lost."""
    folder, first = Path(tempfile.mkdtemp(prefix="storm-")), len(table.trials)
    try:
        with TIERS[tier](folder, rng, only) as draws:
            end_s = time.monotonic() + seconds
            for draw in itertools.cycle(draws):
                if time.monotonic() > end_s:
                    break
                began_s = time.monotonic()
                trial = draw()
                table.trials.append(trial)
                show(console, trial, time.monotonic() - began_s)
    finally:
        if not any(trial.losses for trial in table.trials[first:]):
            shutil.rmtree(folder, ignore_errors=True)


def show(console: Console, trial: Trial, seconds: float) -> None:
    """A line of it."""
    struck = ", ".join(fault.kind for fault in trial.faults) or "nothing struck"
    console.print(f"{'LOSS' if trial.losses else 'ok':4} {trial.workload} ({seconds:.0f} s): {struck}")
    for loss in trial.losses:
        console.print(f"       {loss}", markup=False)


@contextlib.contextmanager
def processes(folder: Path, rng: random.Random, only: str) -> Iterator[list[Draw]]:
    """Jobs without Ray."""
    (folder / "shared").mkdir()
    with small_disk(folder / "disk") as can_fill:
        tier = ProcessTier(folder / "disk", rng, can_fill)
        kinds = [kind for kind in tier.kinds if only in kind]
        yield [partial(tier.trial, each, kinds) for each in workloads(folder / "shared") if kinds]


@contextlib.contextmanager
def servers(folder: Path, rng: random.Random, only: str) -> Iterator[list[Draw]]:
    """MLflow's server and S3 behind proxies."""
    with mlflow_tier(folder / "mlflow", rng) as mlflow, s3_tier(folder / "s3", rng) as s3:
        known = [(tier, [kind for kind in tier.kinds if only in kind]) for tier in (mlflow, s3)]
        yield [partial(tier.trial, kinds) for tier, kinds in known if kinds]


@contextlib.contextmanager
def local_ray(folder: Path, rng: random.Random, only: str) -> Iterator[list[Draw]]:
    """Commands on a Ray of their own."""
    with RayTier(folder / "ray", rng) as tier:
        yield _draws(tier, scenarios(folder, tier.distill.experiment), only)


@contextlib.contextmanager
def cluster_ray(folder: Path, rng: random.Random, only: str) -> Iterator[list[Draw]]:
    """Commands on three nodes. A socket's path may have 107 characters: the cluster's folder has a short name."""
    with tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as short:
        lasting = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{short}/gcs"}
        cluster = RayCluster(Path(short), cpus=3, head_env=lasting)
        try:
            cluster.add((sys.executable, supervised_head.__file__))
            cluster.add()
            cluster.add()
            with RayTier(folder / "cluster", rng, cluster) as tier:
                yield _draws(tier, cluster_scenarios(tier.distill.runs, tier.distill.experiment), only)
        finally:
            cluster.close()


def _draws(tier: RayTier, found: list[Scenario], only: str) -> list[Draw]:
    # A short storm does not come to all of them: each seed begins with others.
    known = [(each, tuple(kind for kind in each.kinds if only in kind)) for each in tier.rng.sample(found, len(found))]
    return [partial(tier.trial, scenario, kinds) for scenario, kinds in known if kinds]


TIERS = {"processes": processes, "servers": servers, "ray": local_ray, "cluster": cluster_ray}
