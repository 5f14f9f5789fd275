"""What is said at the start of a run about an MLflow server that takes no records: real requests to small servers."""

import contextlib
import datetime
import http.server
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.config.experiment import load
from service.runs.run_directory import begin_run
from service.tracking.stores import check_store
from tests.service.commands import run
from tests.service.tracking.store import Run
from trainables.errors import ExperimentError
from trainables.notices import notices_to
from trainables.rundir import RunDir

Answer = tuple[int, str]
"""Status and body; of a redirect the address."""

LOGIN = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
FOUND: Answer = (200, json.dumps({"experiment": {"experiment_id": "7", "name": "adas", "lifecycle_stage": "active"}}))
ABSENT: Answer = (404, json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}))
INCOMPLETE: Answer = (400, json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": "Missing value"}))
DENIED: Answer = (403, "Permission denied")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        path = self.path.partition("?")[0]
        self.server.requests.append((path, body))
        status, text = self.server.answers.get(path.rpartition("/")[2], self.server.answers["*"])
        self.send_response(status)
        if status in (301, 302):
            self.send_header("location", text + path)
        self.send_header("content-type", "application/json" if text.startswith("{") else "text/html; charset=utf-8")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None: ...


class Server(http.server.ThreadingHTTPServer):
    """Answers by the last part of a path; `*` for any other."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Answer] = {"*": ABSENT}
        self.requests: list[tuple[str, str]] = []
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.uri = f"http://{self.address}"

    def handle_error(self, *arguments: object) -> None: ...


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    with serving() as server:
        yield server


def refusal(uri: str, experiment: str = "adas") -> str:
    with pytest.raises(ExperimentError) as caught:
        check_store(uri, experiment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "opensesame")


def test_a_training_on_a_server_that_wants_a_login_does_not_begin(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["*"] = (401, "You are not authenticated.")
    code, out, err = run(capsys, "train", "digits", "--runs", tmp_path / "runs", "--set", f"tracking.uri={server.uri}")
    assert (code, out) == (2, "")
    assert err == f"error: tracking.uri: MLflow at {server.uri} requires a login: set {LOGIN}\n"
    assert not (tmp_path / "runs").exists()


def test_a_login_that_a_server_does_not_know_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers["*"] = (401, "You are not authenticated.")
    login(monkeypatch)
    assert refusal(server.uri) == f"tracking.uri: MLflow at {server.uri} rejects the login of bob: set {LOGIN}"


@pytest.mark.parametrize("answers", [{"*": DENIED}, {"*": DENIED, "get-by-name": FOUND}, {"*": DENIED, "get-by-name": ABSENT}])
def test_an_experiment_that_one_may_not_write_to_is_refused_also_where_one_may_read_it(
    answers: dict[str, Answer], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = answers
    login(monkeypatch)
    assert refusal(server.uri) == (
        f"tracking.uri: MLflow at {server.uri} does not allow bob to write to the experiment 'adas' (Permission denied): "
        f"ask its owner for EDIT, name another in tracking.experiment, or log in with {LOGIN}"
    )


@pytest.mark.parametrize(("found", "question"), [(FOUND, ("update", '{"experiment_id": "7"}')), (ABSENT, ("create", "{}"))])
def test_the_question_whether_one_may_write_lacks_the_name_that_would_change_something(
    found: Answer, question: tuple[str, str], server: Server
) -> None:
    server.answers = {"*": INCOMPLETE, "get-by-name": found}
    check_store(f"{server.uri}/below", "adas")
    root = "/below/api/2.0/mlflow/experiments"
    assert server.requests == [(f"{root}/get-by-name", ""), (f"{root}/{question[0]}", question[1])]


@pytest.mark.parametrize(
    "answer", [(200, "<html>Ray Dashboard</html>"), (404, '{"detail": "Not Found"}'), (404, "404: Not Found")]
)
def test_an_address_where_something_else_than_mlflow_answers_is_refused(answer: Answer, server: Server) -> None:
    server.answers["*"] = answer
    assert refusal(server.uri).startswith(
        f"tracking.uri: {server.uri} is not MLflow ({server.uri}/api/2.0/mlflow/experiments/get-"
    )
    assert refusal(server.uri).endswith("write the address of an MLflow server, with its path if it has one")


def test_an_address_that_redirects_is_refused_as_records_would_not_follow(server: Server) -> None:
    with serving() as redirecting:
        redirecting.answers["*"] = (301, server.uri)
        assert refusal(redirecting.uri) == f"tracking.uri: {redirecting.uri} redirects: write {server.uri}"


def test_a_certificate_that_cannot_be_verified_is_refused_and_accepted_when_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path / "cert.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    uri = f"https://{server.address}"
    words = refusal(uri)
    assert words.startswith(f"tracking.uri: the certificate of {uri} cannot be verified (self-signed certificate)")
    assert "MLFLOW_TRACKING_SERVER_CERT_PATH" in words
    assert "MLFLOW_TRACKING_INSECURE_TLS=true" in words
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "cert.pem"))
    check_store(uri, "adas")
    assert [path.rpartition("/")[2] for path, _ in server.requests] == ["get-by-name", "create"]


def self_signed(path: Path) -> Path:
    """A file with a key and its certificate for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mlflow")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(key.private_bytes(*private) + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_server_without_tls_is_named(server: Server) -> None:
    uri = f"https://{server.address}"
    assert refusal(uri) == f"tracking.uri: {uri} does not speak TLS: write http:// instead of https://"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_with_an_error_of_its_own_is_no_reason_not_to_train(status: int, server: Server) -> None:
    server.answers["*"] = (status, "<html>later</html>")
    check_store(server.uri, "adas")
    check_store("http://127.0.0.1:9", "adas")


def test_a_host_that_is_not_known_is_named_and_no_reason_not_to_train() -> None:
    notices: list[str] = []
    with notices_to(notices.append):
        check_store("http://mlfow.invalid:5000", "adas")
    [line] = notices
    assert line.startswith("tracking.uri: the host of http://mlfow.invalid:5000 is unknown (")
    assert line.endswith("check its spelling")


def test_databricks_is_asked_for_a_login_and_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DATABRICKS_HOST", raising=False)
    unset = "no Databricks login is configured: set DATABRICKS_HOST and DATABRICKS_TOKEN"
    assert refusal("databricks", "/Users/bob/x") == f"tracking.uri: databricks: {unset}"
    assert refusal("databricks", "x") == "tracking.experiment: Databricks takes a path: write /Users/NAME/x, or /Shared/x"


def test_a_permission_that_is_lost_during_a_run_is_named_once_and_the_records_wait(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    login(monkeypatch)
    server.answers = {"*": DENIED, "get-by-name": FOUND}
    denied = Run(RunDir(tmp_path / "adas"), server.uri)
    delivery = denied.sync(max_failures=2)
    words = (
        f"{server.uri} did not accept all events (API request to endpoint /api/2.0/mlflow/runs/search failed with error code 403"
    )
    assert not delivery.is_complete
    assert delivery.message.startswith(words)
    assert "Permission denied" in delivery.message
    assert delivery.message.endswith(f"; later, run distill sync {denied.run_dir.root}")
    assert caplog.text.count(words) == 1


def test_a_cache_is_filled_whatever_the_server_says_as_nothing_is_sent_to_it(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["*"] = (401, "You are not authenticated.")
    values = {"tracking.uri": server.uri, "teacher.cache": tmp_path / "cache", "teacher.weights": tmp_path / "absent.pt"}
    arguments = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    _, _, err = run(capsys, "cache", "digits", "--runs", tmp_path / "runs", *arguments)
    assert "absent.pt" in err
    assert not server.requests


def test_a_run_that_has_begun_is_resumed_whatever_the_server_says(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["*"] = DENIED
    run_dir = RunDir(tmp_path / "run")
    begin_run(load("digits", [f"tracking.uri={server.uri}", "data.path=/absent"]), "train", run_dir, tmp_path)
    _, _, err = run(capsys, "resume", run_dir.root)
    assert "/absent" in err
    assert not server.requests
