"""The start of workers, and what watches over them then; on a real Ray."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray.train
from ray.util.placement_group import placement_group_table

from service.runs.driver_log import DriverLog
from tests.waiting import wait_until
from trainables.config import TrainConfig
from trainables.failures import EndedError, WorkersFailedError
from trainables.metrics.heartbeat import watched
from trainables.worker import trainer
from trainables.worker.hangs import hang_watch
from trainables.worker.hangs.hang_watch import HangWatch
from trainables.worker.process_group import ProcessGroup, ProcessGroupBackend, results_of

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def real_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.mark.usefixtures("real_ray")
def test_a_rank_that_does_not_start_in_time_is_named_as_one_that_hangs() -> None:
    assert results_of([work.remote(0), work.remote(0.1)], "start") == [0, 0.1]
    with pytest.raises(EndedError, match="rank 1 did not open its GPU within 3 s") as raised:
        results_of([work.remote(0), work.remote(600)], "open its GPU", 3)
    failure = raised.value.failure
    assert (failure.kind, failure.rank, failure.position) == ("hang", 1, "start")


class DyingBackend(ProcessGroupBackend):
    """Ends the controller while its workers start."""

    def on_start(self, worker_group: Any, backend_config: ProcessGroup) -> None:
        os._exit(1)


class DyingProcessGroup(ProcessGroup):
    @property
    def backend_cls(self) -> type:
        return DyingBackend


@pytest.mark.usefixtures("real_ray")
def test_a_controller_that_dies_while_its_workers_start_leaves_no_resources_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "ProcessGroup", DyingProcessGroup)
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    settings: dict[str, Any] = {"use_gpu": False, "loader_workers": 1, "storage": str(tmp_path / "ray"), "name": "dies"}
    with closing(DriverLog(tmp_path / "events.jsonl")) as log, log.recording() as recorder, pytest.raises(WorkersFailedError):
        trainer.fit(config, recorder=recorder, **settings)
    states = [group["state"] for group in placement_group_table().values()]
    assert states == ["REMOVED"]


@ray.remote(num_cpus=0)
class TrainingActor:
    """It is in the first step of a job, and cannot answer once."""

    def __init__(self) -> None:
        self._stack, self._can_answer = ExitStack(), False
        heartbeat = self._stack.enter_context(watched())
        heartbeat.begin_step(0)
        heartbeat.end_phase("data")

    def pid(self) -> int:
        return os.getpid()

    def call(self, function: Callable[[], Any]) -> Any:
        if not self._can_answer:
            self._can_answer = True
            raise OSError
        return function()


@pytest.mark.usefixtures("real_ray")
def test_a_job_that_takes_too_long_is_ended_also_where_a_worker_could_not_answer_and_a_look_at_it_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hang_watch, "POLL_S", 0.1)
    actor, fails = TrainingActor.remote(), iter([OSError("of a file system")])

    def execute_async(function: Callable[[], Any]) -> Any:
        for error in fails:
            raise error
        return actor.call.remote(function)

    pid = ray.get(actor.pid.remote())
    metadata = SimpleNamespace(node_ip="127.0.0.1", node_id=ray.get_runtime_context().get_node_id(), pid=pid)
    worker = SimpleNamespace(execute_async=execute_async, metadata=metadata, distributed_context=SimpleNamespace(world_rank=0))
    watch = HangWatch("auto", 0.5)
    watch.after_worker_group_training_start(SimpleNamespace(get_workers=lambda: [worker]))

    def ended() -> str | None:
        try:
            return watch.after_worker_group_poll_status(None)
        except ray.train.WorkerGroupError as error:
            return str(error)

    assert "took longer than sweep.trial_limit_s; it was in h2d of step 1" in wait_until(ended)
    assert "polling the workers failed" in caplog.text
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
