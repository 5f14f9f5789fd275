"""Which values next to the best point's are tried before it is named."""

import numpy as np

from service.search.neighbours import unchecked_neighbours
from service.search.points import Hardware, categories
from service.search.state import SearchState
from tests.service.search.queues import point


def test_every_other_value_of_an_extra_key_is_tried_with_the_best_points_workers_unless_it_is_hopeless() -> None:
    points = [{**point(4, 64, 2), "scale.pipeline_stages": stages} for stages in (1, 2, 4)]
    state = SearchState(points, Hardware(1, 4, 16))
    assert len(categories(points)) == 2
    posterior = Predicted([0.3, 0.8, 0.0])
    tried_M = np.array([False, False, True])
    rows = set(unchecked_neighbours(state.layout, state.global_M, posterior, 2, ~tried_M, tried_M))  # type: ignore[arg-type]
    assert rows == {0}, "half as fast is not tried"
    tried_M[0] = True
    assert not [*unchecked_neighbours(state.layout, state.global_M, posterior, 2, ~tried_M, tried_M)]  # type: ignore[arg-type]


class Predicted:
    """A posterior of which only the predictions count."""

    amplitude = 0.0

    def __init__(self, values: list[float]) -> None:
        self.value_M = np.array(values)
