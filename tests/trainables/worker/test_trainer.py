"""The exceptions of `fit` where Ray Train's workers could not be started."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.train
import ray.train.torch

from tests.trainables.jobs import config
from trainables.failures import WorkersFailedError
from trainables.worker.trainer import fit


@pytest.mark.parametrize("lost", [ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnavailableError("gone", None)], ids=repr)
def test_a_worker_that_dies_while_its_training_is_launched_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    def launch() -> None:
        raise ray.train.ControllerError(lost)

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda *_, **__: SimpleNamespace(fit=launch))
    with pytest.raises(WorkersFailedError) as ended:
        fit(config(tmp_path, teacher=None), use_gpu=False, loader_workers=1, storage=tmp_path, name="x")
    assert [failure.kind for failure in ended.value.failures] == ["worker_died"]
