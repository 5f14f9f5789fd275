"""Notices: one line for whatever was guessed, mapped or left out of a user's input.

Code that reads an input calls `notice`, and the command that reads it for the user collects them with `notices_to`. Workers read
the same input again but do not collect, so that each line is shown once.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainables.errors import printable

_log = logging.getLogger("raydistill.notices")
_log.setLevel(logging.INFO)
_log.propagate = False  # a worker's log would repeat each line


def notice(line: str) -> None:
    """Show the user `line`: what was found and how it was interpreted."""
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
    """Within the context, call `receive` once for each distinct notice of this process."""
    listener = _Listener(receive)
    _log.addHandler(listener)
    try:
        yield
    finally:
        _log.removeHandler(listener)
