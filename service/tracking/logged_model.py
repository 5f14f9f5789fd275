"""Logs a run's student as a model in MLflow, and as a version of a registered model."""

import hashlib
import importlib.metadata
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import mlflow.pyfunc
import numpy as np
from mlflow import MlflowClient, MlflowException
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Run
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec
from safetensors.numpy import save_file

import trainables
from service.tracking.run_view import KEY_TAG
from trainables.errors import CheckpointError
from trainables.models.checkpoint_header import META_KEY, CheckpointHeader, read_checkpoint_header, read_model_tensors
from trainables.models.names import check_model_name
from trainables.user_code import file_of, model_parts

MODEL_PACKAGES = ("mlflow", "numpy", "pydantic", "safetensors", "torch", "torchvision")


def log_model(client: MlflowClient, run: Run, checkpoint: Path, registered: str | None, scratch: Path) -> None:
    """Log a checkpoint's weights as a model of a run, and as a version of the `registered` model, if not done yet.

    `scratch` is a folder for temporary files.

    Raises CheckpointError or ModelError: it is missing, or not one of this project. Else see `MlflowClient`.
    """
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint} no longer exists")
    if (header := read_checkpoint_header(checkpoint)) is None:
        raise CheckpointError(f"{checkpoint} is not a raydistill checkpoint")
    run_id, experiment_id = run.info.run_id, run.info.experiment_id
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".model-") as folder:
        weights = Path(folder) / "student.safetensors"
        tensors = {f"model.{name}": tensor for name, tensor in read_model_tensors(checkpoint).items()}
        save_file(tensors, weights, metadata={META_KEY: json.dumps(asdict(header))})
        with open(weights, "rb") as file:
            tag = f"{run.data.tags[KEY_TAG]}/{hashlib.file_digest(file, 'sha256').hexdigest()}"
        found = client.search_logged_models([experiment_id], f"tags.`{KEY_TAG}` = '{tag}'")
        ready = [model for model in found if model.status == LoggedModelStatus.READY]
        model = next(iter([*ready, *found]), None) or client.create_logged_model(
            experiment_id, name="student", source_run_id=run_id, tags={KEY_TAG: tag}, model_type="student"
        )
        model_id, location = model.model_id, model.artifact_location
        if not ready:
            description = Model(artifact_path=location, model_uuid=model_id, run_id=run_id, model_id=model_id)
            save_model(Path(folder) / "model", weights, header, description)
            client.log_model_artifacts(model_id, str(Path(folder) / "model"))
            if run.outputs is None or model_id not in [output.model_id for output in run.outputs.model_outputs]:
                client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])
            client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    if registered is not None:
        register(client, run_id, model, registered)


def register(client: MlflowClient, run_id: str, model: LoggedModel, name: str) -> None:
    """Make a logged model the next version of the registered model `name`, unless it is a version already."""
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    if model.model_id not in [version.tags.get(KEY_TAG) for version in versions]:  # SQL stores do not store model_id
        tags = {KEY_TAG: model.model_id}
        client.create_model_version(name, model.artifact_location, run_id, tags=tags, model_id=model.model_id)


def save_model(folder: Path, weights: Path, header: CheckpointHeader, model: Model) -> None:
    """Write a model directory that loads without this project: weights, code, signature, requirements; no pickle."""
    size = header.image_size
    files = {part: str(file) for part in model_parts(header.model) if (file := file_of(part)) is not None}
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(__file__).with_name("student_model.py")),
        artifacts={"checkpoint": str(weights), **files},
        code_paths=[str(Path(trainables.__file__).parent)],
        mlflow_model=model,
        signature=ModelSignature(
            inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, 3, size, size))]),
            outputs=Schema([TensorSpec(np.dtype("float32"), (-1, header.num_classes or -1))]),  # or features
        ),
        input_example=np.zeros((1, 3, size, size), np.uint8),
        pip_requirements=requirements(header.model),
        metadata={"classes": list(header.classes), "student": header.model},
    )


def requirements(model_name: str) -> list[str]:
    """Return the packages that a model needs, in this process's versions, without suffixes such as +cpu, which PyPI lacks.

    Raises ModelError: there is no model of this name.
    """
    libraries = {check_model_name(part).library for part in model_parts(model_name)}
    names = (*MODEL_PACKAGES, "timm") if "timm" in libraries else MODEL_PACKAGES
    return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in names]
