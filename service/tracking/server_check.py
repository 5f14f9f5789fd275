"""Checks before a run begins whether an MLflow server will accept its records.

Imports less of MLflow than `sender`, as the run waits for the check.
"""

import contextlib
import logging
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from mlflow.environment_variables import MLFLOW_TRACKING_TOKEN
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds, read_mlflow_creds
from mlflow.utils.databricks_utils import get_databricks_host_creds
from mlflow.utils.rest_utils import http_request
from requests import Response

from service.tracking.stores import root_cause
from trainables.errors import ExperimentError, first_line
from trainables.notices import notice
from trainables.redact import redact

TIMEOUT_S = 5
LOGIN = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
DATABRICKS_LOGIN = "DATABRICKS_HOST and DATABRICKS_TOKEN"
# As in `sender`: our error has what MLflow would log.
logging.getLogger("mlflow").setLevel(logging.CRITICAL + 1)


def check_server(uri: str, experiment: str) -> None:
    """Refuse a server that will never accept records of this experiment. Creates nothing there.

    A server that is down or has an internal error is accepted: records are sent later.

    Raises ExperimentError: it rejects the login or the experiment, cannot be trusted, or is not MLflow.
    """
    where = redact(uri)
    if uri.startswith("databricks") and not experiment.startswith("/"):
        raise ExperimentError(
            f"tracking.experiment: Databricks takes a path: write /Users/NAME/{experiment}, or /Shared/{experiment}"
        )
    answer = _ask(uri, experiment, "GET", "get-by-name", params={"experiment_name": experiment})
    if answer is None:
        return
    found: Any = None
    with contextlib.suppress(ValueError):
        found = answer.json()
    if not isinstance(found, dict) or not found.keys() & {"experiment", "error_code"}:
        kind = answer.headers.get("content-type", "no content type").partition(";")[0]
        raise ExperimentError(
            f"tracking.uri: {where} is not MLflow ({redact(answer.url.partition('?')[0])} answers {answer.status_code}, {kind}): "
            "write the address of an MLflow server, with its path if it has one"
        )
    if any(hop.status_code in (301, 302, 303) for hop in answer.history):  # they turn each POST into a GET
        raise ExperimentError(f"tracking.uri: {where} redirects: write {redact(answer.url.partition('/api/2.0/')[0])}")
    # Without a new name: a server complains about that only after it has checked the permission.
    if "experiment" in found:
        _ask(uri, experiment, "POST", "update", json={"experiment_id": found["experiment"]["experiment_id"]})
    else:
        _ask(uri, experiment, "POST", "create", json={})


def _ask(uri: str, experiment: str, method: str, action: str, **content: Any) -> Response | None:
    """Send a request about experiments. Returns the response, or None if the server is down.

    Raises ExperimentError: it will never accept the request.
    """
    is_databricks = uri.startswith("databricks")
    try:
        creds = get_databricks_host_creds(uri) if is_databricks else get_default_host_creds(uri)
    except MlflowException as error:
        unset = f"no Databricks login is configured: set {DATABRICKS_LOGIN}"
        raise ExperimentError(f"tracking.uri: {redact(uri)}: {unset if is_databricks else first_line(error)}") from error
    try:
        limits = {"max_retries": 0, "timeout": TIMEOUT_S, "retry_timeout_seconds": TIMEOUT_S}
        answer: Response = http_request(creds, f"/api/2.0/mlflow/experiments/{action}", method, **limits, **content)
    except Exception as error:
        if problem := _permanent_problem(root_cause(error), redact(uri)):
            raise ExperimentError(f"tracking.uri: {problem}") from error
        return None
    if answer.status_code in (401, 403):
        raise ExperimentError(f"tracking.uri: MLflow at {redact(uri)} {_denial(answer, uri, experiment)}")
    return None if answer.status_code in (408, 429) or answer.status_code >= 500 else answer


def _denial(answer: Response, uri: str, experiment: str) -> str:
    """Explain a response of status 401 or 403, and say what to do."""
    remedy, host = DATABRICKS_LOGIN if uri.startswith("databricks") else LOGIN, urlsplit(uri).netloc
    login = read_mlflow_creds().username or ("MLFLOW_TRACKING_TOKEN" if MLFLOW_TRACKING_TOKEN.get() else "")
    if answer.status_code == 401:
        return f"{f'rejects the login of {login}' if login else 'requires a login'}: set {remedy}"
    if "Invalid Host header" in answer.text:
        return f"does not accept the host name {host}: start it with `mlflow server --allowed-hosts {host}`"
    text = redact(answer.text.strip().partition("\n")[0][:200])
    return (
        f"does not allow {login or 'a client without a login'} to write to the experiment {experiment!r} "
        f"({'HTTP 403' if text.startswith('<') else text}): ask its owner for EDIT, name another in tracking.experiment, "
        f"or log in with {remedy}"
    )


def _permanent_problem(cause: BaseException, where: str) -> str:
    """Explain a connection error that retrying does not fix, and say what to write; "" for a server that is down."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {where} cannot be verified ({cause.verify_message}): name the file of its CA in "
            "MLFLOW_TRACKING_SERVER_CERT_PATH, or trust any certificate with MLFLOW_TRACKING_INSECURE_TLS=true"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return f"{where} does not speak TLS: write http:// instead of https://"
    if isinstance(cause, socket.gaierror):
        notice(f"tracking.uri: the host of {where} is unknown ({cause.strerror}): check its spelling")
    return ""
