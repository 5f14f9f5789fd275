"""The student as an MLflow model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from service.runs.events import event
from service.tracking.run_view import state_path
from service.tracking.stores import default_uri
from tests.service.tracking.store import Run, query, run_of
from trainables.rundir import RunDir


@pytest.fixture
def run(runs_root: Path, run_dir: RunDir) -> Run:
    return Run(run_dir, default_uri(runs_root), changes=["tracking.register_model=flowers"])


@pytest.fixture
def checkpoint(run: Run) -> Path:
    """What the loop saves: the weights among the methods' modules and memory, the optimizer's state and generators."""
    import torch
    from safetensors.torch import save_file

    from trainables.models.registry import build_model

    model = build_model("resnet8", num_classes=3, image_size=8, seed=5)
    about = {
        "stage": "student",
        "model": "resnet8",
        "num_classes": 3,
        "image_size": 8,
        "classes": ["a", "b", "c"],
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.25],
        "progress": {"step": 7},
    }
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {"method.fitnet.regressors.0.conv.weight": torch.ones(32, 16, 1, 1), "method.dml.peer.conv1.weight": torch.ones(9)}
    tensors |= {"optim.0.0.momentum_buffer": torch.ones(5), "rng.0.cpu": torch.get_rng_state()}
    path = run.run_dir.stage("student").best
    path.parent.mkdir(parents=True)
    save_file(tensors, path, metadata={"raydistill": json.dumps(about)})
    return path


PREDICT = """
import sys, numpy, mlflow
model = mlflow.pyfunc.load_model(sys.argv[1])
import trainables
assert trainables.__file__.startswith(sys.argv[1]), trainables.__file__
images_BCHW = numpy.random.default_rng(0).integers(0, 256, (300, 3, 8, 8), dtype=numpy.uint8)
out_BK = model.predict(images_BCHW)
assert out_BK.dtype == numpy.float32
numpy.save(sys.argv[2], out_BK)
print(model.metadata.signature, model.metadata.metadata)
try:
    model.predict(images_BCHW.astype(numpy.float64))
except Exception as error:
    assert "uint8" in str(error)
else:
    raise AssertionError("the signature is not enforced")
"""


def test_a_student_is_logged_once_without_pickle_and_predicts_alone_what_it_predicts_here(
    runs_root: Path, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors import safe_open

    from trainables.models.registry import build_model

    add_student(run, checkpoint)
    for _ in range(2):
        run.add(event("session_begun"), event("stage_ended", "student", outcome={"status": "ok"}))  # of a resume
        assert run.sync().is_complete
        state_path(run.run_dir).unlink()
    run_id, _, _ = run_of(runs_root, run)
    models = query(runs_root, "SELECT model_id, status, artifact_location FROM logged_models WHERE source_run_id = ?", run_id)
    assert len(models) == 1
    model_id, status, location = models[0]
    assert status == 2  # READY
    assert query(runs_root, "SELECT count(*) FROM inputs WHERE source_id = ? AND destination_id = ?", run_id, model_id) == [(1,)]
    folder = runs_root / "mlartifacts" / "models" / model_id / "artifacts"
    assert location == folder.as_uri()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [
        path for path in files if path.suffix in (".pkl", ".pickle", ".pt", ".pth", ".pyc") or path.read_bytes()[:1] == b"\x80"
    ]
    weights = next(path for path in files if path.suffix == ".safetensors")
    with safe_open(weights, framework="pt") as exported:
        model = build_model("resnet8", num_classes=3, image_size=8, seed=5)
        assert set(exported.keys()) == {f"model.{name}" for name in model.state_dict()}
    assert "torch==" + torch.__version__.partition("+")[0] in (folder / "requirements.txt").read_text()
    assert "+" not in (folder / "requirements.txt").read_text()

    outside = tmp_path / "outside"
    outside.mkdir()
    result = subprocess.run(
        [sys.executable, "-I", "-c", PREDICT, str(folder), str(outside / "out.npy")],
        cwd=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "'classes': ['a', 'b', 'c']" in result.stdout
    model.eval()
    images_BCHW = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (300, 3, 8, 8), dtype=np.uint8))
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1)
    with torch.inference_mode():
        expected_BK = model((images_BCHW.float() / 255 - mean) / std).softmax(1)
    np.testing.assert_allclose(np.load(outside / "out.npy"), expected_BK, atol=1e-6)

    import mlflow

    client = mlflow.MlflowClient(default_uri(runs_root), default_uri(runs_root))
    (version,) = client.search_model_versions("name = 'flowers'")
    assert (int(version.version), version.run_id) == (1, run_id)
    assert client.get_model_version_download_uri("flowers", version.version) == location


def add_student(run: Run, checkpoint: Path) -> None:
    """What the log has of a student whose best epoch has a checkpoint."""
    wrote = event("checkpoint", "student", step=1, epoch=1.0, names=[checkpoint.name])
    run.add(wrote, event("stage_ended", "student", outcome={"status": "ok"}))


@pytest.mark.parametrize("content", [b"", b"no", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_checkpoint_is_left_out_as_a_model(content: bytes, run: Run) -> None:
    path = run.run_dir.stage("student").best
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    add_student(run, path)
    delivery = run.sync()
    assert delivery.is_complete
    assert f"except 1 that cannot be sent: {path} is not a " in delivery.message
