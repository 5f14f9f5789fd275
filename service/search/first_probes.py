"""Which probe tells most about the step-time model: the first ones of a search.

Shapes: M points, P parameters; 3 for step, work and forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.search.fit_data import MODEL_ERROR
from service.search.points import Array, Layout
from service.search.step_time_model import StepTime


def information(model: StepTime, layout: Layout, pending: Sequence[int]) -> Array:
    """By how much a probe of each point shrinks the parameters' uncertainty (D-optimal: Chaloner and Verdinelli 1995): M.

    The gain of one observation is log det(I + J Σ Jᵀ / error²), J being its derivatives by the parameters. Pending rows count
    as if they had been measured.
    """
    J_M3P = np.moveaxis(model.jacobian(layout), 0, 1) / np.array(list(MODEL_ERROR.values()))[:, None]
    covariance_PP = model.covariance_PP
    for row in pending:
        lift_P3 = covariance_PP @ J_M3P[row].T
        covariance_PP = covariance_PP - lift_P3 @ np.linalg.solve(np.eye(3) + J_M3P[row] @ lift_P3, lift_P3.T)
    return np.asarray(np.linalg.slogdet(np.eye(3) + J_M3P @ covariance_PP @ np.swapaxes(J_M3P, 1, 2))[1])
