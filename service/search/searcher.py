"""What Ray Tune has of a sweep whose points share workers: a searcher and a callback that forward to its coordinator.

A trial of Tune's is one group of workers, which measures several points.
"""

from threading import Event
from typing import Any

import ray
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from service.runs.outcome import Outcome
from service.runs.tune_errors import TrialErrorCallback
from trainables.rundir import RunDir


class WorkerGroupOutcomeCallback(TrialErrorCallback):
    """Reports to the coordinator why the function of a group raised or died; the others report themselves."""

    def __init__(self, run_dir: RunDir, coordinator: Any, session_ending: Event) -> None:
        super().__init__(run_dir, session_ending)
        self._coordinator = coordinator

    def record(self, trial: Trial, outcome: Outcome) -> None:
        ray.get(self._coordinator.finish.remote(trial.config["group"], outcome))


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
