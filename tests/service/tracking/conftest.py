"""A run with a log on a real MLflow store."""

import os
from pathlib import Path

import pytest

from service.tracking.stores import default_uri
from tests.service.tracking.store import Run
from trainables.rundir import RunDir


@pytest.fixture(scope="session")
def runs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs' root whose store exists: making one takes seconds, so these tests share it."""
    from service.tracking.sender import create_database

    root = tmp_path_factory.mktemp("a folder #1")
    create_database(root / "mlflow.db", (root / "mlartifacts").as_uri())
    return root


@pytest.fixture(autouse=True)
def thread_priorities(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What would have been set. At the lowest priority a busy machine never gets to what these tests wait for."""
    priorities: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: priorities.append(arguments))
    return priorities


@pytest.fixture
def run_dir(runs_root: Path, tmp_path: Path) -> RunDir:
    return RunDir(runs_root / tmp_path.name)


@pytest.fixture
def run(runs_root: Path, run_dir: RunDir) -> Run:
    return Run(run_dir, default_uri(runs_root))
