"""What the step-time model predicts for points of a sweep that were not measured: fitted to the rows, drawn along an axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.config.space import GLOBAL_BATCH, NUM_WORKERS, SCALE_AXES
from service.report.run_records import Row, ran
from service.runs.result import RunResult
from service.search.points import Point
from service.search.replay import hardware_of, observation
from service.search.rows import point_of
from service.search.step_time import StepTime, fit_step_times

FEWEST = 4  # measured points below which the curve would be the model's prior more than the cluster
MOST = 120  # points that are fitted: more tell the curve nothing new, and take seconds
ALONG = 33  # points of a curve


@dataclass(frozen=True)
class Curve:
    """Images/s along an axis, with one standard deviation of what the model's parameters leave open."""

    at: list[float]
    images_per_s: list[float]
    low: list[float]
    high: list[float]


def model_of(result: RunResult, rows: Sequence[Row]) -> StepTime | None:
    """The model fitted to the measured rows, of many to some all over the space.

    None where these are too few, or where the hardware is not known.
    """
    known = result.hardware
    measured = [
        row for row in ran(rows) if row.status == "ok" and all(isinstance(row.scale.by_key[key], int) for key in SCALE_AXES)
    ]
    if not known or len(measured) < FEWEST:
        return None
    if len(measured) > MOST:
        chosen = np.random.default_rng(0).choice(len(measured), MOST, replace=False)
        measured = [measured[index] for index in sorted(chosen)]
    return fit_step_times([point_of(row) for row in measured], [observation(row) for row in measured], hardware_of(known))


def curve(model: StepTime, base: Point, key: str, low: float, high: float) -> Curve:
    """Speed along `key` from `low` to `high`, every other value as in `base`."""
    if key == GLOBAL_BATCH:
        # Batches that the workers share evenly: between them the largest share is what counts, in jumps.
        workers = base[NUM_WORKERS]
        at = np.unique((np.geomspace(low, high, ALONG) / workers).round().clip(1) * workers)
    else:
        at = np.unique(np.linspace(low, high, min(ALONG, round(high - low) + 1)).round())
    points = [{**base, key: int(index)} for index in at]
    predicted = model.predict(points)
    batch = np.array([float(point[GLOBAL_BATCH]) for point in points])
    speed, off = batch / predicted.step_s, predicted.step_sd_s / predicted.step_s
    return Curve(at.tolist(), speed.tolist(), (speed / (1 + off)).tolist(), (speed * (1 + off)).tolist())
