"""Two sweeps (or runs) side by side: the best of each, the speed at every point that both have, and what else differs.

Shapes: M common points.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from service.config.space import GLOBAL_BATCH, SCALE_AXES
from service.report import labels as names
from service.report.run_records import Records, Row, ran
from service.report.statistics import LEVEL, holm, paired_t_test
from service.runs.result import TrialRow, TrialScale
from service.search.rows import probes


@dataclass(frozen=True)
class CommonPoint:
    """One point that both have run."""

    point: Mapping[str, Any]
    a: Row
    b: Row
    beyond_noise: bool | None = None  # None: the steps' spread of one of them is not known

    @property
    def ratio(self) -> float:
        """Speed of B over speed of A."""
        return float(self.b.metrics["images_per_s"] / self.a.metrics["images_per_s"])

    @property
    def error(self) -> float | None:
        """Relative standard error of the ratio."""
        errors = [row.error for row in (self.a, self.b)]
        return None if None in errors else math.hypot(*(float(error or 0.0) for error in errors))

    @property
    def p_value(self) -> float | None:
        """Probability of a ratio so far from 1 if both were equally fast (two-sided, normal)."""
        if self.error is None:
            return None
        return math.erfc(abs(math.log(self.ratio)) / max(self.error, 1e-9) / math.sqrt(2))


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and what not."""

    a: Records
    b: Records
    keys: list[str]  # of a point
    pairs: list[CommonPoint]
    differences: list[tuple[str, Any, Any]]  # of the experiments: key, A's, B's


def compare(a: Records, b: Records) -> Comparison:
    """Match the points of two runs: a key that one of them did not search counts with its experiment's own value."""
    searched = dict.fromkeys([*SCALE_AXES, *(key for records in (a, b) for row in records.rows for key in row.params)])
    found_a, found_b = (dict(pointed(records, list(searched))) for records in (a, b))
    common = [
        CommonPoint(dict(zip(searched, (item for item, _ in point), strict=True)), found_a[point], found_b[point])
        for point in found_a
        if point in found_b
    ]
    common = with_significance(common)
    both = {key for key in searched if all(any(key in row.params for row in records.rows) for records in (a, b))}
    differences = [
        (key, a.experiment.get(key), b.experiment.get(key))
        for key in dict.fromkeys([*a.experiment, *b.experiment])
        if key != "name" and key not in both and a.experiment.get(key) != b.experiment.get(key)
    ]
    keys = [key for key in searched if key in SCALE_AXES or len({repr(pair.point[key]) for pair in common}) > 1]
    return Comparison(a, b, keys, common, differences)


def pointed(records: Records, keys: list[str]) -> Iterator[tuple[tuple[tuple[Any, str], ...], Row]]:
    """Each point that ran, as a name (values and how they are written: 1 is not True), with its row."""
    for row in timed_rows(records):
        known = {**records.experiment, **row.params, **row.scale.by_key}
        yield tuple((item, repr(item)) for item in (comparable(known.get(key)) for key in keys)), row


def comparable(item: Any) -> Any:
    return item if isinstance(item, str | int | float | bool | None) else repr(item)


def timed_rows(records: Records) -> list[Row]:
    """The points that have a speed, as they were probed; of a single run, its student as one row."""
    if records.is_sweep:
        return ran(probes(records.rows))
    found: list[Row] = []
    for stage in records.result.stages:
        if stage.stage == "student" and stage.metrics.get("images_per_s"):
            history = next((h for h in records.histories if h.label == "student"), None)
            scale = TrialScale.model_construct(
                num_workers=records.result.num_workers or 1,
                global_batch_size=records.experiment[GLOBAL_BATCH],
                loader_workers=records.result.loader_workers,
            )
            row = TrialRow(id="student", params={}, scale=scale, status="ok", metrics=stage.metrics)
            found.append(Row.of(row, history.windows_s if history else ()))
    return found


def best_row(records: Records) -> Row | None:
    """The winner of a sweep by its own metric; of a run, its student."""
    return records.best if records.is_sweep else next(iter(timed_rows(records)), None)


def with_significance(pairs: list[CommonPoint]) -> list[CommonPoint]:
    """The pairs with `beyond_noise`, by Holm's correction over all pairs whose noise is known."""
    p_values = holm(pd.Series([pair.p_value for pair in pairs], dtype=float))
    return [pair if math.isnan(p) else replace(pair, beyond_noise=p <= LEVEL) for pair, p in zip(pairs, p_values, strict=True)]


def overall(pairs: list[CommonPoint]) -> tuple[float, float, float] | None:
    """Geometric mean of the ratios with its 95% bounds, from how the points differ among themselves; None for fewer than two.

    What differs between two days (clocks, other jobs, caches) moves all points alike and is in neither figure.
    """
    test = paired_t_test([math.log(pair.ratio) for pair in pairs])
    if test is None:
        return None
    return math.exp(test.mean), math.exp(test.mean - test.half_width), math.exp(test.mean + test.half_width)


def lead(comparison: Comparison) -> list[str]:
    """What the comparison says, in sentences."""
    sentences = []
    for name, records in (("A", comparison.a), ("B", comparison.b)):
        best = best_row(records)
        where = f"{name}, {records.result.name}"
        sentences.append(f"{where}: {summary_of(records, best, comparison.keys)}" if best else f"{where}: no trial is complete.")
    a, b = (best_row(records) for records in (comparison.a, comparison.b))
    if a and b:
        sentences.append(f"B's best is {times(CommonPoint({}, a, b).ratio)} A's best.")
    if not comparison.pairs:
        return [*sentences, "No point was run by both."]
    counted = names.counted(len(comparison.pairs), "common point")
    if whole := overall(comparison.pairs):
        sentences.append(
            f"Over {counted} B is {times(whole[0])} A (geometric mean; 95% between {whole[1]:.3f} and {whole[2]:.3f})."
        )
    known = [pair for pair in comparison.pairs if pair.beyond_noise is not None]
    if known:
        faster = sum(bool(pair.beyond_noise) and pair.ratio > 1 for pair in known)
        slower = sum(bool(pair.beyond_noise) and pair.ratio < 1 for pair in known)
        sentences += [
            f"Beyond the noise of the steps, B is faster at {faster} of {counted} and slower at {slower}; "
            f"{len(known) - faster - slower} differ by no more than noise.",
            "What made the machine slower on one of the days (heat, other jobs) is not in that noise.",
        ]
    if len(known) < len(comparison.pairs):
        sentences.append(f"Of {len(comparison.pairs) - len(known)} of them the spread of the steps is not known.")
    return sentences


def summary_of(records: Records, best: Row, keys: list[str]) -> str:
    m = best.metrics
    accuracy = f", top-1 {names.number(m['top1_pct'])}%" if "top1_pct" in m else ""
    params = {key: records.experiment.get(key) for key in keys} | best.params  # a key that was not searched has one value
    where = names.point(best.model_copy(update={"params": params}), records.unit, keys)
    return f"{where}, {names.number(m['images_per_s'], 1)} images/s{accuracy}"


def times(ratio: float) -> str:
    return f"{ratio:.3f} times as fast as"


def point_verdict(pair: CommonPoint) -> str:
    """What is known of one point."""
    if pair.beyond_noise is None:
        return "spread unknown"
    return ("B faster" if pair.ratio > 1 else "B slower") if pair.beyond_noise else "within noise"
