"""Waiting for an event of another thread or process."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T]) -> T:
    """The first true value of `condition`. Where none comes, pytest's own timeout ends the test and shows where it waits."""
    while not (found := condition()):
        time.sleep(0.01)
    return found
