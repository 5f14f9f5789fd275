"""Access to an MLflow store through MLflow's client. The sync thread imports it late, as MLflow takes seconds to import."""

import contextlib
import getpass
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import requests
from mlflow import MlflowClient, MlflowException
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
    ViewType,
)
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import trainables
from service.tracking.run_view import KEY_TAG, RefusedError
from service.tracking.views import VIEW_TAG, VIEWS_SINCE
from trainables.errors import ModelError, first_line
from trainables.locks import locked
from trainables.models.names import check_model_name, model_parts
from trainables.rundir import create_private
from trainables.user_code import file_of

Row = tuple[str, tuple[Any, ...]]
"""A key of `ENTITIES`, with (name, value) of a parameter or tag, or (name, value, unix ms, step) of a metric."""
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE", "MALFORMED_REQUEST"}
READ_ONLY = {"PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND"}
REFUSED_STATUS = {400, 411, 413, 414, 415, 422}
MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 5000
MODEL_PACKAGES = ("mlflow", "numpy", "pydantic", "safetensors", "torch", "torchvision")
METADATA_KEYS = ("model", "num_classes", "image_size", "classes", "mean", "std")

log = logging.getLogger("raydistill")
# MLflow also logs a stack trace for each error that it raises; users get one line from us instead.
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise RefusedError for requests that the store will never accept; other errors pass, and may be retried."""
    try:
        yield
    except MlflowException as error:
        if error.error_code in REFUSALS:
            raise RefusedError(f"MLflow refuses it: {error.message}") from error
        raise
    except requests.HTTPError as error:
        if error.response is not None and error.response.status_code in REFUSED_STATUS:
            raise RefusedError(f"MLflow refuses it: {error}") from error
        raise


class Store:
    """An experiment in a store. Methods raise RefusedError for requests that can never succeed, other errors if they may."""

    def __init__(self, uri: str, experiment: str, scratch: Path):
        """Connect, creating the database and the experiment if needed. `scratch` is a folder for temporary files."""
        self._scratch, self._uri = scratch, uri
        artifacts = None
        if uri.startswith("sqlite:///"):
            database = Path(uri.removeprefix("sqlite:///"))
            artifacts = (database.parent / "mlartifacts").as_uri()
            create_database(database, artifacts)
        elif not uri.startswith(("http", "databricks")):
            # MLflow's default is below the working directory.
            artifacts = (scratch.parent / "mlartifacts").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.experiment = experiment
        self.experiment_id = self._open_experiment(experiment, artifacts)

    def _open_experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            # It is refused if another process has just created it.
            with contextlib.suppress(RefusedError), refusals():
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            found = self._client.get_experiment_by_name(name)
        if found is None:
            raise RuntimeError(f"cannot create the experiment {name!r}")
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
            log.warning("tracking: restored experiment %r, which was deleted in MLflow, with its runs", name)
        return str(found.experiment_id)

    def find_runs(self, log_id: str) -> list[Run]:
        """Find the runs of a log, including deleted ones that can be restored."""
        found, token = list[Run](), None
        while token is None or token:
            part = self._client.search_runs(
                [self.experiment_id], f"tags.`{KEY_TAG}` LIKE '{log_id}/%'", ViewType.ALL, page_token=token
            )
            found, token = [*found, *part], part.token or ""
        return found

    def create_run(self, tag: str, name: str, parent_id: str | None, time_ms: int) -> str:
        tags = {KEY_TAG: tag, "mlflow.user": user(), "mlflow.source.name": "raydistill", "mlflow.source.type": "LOCAL"}
        if parent_id:
            tags["mlflow.parentRunId"] = parent_id
        with refusals():
            run = self._client.create_run(self.experiment_id, start_time=time_ms, tags=tags, run_name=name)
        return str(run.info.run_id)

    def set_status(self, run_id: str, status: str, ended_ms: int) -> None:
        with refusals():
            if status == "RUNNING":
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status, ended_ms)

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted."""
        with contextlib.suppress(RefusedError), refusals():
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        return False

    def is_experiment_deleted(self) -> bool:
        """Whether the experiment is deleted and can be restored."""
        with contextlib.suppress(RefusedError), refusals():
            return bool(self._client.get_experiment(self.experiment_id).lifecycle_stage == "deleted")
        return False

    def delete_run(self, run_id: str) -> None:
        with refusals():
            self._client.delete_run(run_id)

    def log(self, run_id: str, rows: Sequence[Row]) -> None:
        """Log parameters, tags and metrics in one request. Repeated rows have no effect."""
        entities: dict[str, list[Any]] = {}
        for kind, row in rows:
            entities.setdefault(kind, []).append(ENTITIES[kind](*row))
        with refusals():
            self._client.log_batch(run_id, **entities, synchronous=True)

    def log_dataset(self, run_id: str, dataset: Mapping[str, str]) -> None:
        """Log the dataset that a run is trained on. The store ignores repetitions."""
        tags = [InputTag("mlflow.data.context", "training")]
        with refusals():
            self._client.log_inputs(run_id, [DatasetInput(Dataset(**dataset), tags)])

    def add_views(self, views: Mapping[str, str]) -> str:
        """Save the views (key → value, see `saved_views`) that the experiment lacks. Returns why that is impossible, or ""."""
        if self._uri.startswith("databricks"):
            return "Databricks does not show them"
        try:
            tags = self._client.get_experiment(self.experiment_id).tags  # raises if the server is down
            if self._uri.startswith("http"):
                answer = http_request(get_default_host_creds(self._uri), "/version", "GET", raise_on_status=False, max_retries=0)
                number = re.match(r"(\d+)\.(\d+)[\w.]*", answer.text if answer.ok else "")
                if number is None or tuple(map(int, number.groups())) < VIEWS_SINCE:
                    found = number.group() if number else "of unknown version"
                    return f"they need MLflow {'.'.join(map(str, VIEWS_SINCE))}, and the server is {found}"
            for key, value in views.items():
                if VIEW_TAG + key not in tags:
                    self._client.set_experiment_tag(self.experiment_id, VIEW_TAG + key, value)
        except MlflowException as error:
            if error.error_code in REFUSALS | READ_ONLY:
                return first_line(error)
            raise
        return ""

    def log_artifact(self, run_id: str, path: Path) -> None:
        """Copy a file to the run's artifacts, overwriting an earlier copy."""
        if not path.exists():
            raise RefusedError(f"{path} no longer exists")
        with refusals():
            self._client.log_artifact(run_id, str(path))

    def log_model(self, run_id: str, checkpoint: Path, tag: str, registered: str | None) -> None:
        """Log a checkpoint's weights as a model of the run, and as a version of the `registered` model, if not done yet.

        `tag` identifies the run.
        """
        if not checkpoint.exists():
            raise RefusedError(f"{checkpoint} no longer exists")
        with tempfile.TemporaryDirectory(dir=self._scratch, prefix=".model-") as folder, refusals():
            weights = Path(folder) / "student.safetensors"
            metadata = copy_weights(checkpoint, weights)
            with open(weights, "rb") as file:
                tag = f"{tag}/{hashlib.file_digest(file, 'sha256').hexdigest()}"
            found = self._client.search_logged_models([self.experiment_id], f"tags.`{KEY_TAG}` = '{tag}'")
            if ready := next((model for model in found if model.status == LoggedModelStatus.READY), None):
                self._register(run_id, ready, registered)
                return
            model = (
                found[0]
                if found
                else self._client.create_logged_model(
                    self.experiment_id, name="student", source_run_id=run_id, tags={KEY_TAG: tag}, model_type="student"
                )
            )
            location, model_id = model.artifact_location, model.model_id
            description = Model(artifact_path=location, model_uuid=model_id, run_id=run_id, model_id=model_id)
            save_model(Path(folder) / "model", weights, metadata, description)
            self._client.log_model_artifacts(model.model_id, str(Path(folder) / "model"))
            outputs = self._client.get_run(run_id).outputs
            if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
                self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
            self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
            self._register(run_id, model, registered)

    def _register(self, run_id: str, model: LoggedModel, name: str | None) -> None:
        """Make a logged model the next version of the registered model `name`, unless it is a version already."""
        if name is None:
            return
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self._client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
        if model.model_id not in [version.tags.get(KEY_TAG) for version in versions]:  # SQL stores do not store model_id
            tags, location = {KEY_TAG: model.model_id}, model.artifact_location
            self._client.create_model_version(name, location, run_id, tags=tags, model_id=model.model_id)


def allowed(name: str) -> str:
    """Turn a name into one that MLflow accepts."""
    return re.sub(r"[^\w.\- :/]", "_", name)[:MAX_NAME]


ENTITIES: dict[str, Callable[..., Any]] = {
    "metrics": lambda name, *rest: Metric(allowed(name), *rest),
    "params": lambda name, value: Param(allowed(name), value[:MAX_PARAM]),
    "tags": lambda name, value: RunTag(allowed(name), value[:MAX_TAG]),
}
"""Kind of a row → MLflow's entity, with its text cut to MLflow's limits."""


def create_database(path: Path, artifacts: str) -> None:
    """Create a new SQLite store. Processes that start together create it once.

    It is created under another name and renamed, since a kill between two of MLflow's migrations makes a database unusable.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    create_private(path.parent)
    with locked(path.with_name(f"{path.name}.lock")):
        if path.exists() and path.stat().st_size:
            return
        temporary = path.with_name(f".{path.name}.new")
        temporary.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{temporary}", artifacts).engine.dispose()  # type: ignore[no-untyped-call]
        os.replace(temporary, path)


def copy_weights(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Write the `model.` tensors of a checkpoint to `out`. Returns the checkpoint's metadata of the model.

    Raises RefusedError: it is not a checkpoint of this project.
    """
    try:
        with safe_open(checkpoint, framework="np") as file:
            written = json.loads((file.metadata() or {})["raydistill"])
            metadata = {name: written[name] for name in METADATA_KEYS}
            names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118 - it is no mapping
            tensors = {name: file.get_tensor(name) for name in names}
    except (KeyError, SafetensorError) as error:
        raise RefusedError(f"{checkpoint} is not a raydistill checkpoint") from error
    save_file(tensors, out, metadata={"raydistill": json.dumps(metadata)})
    return metadata


def save_model(folder: Path, weights: Path, metadata: dict[str, Any], model: Model) -> None:
    """Write a model directory that loads without this project: weights, code, signature, requirements; no pickle."""
    size = metadata["image_size"]
    files = {part: str(file) for part in model_parts(metadata["model"]) if (file := file_of(part)) is not None}
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=str(Path(__file__).with_name("student_model.py")),
        artifacts={"checkpoint": str(weights), **files},
        code_paths=[str(Path(trainables.__file__).parent)],
        mlflow_model=model,
        signature=ModelSignature(
            inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, 3, size, size))]),
            outputs=Schema([TensorSpec(np.dtype("float32"), (-1, metadata["num_classes"] or -1))]),  # or features
        ),
        input_example=np.zeros((1, 3, size, size), np.uint8),
        pip_requirements=requirements(metadata["model"]),
        metadata={"classes": metadata["classes"], "student": metadata["model"]},
    )


def requirements(model_name: str) -> list[str]:
    """Return the packages that a model needs, in this process's versions, without suffixes such as +cpu, which PyPI lacks.

    Raises RefusedError: there is no model of this name.
    """
    try:
        libraries = {check_model_name(part).library for part in model_parts(model_name)}
    except ModelError as error:
        raise RefusedError(str(error)) from error
    names = (*MODEL_PACKAGES, "timm") if "timm" in libraries else MODEL_PACKAGES
    return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in names]


def user() -> str:
    """Return the user's name, or in a container without one the user id."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
