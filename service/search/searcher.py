"""The guided search as a searcher of Ray Tune: one of its trials is one group of workers, which measures several points."""

from typing import Any

import ray
from ray.tune.search import Searcher

from service.runs.outcome import Outcome


class GuidedSearcher(Searcher):  # type: ignore[misc]
    """Forwards to the actor of `service.search.coordinator.SearchCoordinator`, which decides and remembers.

    What was searched is known from the trials' results, so there is nothing to save or restore here.
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
        # Of a trial whose function ended by itself the coordinator knows already.
        died = Outcome(status="failed", reason="the process that led its workers died")
        ray.get(self._coordinator.finish.remote(trial_id, died))

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        pass

    def restore_from_dir(self, checkpoint_dir: str) -> None:
        pass
