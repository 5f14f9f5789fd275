"""An S3 server, moto's, as a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainables.object_store import store
from trainables.object_store.store import ObjectStore

_SERVER = """
import sys, threading
from pyarrow import fs
from moto.s3.models import s3_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

app = DomainDispatcherApplication(create_backend_app)
refusals = {"status": 0, "left": 0}

def faulty(environ, start_response):
    path = environ["PATH_INFO"]
    if path.startswith("/-refuse/"):
        refusals["status"], refusals["left"] = map(int, path.split("/")[2:4])
    elif path == "/-clear":
        s3_backends.reset()
        bucket.create_dir("bucket")
    elif refusals["left"] > 0:
        refusals["left"] -= 1
        name = {503: "SlowDown", 403: "AccessDenied"}[refusals["status"]]
        start_response(f"{refusals['status']} {name}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{name}</Code><Message>Please do not.</Message></Error>".encode()]
    else:
        return app(environ, start_response)
    start_response("200 OK", [])
    return [b""]

server = make_server("127.0.0.1", 0, faulty, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{server.port}"
keys = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
bucket = fs.S3FileSystem(**keys, endpoint_override=endpoint, allow_bucket_creation=True)
print(endpoint, flush=True)
sys.stdin.read()
"""
SECRET = "a-secret-of-22-letters"


class S3:
    """The server."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _SERVER]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()
        assert self.endpoint

    @property
    def env(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "access-key-1",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def refuse(self, status: int, num_requests: int) -> None:
        """Answer the next requests with an error: 503, or 403."""
        self._control(f"refuse/{status}/{num_requests}")

    def clear(self) -> None:
        """Nothing is there but an empty bucket `bucket`, and no error is to come."""
        self.refuse(503, 0)
        self._control("clear")

    def _control(self, command: str) -> None:
        urllib.request.urlopen(f"{self.endpoint}/-{command}").close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """A server for all tests: it takes seconds to start."""
    pytest.importorskip("moto.server")
    with contextlib.closing(S3()) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    """A server with an empty bucket `bucket`, for this process; the S3 client itself tries nothing again."""
    s3_server.clear()
    for name, value in {**s3_server.env, "RAYDISTILL_COPIES": str(tmp_path / "copies")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "CLIENT_ATTEMPTS", 1)
    return s3_server


def contents(uri: str) -> dict[str, str]:
    """All objects below a URI."""
    store = ObjectStore(uri, 5.0)
    return {name: (store.read(name) or b"").decode(errors="replace") for name in store.entries()}


def owner_of(uri: str, part: str = "") -> str:
    """The id of the folder that has the newest copy."""
    content = ObjectStore(uri, 5.0).read(f"{part}/owner.json".lstrip("/"))
    assert content is not None
    return str(json.loads(content)["folder"])
