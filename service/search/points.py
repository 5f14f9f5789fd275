"""What a search over training throughput sees: the points of the sweep as numbers, and what a probe brought.

Shapes: M points, K extra categories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.runs.result import ClusterHardware

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Point = Mapping[str, Any]
Category = tuple[str, str]  # an extra key, and one of its values as `repr` writes it
SPARE_MEMORY = 0.04  # of a GPU's, that the best point leaves if it can: memory grows in a long run


@dataclass(frozen=True)
class Observation:
    """What one probe brought. Only `ok` has times."""

    status: Literal["ok", "oom", "failed", "infeasible"]
    steps_s: Sequence[float] = ()  # wall time of each measured step, warm-up left out
    phases_s: Mapping[str, float] = field(default_factory=dict)  # mean seconds a step; see trainables.metrics.phases
    peak_memory_mib: float | None = None  # of the worst rank
    gpu_memory_mib: float | None = None  # what a GPU has
    start_s: float | None = None  # of the group of workers; 0 where it was shared with the probe before, None where unknown
    seconds: float | None = None  # wall time of the probe, its group's start included; None where unknown

    @property
    def room(self) -> float:
        """How many times what it took a GPU's memory holds; infinite on a CPU, and where it was not recorded."""
        if not self.peak_memory_mib or not self.gpu_memory_mib:
            return math.inf
        return self.gpu_memory_mib / self.peak_memory_mib

    @property
    def leaves_memory(self) -> bool:
        """Whether it left enough of a GPU's memory for a long run, see `SPARE_MEMORY`."""
        return self.room >= 1 / (1 - SPARE_MEMORY)


def identity(point: Point) -> tuple[tuple[str, str], ...]:
    """A point's name: equal for equal points, whatever the order of their keys."""
    return tuple(sorted((key, repr(value)) for key, value in point.items()))


def describe_point(point: Point) -> str:
    """A point in words."""
    workers, threads = (
        f"{n} {unit}{'' if n == 1 else 's'}"
        for n, unit in ((point[NUM_WORKERS], "worker"), (point[LOADER_WORKERS], "loader worker"))
    )
    more = (f"{key} {value}" for key, value in point.items() if key not in SCALE_AXES)
    return ", ".join([workers, f"global batch {point[GLOBAL_BATCH]}", threads, *more])


def categories(points: Sequence[Point]) -> tuple[Category, ...]:
    """Every value of every extra key but the first one, which is what the others are compared with.

    A key with one value only tells nothing and is left out.
    """
    values: dict[str, dict[str, None]] = {}
    for point in points:
        for key, value in point.items():
            if key not in SCALE_AXES:
                values.setdefault(key, {})[repr(value)] = None
    return tuple((key, value) for key, option in values.items() for value in list(option)[1:])


@dataclass(frozen=True)
class Layout:
    """Points as columns of numbers."""

    workers_M: Array
    nodes_M: Array  # nodes that the workers fill, one after the other
    per_node_M: Array  # workers on the fullest node
    batch_M: Array  # images a worker and step
    threads_M: Array  # loader threads of a worker; 0 decodes in the training thread
    cores: float  # of a node
    member_KM: Array  # 1 where the point has the category

    @classmethod
    def of(cls, points: Sequence[Point], hardware: ClusterHardware, extras: Sequence[Category]) -> Layout:
        """Read the three axes of every sweep, and which extra categories each point has.

        Raises:
            KeyError: a point without one of the three axes.
        """
        member_KM = [[key in point and repr(point[key]) == value for point in points] for key, value in extras]
        workers_M = np.array([float(point[NUM_WORKERS]) for point in points])
        per_node_M = np.minimum(workers_M, hardware.slots_per_node)
        return cls(
            workers_M=workers_M,
            nodes_M=np.ceil(workers_M / hardware.slots_per_node),
            per_node_M=per_node_M,
            batch_M=np.array([math.ceil(point[GLOBAL_BATCH] / point[NUM_WORKERS]) for point in points], dtype=float),
            threads_M=np.array([float(point[LOADER_WORKERS]) for point in points]),
            cores=float(hardware.cpus_per_node),
            member_KM=np.array(member_KM, dtype=float).reshape(len(extras), len(points)),
        )

    def take(self, rows: Sequence[int] | NDArray[np.int_]) -> Layout:
        """Some of the points."""
        at = np.asarray(rows, dtype=int)
        columns = ("workers_M", "nodes_M", "per_node_M", "batch_M", "threads_M", "member_KM")
        return replace(self, **{name: getattr(self, name)[..., at] for name in columns})


def relative_error(steps_s: Sequence[float] | Array) -> float:
    """Standard error of the mean step time, over that mean.

    Steps are not independent: a full prefetch queue hides a slow decode until it is empty, a hot GPU stays slow. The variance
    of the mean is that of independent steps times 1 + 2·Σ ρ_k, the sum ended at the first ρ_k below zero (Geyer 1992's
    initial positive sequence, without its pairs: probes are short) and at a third of the probe.
    Infinite for fewer than two steps.
    """
    times_S = np.asarray(steps_s, dtype=float)
    count = len(times_S)
    if count < 2:
        return math.inf
    mean = float(times_S.mean())
    off_S = times_S - mean
    variance = float(off_S @ off_S) / (count - 1)
    if variance <= 0 or mean <= 0:
        return 0.0
    stretch = 1.0
    for lag in range(1, count // 3 + 1):
        correlation = float(off_S[lag:] @ off_S[:-lag]) / (variance * (count - 1))
        if correlation <= 0:
            break
        stretch += 2 * correlation
    return math.sqrt(variance * stretch / count) / mean
