"""Notices: what was guessed, mapped or left out of a user's input, one line each.

Whoever reads an input calls `notice`; the command that reads it for the user listens. Workers read the same input again, where
nobody listens, so that each line is shown once.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainables.errors import printable

_log = logging.getLogger("raydistill.notices")
_log.setLevel(logging.INFO)
_log.propagate = False  # to the log of a worker, which would show each line once more


def notice(line: str) -> None:
    """Tell the user `line`: what was found, and what was made of it."""
    _log.info("%s", printable(line))


class _Listener(logging.Handler):
    def __init__(self, receive: Callable[[str], None]) -> None:
        super().__init__()
        self._receive = receive
        self._received: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._received:
            self._received.add(line)
            self._receive(line)


@contextmanager
def notices_to(receive: Callable[[str], None]) -> Iterator[None]:
    """Call `receive` with each notice of this process, once for each line, until the context ends."""
    listener = _Listener(receive)
    _log.addHandler(listener)
    try:
        yield
    finally:
        _log.removeHandler(listener)
