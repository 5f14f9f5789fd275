"""The exceptions of `fit` where Ray Train's workers could not be started."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.train
import torch

from tests.trainables.jobs import config
from trainables.failures import WorkersFailedError
from trainables.worker import trainer
from trainables.worker.recorder import RunRecorder
from trainables.worker.trainer import fit, runtime_env


@pytest.mark.parametrize("lost", [ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnavailableError("gone", None)], ids=repr)
def test_a_worker_that_dies_while_its_training_is_launched_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    def launch() -> None:
        raise ray.train.ControllerError(lost)

    monkeypatch.setattr(trainer, "TrainerWithoutDatasets", lambda *_, **__: SimpleNamespace(fit=launch))
    with pytest.raises(WorkersFailedError) as ended:
        fit(
            config(tmp_path, teacher=None),
            use_gpu=False,
            loader_workers=1,
            storage=str(tmp_path),
            name="x",
            recorder=RunRecorder(None, ""),
        )
    assert [failure.kind for failure in ended.value.failures] == ["worker_died"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpus_allocator_grows_its_segments_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_DIST_USE_NCCL2"):
        monkeypatch.delenv(each, raising=False)
    assert runtime_env(use_gpu=True) == {
        "env_vars": {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_DIST_USE_NCCL2": "0"}
    }
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert runtime_env(use_gpu=True) == {"env_vars": {"TORCH_DIST_USE_NCCL2": "0"}}


def test_the_library_reads_the_name_of_the_allocators_variable() -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert b"\0PYTORCH_ALLOC_CONF\0" in library.read_bytes()
