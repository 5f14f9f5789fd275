"""Work spread over a cluster ends in one line where the cluster loses a part of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from service import spread
from trainables.errors import DistillError


@pytest.mark.parametrize("lost", [ray.exceptions.NodeDiedError("gone"), ray.exceptions.OutOfMemoryError("a\nlong\nstory")])
def test_a_node_that_dies_ends_the_command_in_one_line(lost: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_: object) -> None:
        raise lost

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(spread.clusters, "connect", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(ray, "remote", lambda _: task)
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DistillError) as caught:
        list(spread.spread(len, [("a",), ("b",)], 2, tmp_path))
    assert str(caught.value) == (
        f"a process or a node of the cluster was lost ({type(lost).__name__}), most likely for want of memory; "
        "the same command goes on"
    )
