"""A proxy before a real HTTP server that answers some requests wrongly, late, or not at all."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SLOW_S = 10.0
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass
class Reply:
    """What the server answers."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy
    rng: random.Random
    """Of the fault that the request has."""

    def handle_any(self) -> None:
        """Forward a request, with the fault that its turn has."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.next_fault(self.command)
        with contextlib.suppress(ConnectionError):
            if fault is None:
                self.answer(self.forward(body))
            else:
                kind, self.rng = fault
                FAULTS[kind](self, body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

    def forward(self, body: bytes) -> Reply:
        """The server's answer; 502 where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        with contextlib.closing(connection):
            try:
                connection.request(self.command, self.path, body or None, headers)
                response = connection.getresponse()
                forwarded = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
                if self.command == "HEAD":
                    forwarded.append(("Content-Length", response.getheader("Content-Length") or "0"))
                return Reply(response.status, forwarded, response.read())
            except (OSError, http.client.HTTPException):
                return Reply(502, [], b"")

    def answer(self, reply: Reply, body: bytes | None = None) -> None:
        """Send an answer; `body`: in place of its own, its length and all else being that of the answer."""
        self.send_response(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body if body is None else body)

    def reset(self) -> None:
        """End the connection, with a TCP reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


def _status(status: int) -> Callable[[_Handler, bytes], None]:
    return lambda handler, body: handler.answer(Reply(status, [("Content-Type", "text/html")], b"<html>not now</html>"))


def _garbage(handler: _Handler, body: bytes) -> None:
    """The server does what it was asked, and nobody can read its answer."""
    handler.forward(body)
    handler.answer(Reply(200, [("Content-Type", "application/json")], handler.rng.randbytes(64)))


def _not_http(handler: _Handler, body: bytes) -> None:
    handler.wfile.write(handler.rng.randbytes(256))
    handler.reset()


def _reset(handler: _Handler, body: bytes) -> None:
    handler.reset()


def _answer_lost(handler: _Handler, body: bytes) -> None:
    handler.forward(body)
    handler.reset()


def _cut_short(handler: _Handler, body: bytes) -> None:
    reply = handler.forward(body)
    handler.answer(reply, reply.body[: len(reply.body) // 2])
    handler.reset()


def _slow(handler: _Handler, body: bytes) -> None:
    time.sleep(SLOW_S)
    handler.answer(handler.forward(body))


def _trickle(handler: _Handler, body: bytes) -> None:
    reply = handler.forward(body)
    handler.answer(reply, b"")
    size = max(1, len(reply.body) // 20)
    for start in range(0, len(reply.body), size):
        handler.wfile.write(reply.body[start : start + size])
        time.sleep(0.05)


def _altered(handler: _Handler, body: bytes) -> None:
    reply = handler.forward(body)
    altered = bytearray(reply.body)
    if altered:
        altered[handler.rng.randrange(len(altered))] ^= 1
    handler.answer(reply, bytes(altered))


FAULTS: dict[str, Callable[[_Handler, bytes], None]] = {
    "HTTP 401": _status(401),
    "HTTP 429": _status(429),
    "HTTP 500": _status(500),
    "HTTP 503": _status(503),
    "garbage for an answer": _garbage,
    "no HTTP": _not_http,
    "connection reset": _reset,
    "answer lost": _answer_lost,
    "answer cut short": _cut_short,
    "10 s a call": _slow,
    "bytes that trickle": _trickle,
    "a bit altered": _altered,
}


@dataclass
class Plan:
    """Which requests get which fault: each with probability `share`, at most `most` in all."""

    rng: random.Random
    kinds: list[str]
    share: float
    most: int
    methods: tuple[str, ...] = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
    struck: list[str] = field(default_factory=list)


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Forwards to a port of this machine; its `plan` says what goes wrong."""

    daemon_threads = True

    def __init__(self, upstream_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port, self.plan = upstream_port, None
        self._lock = threading.Lock()

    plan: Plan | None

    @property
    def uri(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self, method: str) -> tuple[str, random.Random] | None:
        """The fault of the request that comes now, and a generator for what is random in it."""
        with self._lock:
            plan = self.plan
            if plan is None or method not in plan.methods or len(plan.struck) >= plan.most or plan.rng.random() >= plan.share:
                return None
            plan.struck.append(plan.rng.choice(plan.kinds))
            return plan.struck[-1], random.Random(plan.rng.getrandbits(64))


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[FaultyProxy]:
    """A proxy that runs until the context ends."""
    with FaultyProxy(port) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()
