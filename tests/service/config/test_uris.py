"""Which URIs are refused."""

import pytest

from service.config.experiment import load
from service.config.uris import checked_uri
from trainables.errors import ExperimentError


@pytest.mark.parametrize("name", ["what?.db", "50%.db"])
def test_a_path_that_mlflow_cannot_open_is_refused(name: str) -> None:
    with pytest.raises(ExperimentError, match="choose a path without"):
        checked_uri(f"sqlite:////runs/{name}")


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("tracking.uri=http://me:opensesame@host:5000", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("tracking.uri=postgresql+psycopg2://me:open@sesame@db/mlflow", "PGPASSWORD or ~/.pgpass"),
        ("data.path=s3://AKIA1:opensesame@bucket/set", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("teacher.weights=https://host/file.pth?token=opensesame", "give it in the environment"),
    ],
)
def test_a_secret_in_an_experiment_is_refused_without_repeating_it(setting: str, instead: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        load("digits", [setting])
    line = str(refused.value)
    assert line.startswith(f"--set: {setting.partition('=')[0]} has a password or a key in it")
    assert instead in line
    assert "sesame" not in line
