"""The last lines of a run: where its records are in MLflow, and what opens them."""

from pathlib import Path

import pytest

from service.commands.runs import record_lines
from service.config.experiment import load
from service.runs.result import MlflowTarget, TrialRow
from service.runs.run_directory import begin_run
from service.runs.run_log import read_log
from service.tracking.run_view import SyncState
from service.tracking.stores import default_uri
from trainables.rundir import RunDir

RUNS = "#/experiments/1/runs?workflowType=machine_learning"


@pytest.mark.parametrize(
    ("uri", "opens", "compares"),
    [
        ("http://mlflow:5000", "", "compare the trials at: http://mlflow:5000/"),
        ("https://host/below/", "", "compare the trials at: https://host/below/"),
        ("", "open them with: distill ui --runs '{0}'", "then compare the trials at: http://127.0.0.1:5000/"),
        (
            "postgresql://db/mlflow",
            "open them with: mlflow server --backend-store-uri postgresql://db/mlflow",
            "then compare the trials at: http://127.0.0.1:5000/",
        ),
    ],
)
@pytest.mark.parametrize("views", [[], ["table", "charts"]], ids=["no views", "views"])
def test_records_are_opened_where_they_are(uri: str, opens: str, compares: str, views: list[str], tmp_path: Path) -> None:
    root = tmp_path / "my runs"
    run_dir, uri = RunDir(root / "run"), uri or default_uri(root)
    begin_run(load("digits"), "sweep", run_dir, root)
    SyncState(uri=uri, experiment="e", experiment_id="1", views=views).write(run_dir)
    scale = {"scale.num_workers": 1, "data.global_batch_size": 64, "data.loader_workers": 1}
    row = TrialRow.model_validate({"id": "000", "params": {}, "scale": scale, "status": "ok"})
    target = MlflowTarget(uri=uri, experiment="e")
    result = read_log(run_dir).result.model_copy(update={"mlflow": target, "trials": [row]})
    page = compares.partition(": ")[2] + RUNS
    links = [f"{compares}{RUNS}"]
    if views:
        charts = f"their charts: {page}&viewStateShareKey=charts&compareRunsMode=CHART"
        links = [f"{compares}{RUNS}&viewStateShareKey=table", charts]
    opening = [opens.format(root)] if opens else []
    assert record_lines(run_dir, result, root) == [f"records: {uri}", *opening, *links]
