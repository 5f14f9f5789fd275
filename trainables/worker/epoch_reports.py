"""Epochs on their way from Ray Train's controller to what may end the training after each: the controller waits for that.

Ray's own `TuneReportCallback` polls its queue, and each time that it finds nothing is a failed task on Ray's dashboard.
"""

import asyncio
from typing import Any

import ray
import ray.train


class EpochReports:
    """An actor between a trial's controller, which puts epochs, and the trial's function, which gets and decides them."""

    def __init__(self) -> None:
        self._epochs: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._problem = ""

    async def put(self, epoch: dict[str, Any] | None) -> None:
        """Returns once the training may go on. None: it has ended. Raises RuntimeError: nobody decides any more."""
        await self._epochs.put(epoch)
        await self._epochs.join()
        if self._problem:
            raise RuntimeError(self._problem)

    async def get(self) -> dict[str, Any] | None:
        """The next epoch; None: there is none any more."""
        return await self._epochs.get()

    async def decided(self, problem: str = "") -> None:
        """The training may go on after the epoch of the last `get`; or why that cannot be decided."""
        self._problem = problem
        self._epochs.task_done()


class EpochCallback(ray.train.UserCallback):  # type: ignore[misc]
    """Puts each epoch that the workers report, as its rank 0 has it, into an actor of `EpochReports`."""

    def __init__(self, reports: Any) -> None:
        self._reports = reports

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Called by Ray Train on the controller."""
        ray.get(self._reports.put.remote(metrics[0]))
