"""The start of workers, before anything watches over them; on a real Ray."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from trainables.config import TrainConfig
from trainables.failures import EndedError, WorkersFailedError
from trainables.worker import trainer
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
    with pytest.raises(WorkersFailedError):
        trainer.fit(config, use_gpu=False, loader_workers=1, storage=str(tmp_path / "ray"), name="dies")
    states = [group["state"] for group in placement_group_table().values()]
    assert states == ["REMOVED"]
