"""The `distill` command in this process, for commands that start no Ray."""

import signal
from pathlib import Path

import pytest

from service import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Its exit code, what it printed, and what it said on stderr."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err
