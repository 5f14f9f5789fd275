"""What Ray Tune has of the guided search: a searcher and a callback that forward to the search's coordinator.

A trial of Tune's is one group of workers, which measures several points.
"""

from threading import Event
from typing import Any

import ray
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from service.runs.tune_errors import outcome_of


class GuidedSearcher(Searcher):  # type: ignore[misc]
    """Asks the actor of `service.search.coordinator.SearchCoordinator`, which decides and remembers.

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
        pass  # the coordinator knows of it from the group itself, or from `WorkerGroupEnds`

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        pass

    def restore_from_dir(self, checkpoint_dir: str) -> None:
        pass


class WorkerGroupEnds(Callback):  # type: ignore[misc]
    """Reports to the coordinator why the function of a group raised or died; the others report themselves."""

    def __init__(self, coordinator: Any, session_ending: Event) -> None:
        self._coordinator, self._session_ending = coordinator, session_ending

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        outcome = outcome_of(trial, self._session_ending)
        if outcome is not None:
            ray.get(self._coordinator.finish.remote(trial.config["group"], outcome))
