"""The evaluator of `eval.asynchronous`: an actor, owned by rank 0 and ended with it, that evaluates the stage's checkpoints."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch

from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.engine.checkpoint_evaluation import CheckpointEvaluation, Evaluation
from trainables.errors import EvaluatorDiedError
from trainables.metrics.heartbeat import Heartbeat
from trainables.process_exit import skip_exit_handlers
from trainables.worker.ray_nodes import has_room
from trainables.worker.torch_settings import set_up_torch

log = logging.getLogger("raydistill")

START_S = 60.0
"""How long the actor may take to start, while the workers wait."""
SETTLING_S = 10.0
"""How long resources of an actor that has died may take to become free."""
MAX_DEATHS = 3
"""After so many deaths during one evaluation, the stage restarts, and its workers evaluate."""


class EvaluationActor:
    """Evaluates one stage. Ray calls its methods in several threads."""

    def __init__(self, device: str) -> None:
        self._device, self._heartbeat = torch.device(device), Heartbeat()
        self._evaluation: CheckpointEvaluation | None = None
        self._thread = ThreadPoolExecutor(1, "evaluation")
        skip_exit_handlers()

    def evaluate(self, config: TrainConfig, path: Path, step: int) -> Evaluation:
        """See `CheckpointEvaluation`. Always in the same thread, as CUDA graphs require."""
        return self._thread.submit(self._evaluate, config, path, step).result()

    def _evaluate(self, config: TrainConfig, path: Path, step: int) -> Evaluation:
        if self._evaluation is None:
            set_up_torch(config, Group(device=self._device))
            self._evaluation = CheckpointEvaluation(config, self._device, self._heartbeat)
        return self._evaluation(path, step)

    def quiet_s(self) -> float:
        """Return the seconds since the last sign of progress."""
        return self._heartbeat.position().quiet_s


class RemoteEvaluator:
    """An `Evaluator` on rank 0, whose `EvaluationActor` Ray places."""

    def __init__(self, resources: Mapping[str, float], beat: Callable[[], None]) -> None:
        """`resources`: those of a worker, by Ray's names; `beat`: signals progress of the job."""
        self._beat = beat
        self._resources, self._needs = resources, " and ".join(f"{number:g} {name}" for name, number in resources.items())
        self._actor: Any = None
        self._task: tuple[TrainConfig, Path, int]
        self._answer: Any = None
        self._result: Evaluation | Exception | None = None
        self._num_deaths = 0
        self._is_late = False
        self._said: str | None = None

    def start(self) -> bool:
        """See `Evaluator`. An actor that does not start in time is not tried again."""
        if self._actor is None and not self._is_late:
            self._say(self._try_to_start())
        return self._actor is not None

    def _try_to_start(self) -> str:
        """Start an actor if there is room, and return what to say about it."""
        if not has_room(self._resources):
            return f"no node has {self._needs} free for an evaluation: the workers evaluate until one has"
        cpus, gpus = self._resources["CPU"], self._resources.get("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": 2}
        self._actor = ray.remote(EvaluationActor).options(**options).remote("cuda" if gpus else "cpu")
        if self._has_started():
            return f"one more worker of {self._needs} evaluates while training continues"
        self._is_late = True
        self.close()
        return f"no worker of {self._needs} has started in {START_S:g} s: the workers evaluate"

    def _has_started(self) -> bool:
        """Whether the actor has started, after waiting for at most `START_S`."""
        answer, until_s = self._actor.quiet_s.remote(), time.monotonic() + START_S
        while not ray.wait([answer], timeout=1.0)[0] and time.monotonic() < until_s:
            self._beat()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(answer, timeout=0)
            return True
        return False

    def begin(self, config: TrainConfig, path: Path, step: int) -> None:
        """See `Evaluator`."""
        self._task, self._num_deaths = (config, path, step), 0
        self._answer = self._actor.evaluate.remote(*self._task)

    def is_done(self, timeout_s: float = 0.0) -> bool:
        """See `Evaluator`. An actor that has died is replaced, and the evaluation begins again."""
        if self._answer is None:
            return self._result is not None
        if not ray.wait([self._answer], timeout=timeout_s)[0]:
            if timeout_s and self._makes_progress(timeout_s):
                self._beat()
            return False
        answer, self._answer = self._answer, None
        try:
            self._result = ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            self._result = error.cause
        except ray.exceptions.RayError as error:
            self._replace(error)
        return self._result is not None

    def result(self) -> Evaluation:
        """See `Evaluator`."""
        result, self._result = self._result, None
        if isinstance(result, Evaluation):
            return result
        assert result is not None
        raise result

    def close(self) -> None:
        """End the actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _makes_progress(self, timeout_s: float) -> bool:
        """Whether the actor answers within `timeout_s`, and its evaluation has made progress in the last `2 * timeout_s`."""
        try:
            return bool(ray.get(self._actor.quiet_s.remote(), timeout=timeout_s) < 2 * timeout_s)
        except ray.exceptions.RayError:
            return False

    def _replace(self, error: Exception) -> None:
        """Begin again with another actor. Raises EvaluatorDiedError: see `Evaluator.is_done`."""
        self.close()
        self._num_deaths += 1
        self._say(f"its worker has died ({type(error).__name__}): beginning again")
        until_s = time.monotonic() + SETTLING_S
        while not has_room(self._resources) and time.monotonic() < until_s:
            self._beat()
            time.sleep(0.5)
        if self._num_deaths == MAX_DEATHS or not self.start():
            how = f"{MAX_DEATHS} times in one evaluation" if self._num_deaths == MAX_DEATHS else "and has no room any more"
            raise EvaluatorDiedError(f"eval.asynchronous: its worker has died {how}: see its node's memory, or write false")
        self._answer = self._actor.evaluate.remote(*self._task)

    def _say(self, line: str) -> None:
        """Log a line unless it repeats the last one."""
        if line != self._said:
            log.warning("eval.asynchronous: %s", line)
        self._said = line
