"""The servers of a Ray of our own."""

from __future__ import annotations

import contextlib
import subprocess

import psutil
import pytest

from service.cluster.local_ray import find_servers


def test_a_child_that_ends_while_rays_servers_are_looked_up_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["sleep", None, "raylet"])

    def name(child: psutil.Process) -> str:
        if (found := next(names)) is None:
            raise psutil.NoSuchProcess(child.pid)
        return found

    with contextlib.ExitStack() as stack:
        children = [psutil.Process(stack.enter_context(subprocess.Popen(["sleep", "60"])).pid) for _ in range(3)]
        monkeypatch.setattr(psutil.Process, "children", lambda _: children)
        monkeypatch.setattr(psutil.Process, "name", name)
        found = find_servers()
        for child in children:
            child.kill()
    assert found == {"raylet": children[2]}
