"""MLflow's server behind a token, read-only by default, because every user of a machine can open its loopback ports.

`mlflow server --app-name raydistill` finds it through the entry point `mlflow.app`.
"""

import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from mlflow.server.fastapi_app import app as mlflow_app

COOKIE = "raydistill_ui"
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_READ_BY_POST = re.compile(
    r"/graphql|/(?:ajax-)?api/\d\.\d/mlflow/[\w-]+/"
    r"(?:search|search-datasets|get-latest-versions|presigned-download-url|batchGetInfos|metrics)"
)
"""Paths of MLflow's REST API that only read, though their method is POST."""
GRACE_S = 5.0
"""How long a stopping server waits for open requests."""
TOKEN = re.compile(r"[\w.~-]{8,}")
"""Tokens that need no escaping in URLs and cookies."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class GuardedApp:
    """An ASGI application that requires a token: first in the URL, later in a cookie or as a bearer token."""

    def __init__(self, inner: Callable[[Scope, Receive, Send], Awaitable[None]], token: str, *, changes: bool) -> None:
        """`changes` says whether requests may write and delete. Raises ValueError: the token is no `TOKEN`."""
        if not TOKEN.fullmatch(token):
            raise ValueError("a token has at least 8 letters, digits and characters of `.~_-`")
        self._inner, self._token, self._changes = inner, token, changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to MLflow."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket that is not accepted is closed by the server
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        sent = [value for name, value in query if name == "token"]
        if sent and self._is_token(sent[0]):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Lax"
            location = scope["path"] + (f"?{rest}" if rest else "")
            await _answer(send, 303, "", [("set-cookie", cookie), ("location", location)])
        elif not self._is_known(scope):
            await _answer(send, 401, "Open the address with the token that `distill ui` has printed.\n")
        elif not self._changes and not _only_reads(scope["method"], scope["path"]):
            await _answer(send, 403, "These records can only be read here: start `distill ui --allow-changes` to change them.\n")
        else:
            await self._inner(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # Not with http.cookies, which drops all cookies if one of another program on this host is JSON.
        cookie = re.search(rf"(?:^|;\s*){COOKIE}=([^;]*)", headers.get(b"cookie", ""))
        bearer = headers.get(b"authorization", "").removeprefix("Bearer ")  # as MLFLOW_TRACKING_TOKEN is sent
        return self._is_token(bearer) or (cookie is not None and self._is_token(cookie[1]))

    def _is_token(self, sent: str) -> bool:
        return secrets.compare_digest(sent.encode(), self._token.encode())


def _only_reads(method: str, path: str) -> bool:
    return method in _READ_METHODS or (method == "POST" and _READ_BY_POST.fullmatch(path) is not None)


async def _answer(send: Send, status: int, text: str, headers: list[tuple[str, str]] | None = None) -> None:
    raw = [(name.encode(), value.encode()) for name, value in [("content-type", "text/plain; charset=utf-8"), *(headers or [])]]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": text.encode()})


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
