"""The guided search as a searcher of Ray Tune: one of its trials is one group of workers on its way through several points."""

from __future__ import annotations

from typing import Any

import ray
from ray.tune.search import Searcher

from service.runs.outcome import Outcome


class GuidedSearcher(Searcher):  # type: ignore[misc]
    """Asks the actor that holds `service.search.visits.Visits`, which decides and remembers.

    What was searched is known from the trials' results, so there is nothing to save or restore here.
    """

    def __init__(self, guide: Any) -> None:
        super().__init__()
        self._guide = guide

    def suggest(self, trial_id: str) -> dict[str, str] | str | None:
        first = ray.get(self._guide.begin.remote(trial_id))
        if first is not None:
            return {"visit": trial_id, "trial": first}
        return Searcher.FINISHED if ray.get(self._guide.is_idle.remote()) else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        # Of a trial whose function ended by itself the guide knows already.
        ray.get(self._guide.leave.remote(trial_id, Outcome(status="failed", reason="the process that led its workers died")))

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        pass

    def restore_from_dir(self, checkpoint_dir: str) -> None:
        pass
