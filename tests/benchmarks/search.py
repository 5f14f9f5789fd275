"""The guided searcher beside those that see a black box, on simulated clusters.

Each cluster is searched by ours until it has nothing more to ask; then by each peer with as many GPU-seconds as that took. All
costs are the simulator's own, in lean grids: one start for each num_workers, a set-up, a warm-up and 40 steps for each point that
runs. Seeds 0–49 have been tuned on; 100–199 are reported, and nobody tunes on them.
In about half of the clusters another tenant comes and goes during the search. TPE needs optuna, BOHB needs hpbandster; what is
not installed is left out.

`python -m tests.benchmarks.search --seeds 0 100` prints a row a cluster, `--alone` leaves the peers out, `--metric
gpu_s_per_epoch` asks for another best, and `--trace SEED` prints each probe of one search.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from tests.benchmarks.adapter_b import ClusterB
from tests.benchmarks.peers.searchers import NEEDS, PEERS
from tests.benchmarks.rounds import Bar, Comparison
from tests.benchmarks.simulation.cluster import METRICS, Cluster, Point
from tests.benchmarks.simulation.session import STEPS, Probe, Session

if TYPE_CHECKING:
    from service.search.planner import Planner

REPORTED, SHORT = range(100, 200), range(1000, 1004)
PROCESSES = 2
FRONT = "pareto"
"""The metric that asks for many points, which the peers do not search for here."""
NEAR = 0.025
"""A choice is good where the best is better by no more than this share."""
MOST_PROBES = 3
"""Of one search, for each of the cluster's points: one that does not end is broken off."""
LEAST_PCT = 1e-3
"""What a share of zero is reported as: ratios need it above zero."""
TIE = 0.001
"""Two regrets as near as this are the same: the truth itself is not known better."""


@dataclass(frozen=True)
class Row:
    """What came out on one cluster. Regrets are shares of the best figure."""

    seed: int
    kind: str
    has_tenant: bool
    num_points: int
    num_feasible: int
    num_probes: int
    lean_grids: float
    """GPU-seconds ÷ those of the lean grid."""
    thinking_s: float
    """Of a proposal, the mean."""
    longest_s: float
    regret: float
    bound: float
    peers: dict[str, float]
    why: str


def search(
    cluster: Cluster, metric: str = "images_per_s", report: Callable[[Session, Point, Probe], None] = lambda *_: None
) -> tuple[Planner, Session, list[float]]:
    """Ours, to its end: the planner, what was spent, and the seconds of each proposal. `report` is called after each probe.

    The planner may ask for a point again: it is then measured again, at the time that it is by then.
    """
    from service.runs.result import ClusterHardware
    from service.search.planner import Planner
    from service.search.points import Observation

    plant = cluster.plant
    hardware = ClusterHardware(nodes=plant.nodes, slots_per_node=plant.gpus_per_node, cpus_per_node=plant.cpu.threads)
    session, thinking_s = cluster.session(0), [0.0]
    began = time.perf_counter()
    planner = Planner(cluster.possible, hardware, metric=metric, seed=cluster.seed, max_steps=STEPS)
    thinking_s[0] += time.perf_counter() - began
    for _ in range(MOST_PROBES * len(cluster.points)):
        began = time.perf_counter()
        point = planner.ask(session.group or None)
        thinking_s[-1] += time.perf_counter() - began
        if point is None:
            break
        probe = session.probe(point, STEPS, should_stop=lambda steps_s, point=point: planner.should_stop(steps_s, point))  # type: ignore[misc]
        report(session, point, probe)
        began = time.perf_counter()
        brought = Observation(
            probe.status,  # type: ignore[arg-type]
            probe.steps_s.tolist(),
            probe.phases_s,
            probe.peak_memory_mib,
            plant.memory.gpu_mib if probe.status == "ok" else None,
            probe.start_s or 0.0,
            probe.seconds,
        )
        planner.tell(point, brought)
        thinking_s.append(time.perf_counter() - began)
    return planner, session, thinking_s


def search_one(seed: int, metric: str, peers: tuple[str, ...], tenant: bool | None = None, simulator: str = "a") -> Row:
    """Ours, then the peers with the same GPU-seconds."""
    cluster = Cluster(seed, tenant=tenant) if simulator == "a" else cast(Cluster, ClusterB(seed))
    planner, session, thinking_s = search(cluster, metric)
    return Row(
        seed=seed,
        kind=cluster.kind,
        has_tenant=cluster.tenant is not None,
        num_points=len(cluster.points),
        num_feasible=sum(cluster.status(point) == "ok" for point in cluster.points),
        num_probes=session.num_probes,
        lean_grids=session.lean_grids,
        thinking_s=float(np.mean(thinking_s)),
        longest_s=max(thinking_s),
        regret=cluster.front_regret(planner.front()) if metric == FRONT else cluster.regret(planner.best(), metric),
        bound=planner.bound(),
        peers={name: cluster.regret(PEERS[name](cluster, session.gpu_s, 1, metric), metric) for name in peers},
        why=planner.why(),
    )


def search_all(
    seeds: range,
    metric: str,
    peers: tuple[str, ...],
    say: Callable[[Row], None] = lambda row: None,
    processes: int = PROCESSES,
    tenant: bool | None = None,
    simulator: str = "a",
) -> list[Row]:
    """A row a seed, in order; the same for the same seeds but for the times.

    `tenant`: in all clusters, or in none.
    """
    rows = []
    one = functools.partial(search_one, metric=metric, peers=peers, tenant=tenant, simulator=simulator)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(one, seeds):
            say(row)
            rows.append(row)
    return rows


def installed_peers() -> tuple[str, ...]:
    """Says in a line what is left out."""
    missing = sorted({package for package in NEEDS.values() if importlib.util.find_spec(package) is None})
    for package in missing:
        names = "; ".join(name for name, needed in NEEDS.items() if needed == package)
        print(f"left out: {names}: {package} is not installed")
    return tuple(name for name in PEERS if NEEDS.get(name) not in missing)


def near_pct(regrets: Sequence[float]) -> float:
    """Percent of the choices that are within 2.5% of the best."""
    return max(100.0 * float(np.mean([regret <= NEAR for regret in regrets])), LEAST_PCT) if len(regrets) else LEAST_PCT


def summary(rows: list[Row]) -> str:
    """The table of all searchers, and ours by what binds the clusters."""
    lines = [f"{len(rows)} clusters   regret, %: within 2.5    median      95th     worst   ours ahead  level  behind, %"]

    def line(name: str, regrets: list[float], ours: list[float] | None = None) -> str:
        quantiles = "".join(f"{100 * np.percentile(regrets, quantile):10.2f}" for quantile in (50, 95, 100))
        text = f"  {name:30} {near_pct(regrets):6.0f} {quantiles}"
        if ours is None:
            return text
        less = np.array(ours) - np.array(regrets)
        return (
            f"{text}  {100 * np.mean(less < -TIE):10.0f} {100 * np.mean(abs(less) <= TIE):6.0f} {100 * np.mean(less > TIE):7.0f}"
        )

    all_gather = [row.regret for row in rows]
    lines.append(line("guided", all_gather))
    for has_tenant, name in ((False, "guided, no tenant"), (True, "guided, a tenant")):
        if some := [row.regret for row in rows if row.has_tenant is has_tenant]:
            lines.append(line(f"{name} ({len(some)})", some))
    for name in rows[0].peers:
        lines.append(line(name, [row.peers[name] for row in rows], all_gather))
    for kind in sorted({row.kind for row in rows}):
        some = [row.regret for row in rows if row.kind == kind]
        lines.append(line(f"guided, bound by {kind} ({len(some)})", some))
    cost = [row.lean_grids for row in rows]
    lines.append(
        f"  cost in lean grids: median {np.median(cost):.3f}, mean {np.mean(cost):.3f}, 95th {np.percentile(cost, 95):.3f}, "
        f"most {max(cost):.3f}"
    )
    lines.append(
        f"  better points beyond the stated bound in {100 * np.mean([row.regret > row.bound for row in rows]):.0f} of 100"
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

    def regrets(has_tenant: bool) -> list[float]:
        return [row.regret for row in rows() if row.has_tenant is has_tenant]

    def judged(title: str, unit: str, figure: Callable[[], float], bar: Bar) -> Comparison:
        """A figure of ours beside its bar."""
        return Comparison(
            title, unit, lambda _: (max(figure(), LEAST_PCT), bar.value), bar, lambda ours, _: ours, figure_name="figure"
        )

    def beside(name: str) -> Comparison:
        def measure(_: int) -> tuple[float, float]:
            return near_pct([row.regret for row in rows()]), near_pct([row.peers[name] for row in rows()])

        return Comparison(f"clusters within 2.5 % of the best, ours / {name} at equal cost", "%", measure, Bar("≥", 1.0))

    yield [
        judged("within 2.5 % of the best, no tenant", "%", lambda: near_pct(regrets(False)), Bar("≥", 95.0)),
        judged("within 2.5 % of the best, a tenant", "%", lambda: near_pct(regrets(True)), Bar("≥", 85.0)),
        judged(
            "95th percentile of the regret, no tenant",
            "%",
            lambda: 100.0 * float(np.percentile(regrets(False), 95)) if regrets(False) else 0.0,
            Bar("≤", 3.0),
        ),
        judged("worst regret", "%", lambda: 100.0 * max(row.regret for row in rows()), Bar("≤", 15.0)),
        judged("cost, median", "lean grids", lambda: float(np.median([row.lean_grids for row in rows()])), Bar("≤", 0.20)),
        judged("cost, most", "lean grids", lambda: max(row.lean_grids for row in rows()), Bar("≤", 1.0)),
        judged("a proposal, the slowest cluster's mean", "s", lambda: max(row.thinking_s for row in rows()), Bar("≤", 0.2)),
        *(beside(name) for name in peers),
    ]


def trace(seed: int, metric: str, tenant: bool | None) -> None:
    """A line a probe: when, where, what it brought beside the truth, and who else was there."""
    cluster = Cluster(seed, tenant=tenant)
    print(f"{cluster.kind}, {cluster.plant.nodes} nodes × {cluster.plant.gpus_per_node} GPUs, {cluster.plant.cpu}")
    print("     clock_s  lean grids  tenant  status  steps  measured_s  truth_s  regret, %  point")

    def report(session: Session, point: Point, probe: Probe) -> None:
        there = "there" if cluster.tenant is not None and cluster.tenant.is_there(session.clock_s) else ""
        regret_pct, values = 100 * cluster.regret(point, metric), ", ".join(str(value) for value in point.values())
        print(
            f"{session.num_probes:4} {session.clock_s:7.0f}  {session.lean_grids:10.3f}  {there:6}  {probe.status:6}  "
            f"{len(probe.steps_s):5}  {probe.step_s:10.4f}  {cluster.truth(point):7.4f}  {regret_pct:9.2f}  {values}",
            flush=True,
        )

    planner, session, _ = search(cluster, metric, report)
    best = max(cluster.possible, key=lambda point: cluster.figure(point, metric))
    print(f"why: {planner.why()}")
    for name, point in (("chosen", planner.best()), ("best", best)):
        regret, values = 100 * cluster.regret(point, metric), ", ".join(str(value) for value in (point or {}).values())
        print(f"{name}: {values}  regret {regret:.2f} %")
    print(f"{session.num_probes} probes, {session.lean_grids:.3f} lean grids")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.search", description="A row a simulated cluster.")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 100), metavar=("FIRST", "END"))
    parser.add_argument("--metric", choices=(*METRICS, FRONT), default="images_per_s")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--tenant", choices=("yes", "no"), help="in all clusters, or in none (default: in half of them)")
    parser.add_argument("--simulator", choices=("a", "b"), default="a", help="the first one, or the one from publications alone")
    parser.add_argument("--processes", type=int, default=PROCESSES, metavar="N")
    parser.add_argument("--trace", type=int, metavar="SEED", help="one search, a line a probe")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    tenant = None if args.tenant is None else args.tenant == "yes"
    if args.trace is not None:
        trace(args.trace, args.metric, tenant)
        return
    peers = () if args.alone or args.metric == FRONT else installed_peers()
    rows = search_all(range(*args.seeds), args.metric, peers, say, args.processes, tenant, args.simulator)
    print(summary(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def say(row: Row) -> None:
    """One line."""
    peers = "  ".join(f"{name} {100 * regret:.2f}" for name, regret in row.peers.items())
    print(
        f"{row.seed:4} {row.kind:8}{'tenant' if row.has_tenant else '':7} {row.num_feasible:3}/{row.num_points:3} points"
        f"  {row.num_probes:3} probes  {row.lean_grids:.3f} lean grids  {row.thinking_s:.3f} s  regret {100 * row.regret:.2f} %"
        f"  {peers}  {row.why}",
        flush=True,
    )


if __name__ == "__main__":
    main()
