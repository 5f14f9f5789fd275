"""A sweep's space: dotted key → values, expanded or sampled into points without knowing who runs them.

data.global_batch_size: [256, 512]          a list
data.loader_workers: {range: [2, 8, 2]}     2, 4, 6, 8
optim.lr: {loguniform: [0.001, 1]}          a distribution: uniform, loguniform, randint (both ends included)
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from trainables.errors import ExperimentError

SCALE_AXES = NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS = "scale.num_workers", "data.global_batch_size", "data.loader_workers"
"""The axes of every sweep, whether it searches them or not."""

_USUAL_NAMES = {NUM_WORKERS: "workers", GLOBAL_BATCH: "batch"}

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, Any, Any], Any]] = {
    "uniform": lambda rng, low, high: float(rng.uniform(low, high)),
    "loguniform": lambda rng, low, high: float(np.exp(rng.uniform(np.log(low), np.log(high)))),
    "randint": lambda rng, low, high: int(rng.integers(low, high + 1)),
}


ENUMERATED = ("grid", "guided")
"""Policies that enumerate every point of the space before they begin."""
MAX_POINTS = 10_000


def _refused(problem: str) -> ExperimentError:
    return ExperimentError.of_key("sweep.space", problem)


def choices(key: str, spec: Any) -> list[Any] | None:
    """The values of a list or a range; None for a distribution. Raises ExperimentError: none of the three."""
    if isinstance(spec, list):
        if not spec:
            raise _refused(f"{key}: the list is empty")
        if repeated := [value for i, value in enumerate(spec) if value in spec[:i]]:
            raise _refused(f"{key}: the list has {repeated[0]} twice, which would be the same trial: write it once")
        return spec
    kind, limits = next(iter(spec.items())) if isinstance(spec, Mapping) and len(spec) == 1 else ("", None)
    if not isinstance(limits, list) or not all(type(x) in (int, float) and math.isfinite(x) for x in limits):
        limits = []
    if kind == "range" and len(limits) in (2, 3):
        return _range(key, *limits)
    if kind not in DISTRIBUTIONS or len(limits) != 2:
        kinds = ", ".join(DISTRIBUTIONS)
        raise _refused(f"{key}: write a list, {{range: [first, last, step]}}, or one of {kinds} with [low, high]")
    if limits[0] > limits[1] or (kind == "loguniform" and limits[0] <= 0):
        raise _refused(f"{key}: {kind} [low, high] needs low ≤ high" + (" and low > 0" if kind == "loguniform" else ""))
    return None


def _range(key: str, first: float, last: float, step: float = 1) -> list[Any]:
    if step <= 0 or last < first:
        raise _refused(f"{key}: range [first, last, step] needs first ≤ last and step > 0")
    steps = (last - first) / step + 1e-9
    if steps >= MAX_POINTS:
        raise _refused(f"{key}: the range has {steps + 1:.0f} values, more than {MAX_POINTS}: give it a larger step")
    # In decimals, as they are written: the third of 0.1, 0.2, … is 0.3 and not 0.30000000000000004.
    number = int if isinstance(first, int) and isinstance(step, int) else float
    return [number(Decimal(str(first)) + i * Decimal(str(step))) for i in range(int(steps) + 1)]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Dotted key → a name that is short: its last part where no other key has that, and usual names for the three axes."""
    keys = list(keys)
    last = {key: _USUAL_NAMES.get(key, key.rpartition(".")[2]) for key in keys}
    return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def check_space(space: Mapping[str, Any], policy: str) -> None:
    """Refuse a space that is malformed, or that `policy` cannot enumerate.

    Raises ExperimentError: which key, and what to write instead.
    """
    for key, spec in space.items():
        if choices(key, spec) is None and policy in ENUMERATED:
            raise _refused(
                f"{key}: {policy} cannot enumerate a distribution: give a list or a range, or set sweep.policy to random"
            )


def points(space: Mapping[str, Any], policy: str, num_samples: int, seed: int) -> list[dict[str, Any]]:
    """The points of a sweep, a pure function of its arguments, without repetition. Raises ExperimentError: an empty space."""
    if not space:
        raise _refused("nothing to search: give at least one key, such as data.global_batch_size: [128, 256]")
    if policy in ENUMERATED:
        values = [choices(key, spec) or [] for key, spec in space.items()]
        if (count := math.prod(map(len, values))) > MAX_POINTS:
            raise _refused(
                f"the grid has {count} points, more than {MAX_POINTS}: give fewer values, or set sweep.policy to random"
            )
        return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]
    rng = np.random.default_rng(seed)
    drawn = [{key: _draw(rng, key, spec) for key, spec in space.items()} for _ in range(num_samples)]
    return [point for i, point in enumerate(drawn) if point not in drawn[:i]]


def _draw(rng: np.random.Generator, key: str, spec: Any) -> Any:
    if (values := choices(key, spec)) is not None:
        return values[int(rng.integers(len(values)))]
    ((kind, (low, high)),) = spec.items()
    return DISTRIBUTIONS[kind](rng, low, high)
