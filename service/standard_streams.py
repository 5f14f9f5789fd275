"""Standard input, output and errors as they come: closed, in any encoding, read by a program that ends early."""

import io
import os
import select
import signal
import sys

CLOSED_PIPE = 128 + signal.SIGPIPE


def prepare_streams() -> None:
    """Open standard streams that are closed, and let those of every encoding take all characters.

    What an encoding lacks becomes an escape such as `\\u4e2d`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be in its place
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, which is this one
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 (closed with the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not one that a caller in this process has put there
            stream.reconfigure(errors="backslashreplace")


def is_output_unread() -> bool:
    """Whether the standard output is a pipe whose reader has gone, as in `distill show digits | head -1`."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))
