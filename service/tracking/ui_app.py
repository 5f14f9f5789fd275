"""MLflow's server behind a token, read-only by default, because every user of a machine can open its loopback ports.

`mlflow server --app-name raydistill` finds it through the entry point `mlflow.app`.
"""

import os
import re
import secrets
import signal
import threading
import time

from mlflow.server.fastapi_app import app as mlflow_app
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "raydistill_ui"
_READ_BY_POST = re.compile(
    r"/graphql|/(?:ajax-)?api/\d\.\d/mlflow/[\w-]+/"
    r"(?:search|search-datasets|get-latest-versions|presigned-download-url|batchGetInfos|metrics)"
)
"""Paths of MLflow's REST API that only read, though their method is POST."""
GRACE_S = 5.0
"""How long a stopping server waits for open requests."""


class GuardedApp:
    """An ASGI application that requires a token: first in the URL, later in a cookie or as a bearer token."""

    def __init__(self, inner: ASGIApp, token: str, *, changes: bool) -> None:
        """`changes` says whether requests may write and delete."""
        self._inner, self._token, self._changes = inner, token, changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to MLflow."""
        if scope["type"] not in ("http", "lifespan"):
            return  # a websocket that is not accepted is closed by the server
        answer = self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self._inner)(scope, receive, send)

    def _answer(self, request: Request) -> PlainTextResponse | RedirectResponse | None:
        """Return the answer to a request that does not reach MLflow."""
        if self._is_token(request.query_params.get("token", "")):
            address = request.url.remove_query_params("token").replace(scheme="", netloc="")
            redirect = RedirectResponse(address, 303)
            redirect.set_cookie(COOKIE, self._token, httponly=True)
            return redirect
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")  # as MLFLOW_TRACKING_TOKEN is sent
        if not self._is_token(bearer) and not self._is_token(request.cookies.get(COOKIE, "")):
            return PlainTextResponse("Open the address with the token that `distill ui` has printed.\n", 401)
        reads_by_post = request.method == "POST" and _READ_BY_POST.fullmatch(request["path"])
        if request.method not in ("GET", "HEAD", "OPTIONS") and not reads_by_post and not self._changes:
            words = "These records can only be read here: start `distill ui --allow-changes` to change them.\n"
            return PlainTextResponse(words, 403)
        return None

    def _is_token(self, sent: str) -> bool:
        return bool(sent) and secrets.compare_digest(sent.encode(), self._token.encode())


def end_with_stdin() -> None:
    """End this process once its standard input closes, that is, when the process that started the server ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def create_app() -> GuardedApp:
    """Create MLflow's application behind the token in the environment."""
    threading.Thread(target=end_with_stdin, daemon=True).start()
    return GuardedApp(mlflow_app, os.environ["RAYDISTILL_UI_TOKEN"], changes="RAYDISTILL_UI_CHANGES" in os.environ)
