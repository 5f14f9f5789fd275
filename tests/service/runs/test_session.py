"""The session of a run: what it saves, and in which order its records end."""

import contextlib
import json
import time
from pathlib import Path

from service.config.experiment import load
from service.report import end_of_run
from service.runs.run_directory import begin_run
from service.runs.session import open_session
from service.tracking.spool import Spool
from trainables.rundir import RunDir


def test_an_interrupted_run_ends_in_mlflow_before_its_page_is_made(tmp_path: Path) -> None:
    resolved, run_dir = load("digits", ["tracking.uri=http://127.0.0.1:9"]), RunDir(tmp_path / "r")
    run_dir.root.mkdir()
    begin_run(resolved, "train", run_dir, tmp_path)
    with contextlib.suppress(KeyboardInterrupt), open_session(resolved, run_dir, end_of_run):
        raise KeyboardInterrupt
    events = [json.loads(line) for line in Spool(run_dir).events.read_text().splitlines()]
    assert [event["op"] for event in events[-3:]] == ["artifact", "end", "artifact"]
    assert events[-2]["status"] == "KILLED"
    assert [Path(event["path"]).name for event in events[-3::2]] == ["result.json", "report.html"]


def test_each_save_has_the_seconds_so_far(tmp_path: Path) -> None:
    resolved, run_dir = load("digits", ["tracking.enabled=false"]), RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    begin_run(resolved, "train", run_dir, tmp_path)
    written = json.loads(run_dir.result.read_text()) | {"seconds": 100.0}
    run_dir.result.write_text(json.dumps(written))
    with open_session(resolved, run_dir, end_of_run) as session:
        time.sleep(0.05)
        session.save(num_workers=1)
        assert 100.05 <= json.loads(run_dir.result.read_text())["seconds"] < 130
