"""The guided searcher beside those that see a black box, on simulated clusters.

Each cluster is searched by ours until it has nothing more to ask; then by each peer with as many GPU-seconds as that took. Seeds
0–99 are there to tune on, 100–299 are reported. TPE needs optuna, BOHB needs hpbandster; what is not installed is left out.
`python -m tests.benchmarks.search --seeds 0 100` prints a row a cluster, and `--metric gpu_s_per_epoch` asks for another best.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.benchmarks.peers.searchers import NEEDS, PEERS
from tests.benchmarks.rounds import Bar, Comparison
from tests.benchmarks.simulation.cluster import METRICS, Cluster
from tests.benchmarks.simulation.session import Session, grid_gpu_s

REPORTED, SHORT = range(100, 300), range(100, 104)
PROCESSES = 2
MAX_STEPS = 200
FRONT = "pareto"
"""The metric that asks for many points, which the peers do not search for here."""
LEAST_PCT = 1e-3
"""A regret is not told more finely; a ratio of two needs it above zero."""
TIE = 0.001
"""Two regrets as near as this are the same: the truth itself is not known better."""


@dataclass(frozen=True)
class Row:
    """What came out on one cluster. Regrets are shares of the best figure."""

    seed: int
    kind: str
    num_points: int
    num_feasible: int
    num_probes: int
    gpu_share: float
    """GPU-seconds ÷ the whole grid's."""
    thinking_s: float
    """Of a proposal, the mean."""
    longest_s: float
    ours: float
    peers: dict[str, float]
    why: str

    @property
    def is_best(self) -> bool:
        return all(self.ours <= regret + TIE for regret in self.peers.values())


def search_one(seed: int, metric: str, peers: tuple[str, ...]) -> Row:
    """Ours, then the peers with the same GPU-seconds."""
    from service.search.guided import Guided, Hardware, Observation

    cluster = Cluster(seed)
    plant = cluster.plant
    hardware = Hardware(plant.nodes, plant.gpus_per_node, plant.cores.threads)
    session, thinking_s = Session(cluster, 0), [0.0]
    began = time.perf_counter()
    guided = Guided(cluster.possible, hardware, metric=metric, seed=seed, max_steps=MAX_STEPS)
    thinking_s[0] += time.perf_counter() - began
    for _ in range(2 * len(cluster.points)):
        began = time.perf_counter()
        point = guided.ask(session.group or None)
        thinking_s[-1] += time.perf_counter() - began
        if point is None:
            break
        probe = session.probe(point, MAX_STEPS, enough=guided.enough)
        began = time.perf_counter()
        gpu_mib = plant.memory.gpu_mib
        seen = Observation(probe.status, probe.steps_s, probe.phases_s, probe.peak_memory_mib, gpu_mib, probe.start_s)
        guided.tell(point, seen)
        thinking_s.append(time.perf_counter() - began)
    return Row(
        seed=seed,
        kind=cluster.kind,
        num_points=len(cluster.points),
        num_feasible=sum(cluster.status(point) == "ok" for point in cluster.points),
        num_probes=session.num_probes,
        gpu_share=session.gpu_s / grid_gpu_s(cluster),
        thinking_s=float(np.mean(thinking_s)),
        longest_s=max(thinking_s),
        ours=cluster.front_regret(guided.front()) if metric == FRONT else cluster.regret(guided.best(), metric),
        peers={name: cluster.regret(PEERS[name](cluster, session.gpu_s, 1, metric), metric) for name in peers},
        why=guided.why(),
    )


def search_all(seeds: range, metric: str, peers: tuple[str, ...], say: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """A row a seed, in order; the same for the same seeds but for the times."""
    rows = []
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(functools.partial(search_one, metric=metric, peers=peers), seeds):
            say(row)
            rows.append(row)
    return rows


def installed_peers() -> tuple[str, ...]:
    """Says in a line what is left out."""
    missing = sorted({package for package in NEEDS.values() if importlib.util.find_spec(package) is None})
    for package in missing:
        names = ", ".join(name for name, needed in NEEDS.items() if needed == package)
        print(f"left out: {names}: {package} is not installed")
    return tuple(name for name in PEERS if NEEDS.get(name) not in missing)


def summary(rows: list[Row]) -> str:
    """The table of all searchers, and ours by what binds the clusters."""
    lines = [f"{len(rows)} clusters  regret, %: median   95th    mean   ours no worse"]

    def line(name: str, regrets: list[float], beaten: float) -> str:
        median, high, mean = 100 * np.median(regrets), 100 * np.percentile(regrets, 95), 100 * np.mean(regrets)
        return f"  {name:26} {median:7.2f} {high:7.2f} {mean:7.2f} {100 * beaten:12.0f} %"

    lines.append(line("guided", [row.ours for row in rows], float(np.mean([row.is_best for row in rows]))))
    for name in rows[0].peers:
        regrets = [row.peers[name] for row in rows]
        lines.append(line(name, regrets, float(np.mean([row.ours <= row.peers[name] + TIE for row in rows]))))
    for kind in sorted({row.kind for row in rows}):
        some = [row for row in rows if row.kind == kind]
        lines.append(line(f"guided, {kind}-bound", [row.ours for row in some], float(np.mean([row.is_best for row in some]))))
    share = [row.gpu_share for row in rows]
    lines.append(
        f"  GPU-seconds ÷ grid: median {np.median(share):.3f}, mean {np.mean(share):.3f}, 95th {np.percentile(share, 95):.3f}"
    )
    thinking_s, longest_s = np.mean([row.thinking_s for row in rows]), max(row.longest_s for row in rows)
    lines.append(f"  a proposal: mean {thinking_s:.3f} s, longest {longest_s:.3f} s")
    return "\n".join(lines)


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    peers = installed_peers()

    @functools.cache
    def rows() -> list[Row]:
        found = search_all(SHORT if short else REPORTED, "images_per_s", peers)
        print(summary(found))
        return found

    def against(value: float, figure: Callable[[list[Row]], float]) -> Callable[[int], tuple[float, float]]:
        return lambda number: (figure(rows()), value)

    def regret_pct(quantile: float, name: str | None = None) -> Callable[[list[Row]], float]:
        def figure(found: list[Row]) -> float:
            regrets = [row.ours if name is None else row.peers[name] for row in found]
            return max(100.0 * float(np.percentile(regrets, quantile)), LEAST_PCT)

        return figure

    def beside(name: str) -> Callable[[int], tuple[float, float]]:
        return lambda number: (regret_pct(50)(rows()), regret_pct(50, name)(rows()))

    at_most, at_least = Bar("≤", 1.0), Bar("≥", 1.0)
    yield [
        Comparison("median regret / 1 %", "%", against(1.0, regret_pct(50)), at_most),
        Comparison("95th percentile of the regret / 3 %", "%", against(3.0, regret_pct(95)), at_most),
        Comparison("GPU-seconds, share of the grid's, median / 0.10", "", against(
            0.10, lambda found: float(np.median([row.gpu_share for row in found]))), at_most),
        Comparison("a proposal, the slowest cluster's mean / 0.2 s", "s", against(
            0.2, lambda found: max(row.thinking_s for row in found)), at_most),
        Comparison("clusters where no peer is better / 90 %", "%", against(
            90.0, lambda found: max(100.0 * float(np.mean([row.is_best for row in found])), LEAST_PCT)), at_least),
        *(Comparison(f"median regret / that of {name}", "%", beside(name), None) for name in peers),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.search", description="A row a simulated cluster.")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 100), metavar=("FIRST", "END"))
    parser.add_argument("--metric", choices=(*METRICS, FRONT), default="images_per_s")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = search_all(range(*args.seeds), args.metric, () if args.alone or args.metric == FRONT else installed_peers(), say)
    print(summary(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def say(row: Row) -> None:
    """One line."""
    worst = "  ".join(f"{name} {100 * regret:.2f}" for name, regret in row.peers.items())
    print(
        f"{row.seed:4} {row.kind:8} {row.num_feasible:3}/{row.num_points:3} points  {row.num_probes:3} probes"
        f"  {row.gpu_share:.3f} of the grid  {row.thinking_s:.3f} s  regret {100 * row.ours:.2f} %  {worst}  {row.why}",
        flush=True,
    )


if __name__ == "__main__":
    main()
