"""What `distill cache --publish` refuses before anything runs."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import cli
from service.config.experiment import load
from service.runs.teacher_cache import fill_cache
from trainables.errors import ExperimentError

TEACHERS = "teachers=[{model: mlp_small, weights: x, cache: /c}, {model: mlp_large, weights: y, cache: /c}]"


def test_a_readme_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(ExperimentError, match=r"--publish .*: its README.md is not of a reinforced data set: name another"):
        fill_cache(load("digits", [f"teacher.cache={tmp_path}"]), tmp_path / "runs", tmp_path)
    (tmp_path / "README.md").write_text("# Reinforced data set\n")
    with pytest.raises(ExperimentError, match=r"teacher.weights: the teacher is not trained on these classes yet"):
        fill_cache(load("digits", [f"teacher.cache={tmp_path}"]), tmp_path / "runs", tmp_path)


@pytest.mark.parametrize("policy", ["augmix", "three_augment"])
def test_a_policy_that_the_format_has_no_columns_for_is_refused(tmp_path: Path, policy: str) -> None:
    settings = [f"teacher.cache={tmp_path}", f"data.device_augment.policy={{name: {policy}}}"]
    with pytest.raises(ExperimentError, match=rf"policy {policy}: --publish has no columns for it: write randaugment, .*"):
        fill_cache(load("digits", settings), tmp_path / "runs", tmp_path)


def test_several_teachers_name_the_folder_that_is_published(tmp_path: Path) -> None:
    experiment = tmp_path / "several.yaml"
    experiment.write_text(f"base: digits\nteacher: null\n{TEACHERS.replace('=', ': ', 1)}\n")
    result = CliRunner().invoke(cli, ["cache", str(experiment), "--publish", str(tmp_path / "set")])
    assert result.exit_code != 0
    assert (
        f"--publish {tmp_path / 'set'}: write cache: {tmp_path / 'set'} in each of teachers"
        in f"{result.output}{result.exception}"
    )
