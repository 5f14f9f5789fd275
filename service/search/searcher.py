"""What Ray Tune has of a sweep whose points share workers: a searcher that forwards to its coordinator.

A trial of Tune's is one group of workers, which measures several points.
"""

from typing import Any

import ray
from ray.tune.search import Searcher


class WorkerGroupSearcher(Searcher):  # type: ignore[misc]
    """Asks the actor of `service.search.coordinator.PointCoordinator`, which decides and remembers.

    What was measured is known from the sweep's log, so there is nothing to save or restore here.
    """

    def __init__(self, coordinator: Any) -> None:
        super().__init__()
        self._coordinator = coordinator

    def suggest(self, trial_id: str) -> dict[str, str] | str | None:
        first = ray.get(self._coordinator.suggest.remote(trial_id))
        if first is not None:
            return {"group": trial_id, "trial": first}
        return Searcher.FINISHED if ray.get(self._coordinator.is_idle.remote()) else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass  # the coordinator knows of it from the group itself, or from `WorkerGroupOutcomeCallback`

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        pass

    def restore_from_dir(self, checkpoint_dir: str) -> None:
        pass
