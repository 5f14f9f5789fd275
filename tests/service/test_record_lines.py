"""The last lines of a run: where its records are in MLflow, and what opens them."""

from pathlib import Path

import pytest

from service.commands.runs import record_lines
from service.config.experiment import load
from service.runs.result import MlflowTarget, TrialRow, read_result
from service.runs.run_directory import begin_run
from service.tracking import default_uri
from service.tracking.spool import Cursor, Spool
from trainables.rundir import RunDir

COMPARED = "#/compare-runs?runs=%5B%22abc%22%5D"


@pytest.mark.parametrize(
    ("uri", "opens", "compares"),
    [
        ("http://mlflow:5000", "", "compare the trials at: http://mlflow:5000/"),
        ("https://host/below/", "", "compare the trials at: https://host/below/"),
        ("", "open them with: distill ui --runs {0}", "then compare the trials at: http://127.0.0.1:5000/"),
        (
            "postgresql://db/mlflow",
            "open them with: mlflow server --backend-store-uri postgresql://db/mlflow",
            "then compare the trials at: http://127.0.0.1:5000/",
        ),
    ],
)
def test_records_are_opened_where_they_are(uri: str, opens: str, compares: str, tmp_path: Path) -> None:
    run_dir, uri = RunDir(tmp_path / "run"), uri or default_uri(tmp_path)
    begin_run(load("digits"), "sweep", run_dir, tmp_path)
    Spool(run_dir).aim(uri, "e")
    Spool(run_dir).save_cursor(uri, Cursor(experiment_id="1", runs={"trial/000": "abc"}))
    scale = {"scale.num_workers": 1, "data.global_batch_size": 64, "data.loader_workers": 1}
    row = TrialRow.model_validate({"id": "000", "params": {}, "scale": scale, "status": "ok"})
    target = MlflowTarget(uri=uri, experiment="e")
    result = read_result(run_dir.result, run_dir.experiment).model_copy(update={"mlflow": target, "trials": [row]})
    first, *opening, last = record_lines(run_dir, result, tmp_path)
    assert first == f"records: {uri}"
    assert opening == ([opens.format(tmp_path)] if opens else [])
    assert last.startswith(compares + COMPARED)
