"""What a submitted command is on the cluster, where this machine's working directory is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.jobs import package
from trainables.errors import ExperimentError


def test_paths_of_pack_and_data_are_absolute_whether_they_exist_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "90").mkdir()
    assert package(["pack", "images", "new/packed", "--quality", "90", "--check"], tmp_path) == [
        "pack", f"{tmp_path}/images", f"{tmp_path}/new/packed", "--quality", "90", "--check"
    ]  # fmt: skip
    assert package(["data", "--sheet", "sheet.png", "packed"], tmp_path) == [
        "data", "--sheet", f"{tmp_path}/sheet.png", f"{tmp_path}/packed"
    ]  # fmt: skip


def test_what_is_no_command_of_ours_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="give one of train, sweep, resume, cache, evaluate, report, sync, pack, data"):
        package(["ui"], tmp_path)
