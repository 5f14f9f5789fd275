"""What a user sees where there is no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.cluster.connect import connect
from trainables.errors import ClusterError


def test_a_ray_that_cannot_start_here_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("far" * 40)  # sockets lie below it, and their paths have 107 bytes at most
    deep.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    words = r"Ray does not start on this machine: .*AF_UNIX path length cannot exceed 107 bytes"
    with pytest.raises(ClusterError, match=words) as refused, connect(1, tmp_path):
        raise AssertionError("there is a Ray")
    assert "\n" not in str(refused.value)
