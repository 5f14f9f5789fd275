"""What a submitted command is on the cluster, where this machine's working directory is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.experiment import load
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


def test_an_experiment_without_a_method_is_submitted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = "data: {path: digits, image_size: 8}"
    Path("labels.yaml").write_text(f"{{name: labels, student: {{model: convnet_small}}, {data}, distill: {{method: none}}}}")
    there = tmp_path / "package"
    there.mkdir()
    assert package(["train", "labels.yaml"], there) == ["train", "labels.yaml"]
    sent = load(str(there / "labels.yaml")).experiment
    assert not sent.distill.method
    assert sent.name == "labels"
