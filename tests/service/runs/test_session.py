"""The session of a run: what it saves, and in which order its records end."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from service.config.experiment import load
from service.report import end_of_run
from service.runs.events import Event, EventTail, event
from service.runs.result import RunResult, StageRow, TrialRow
from service.runs.run_directory import begin_run
from service.runs.session import code_tags, open_session, start_tracking
from tests.run_log import add, numbers, result_of, write_log
from tests.service.tracking.store import query
from tests.waiting import wait_until
from trainables.config import DataIdentity, SplitIdentity
from trainables.rundir import RunDir

ROOT = Path(__file__).resolve().parents[3]


def test_an_interrupted_run_ends_in_mlflow_while_its_page_is_made_which_is_among_its_files(tmp_path: Path) -> None:
    resolved, run_dir = load("digits"), RunDir(tmp_path / "r")
    begin_run(resolved, "train", run_dir, tmp_path)
    statuses = []

    class SlowPage:
        """A reporter whose page takes until MLflow knows of the end."""

        summary = staticmethod(end_of_run.summary)

        @staticmethod
        def write_page_at_end(run_dir: RunDir, result: RunResult, echo: Callable[[str], None]) -> None:
            wait_until(lambda: query(tmp_path, "SELECT status FROM runs") == [("KILLED",)])
            statuses.append(result.status)
            end_of_run.write_page_at_end(run_dir, result, echo)

    with contextlib.suppress(KeyboardInterrupt), open_session(resolved, run_dir, SlowPage()) as session:
        start_tracking(session)
        wait_until(lambda: (tmp_path / "mlflow.db").exists() and bool(query(tmp_path, "SELECT 1 FROM runs")))
        raise KeyboardInterrupt
    assert statuses == ["interrupted"]
    assert session.syncing is not None
    assert session.syncing.close(60).is_complete
    names = {path.name for path in (tmp_path / "mlartifacts").rglob("*.*")}
    assert names >= {"experiment.yaml", "result.json", "report.html"}


def test_the_commit_in_mlflow_is_that_of_this_code_and_not_of_the_folder_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "another"]):
        subprocess.run(["git", *command], check=True)
    of_folder = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    tags = code_tags()
    assert tags["raydistill.version"] == version("raydistill")
    assert of_folder not in tags.values()
    of_package = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert tags.get("raydistill.commit", "") == of_package.stdout.strip()


def test_each_snapshot_has_the_seconds_of_all_sessions_so_far(tmp_path: Path) -> None:
    resolved, run_dir = load("digits", ["tracking.enabled=false"]), RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    begin_run(resolved, "train", run_dir, tmp_path)
    hour_ms = 3_600_000
    ended = event("session_ended", status="interrupted", reason="")
    past = [(event("session_begun"), hour_ms), (ended, hour_ms - 100_000), (event("session_begun"), 60_000)]
    for each, age_ms in (*past, (event("notice", text="x"), 10_000)):
        add(run_dir, each | {"time_ms": each["time_ms"] - age_ms})
    (run_dir.root / ".result.json.0a1b.tmp").write_text("{")  # of the session that was killed
    with open_session(resolved, run_dir, end_of_run) as session:
        time.sleep(0.05)
        session.save(num_workers=1)
        assert 150.05 <= json.loads(run_dir.result.read_text())["seconds"] < 180
    assert not list(run_dir.root.glob(".*.tmp"))


def test_a_session_records_what_has_changed_alone(tmp_path: Path) -> None:
    resolved, run_dir = load("digits", ["tracking.enabled=false"]), RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    begin_run(resolved, "sweep", run_dir, tmp_path, ["a notice"])
    scale = {"scale.num_workers": 1, "data.global_batch_size": 32, "data.loader_workers": 1}
    rows = [TrialRow.model_validate({"id": id, "params": {}, "status": "pending", "scale": scale}) for id in ("000", "001")]
    with open_session(resolved, run_dir, end_of_run) as session:
        session.save(space={}, metric="images_per_s", mode="max", trials=rows)
        session.record("trial_ended", trial="000", outcome={"status": "ok", "metrics": {"loss": float("nan")}})
        ended = rows[0].model_copy(update={"status": "ok", "metrics": {"loss": float("nan")}})
        session.save(space={}, metric="images_per_s", mode="max", trials=[ended, rows[1]])
    changes = [each["changes"] for each in EventTail(run_dir.events).new() if each["kind"] == "result"]
    assert [[row["id"] for row in each["trials"]] for each in changes if "trials" in each] == [["000", "001"]]
    result = result_of(run_dir)
    assert [row.status for row in result.rows] == ["ok", "pending"]
    assert (result.status, result.notices) == ("complete", ["a notice"])


def test_a_run_that_goes_on_with_other_data_says_so_in_its_result_its_tables_and_its_page(tmp_path: Path) -> None:
    resolved, run_dir = load("digits", ["tracking.enabled=false"]), RunDir(tmp_path / "run")
    begin_run(resolved, "train", run_dir, tmp_path)
    split = SplitIdentity(num_images=9, labels="1", order="1", contents="1")
    data = DataIdentity(classes=("a",), train=split, val=split)
    more = data.model_copy(update={"train": split.model_copy(update={"num_images": 12})})
    for each in (data, data, more, more):
        with contextlib.suppress(KeyboardInterrupt), open_session(resolved, run_dir, end_of_run, each) as session:
            raise KeyboardInterrupt
    line = "resumed on other data: train had 9 images and has 12"
    assert session.result.not_exact == [line]
    assert session.result.accepted_data == more
    assert {**dict(result_of(run_dir)), "seconds": 0} == {**dict(session.result), "seconds": 0}
    assert f"not exact: {line}" in run_dir.report.read_text()
    row = StageRow(stage="student", model="mlp_small", status="ok")
    assert (
        f"note: not exact: {line}" in end_of_run.summary(session.run_dir, session.result.model_copy(update={"stages": [row]}))[0]
    )


def test_the_bars_of_a_session_move_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    resolved, run_dir = load("digits", ["tracking.enabled=false"]), RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    begin_run(resolved, "train", run_dir, tmp_path, [])
    with open_session(resolved, run_dir, end_of_run) as session:
        session.display.follow("student", "student", run_dir.stage("student"))
        numbers = {"max_steps": 0, "steps_per_epoch": 10, "epochs": 2}
        session.log.record("start", "student", step=0, epoch=0.0, metrics=numbers)
        session.log.record("step", "student", step=7, epoch=0.7, metrics={"train/loss": 1.0})
        session.display.tick()
        assert session.display._bars is not None
        (task,) = session.display._bars.tasks
        assert (task.completed, task.total) == (7, 20)
        session.display.unfollow("student")
        assert not session.display._bars.tasks
    assert run_dir.report.exists(), "also of a run that ended before its first numbers"


def test_a_runs_seconds_are_those_of_its_driver_however_wrong_the_clocks_of_its_workers_are(tmp_path: Path) -> None:
    def at(second: float, made: Event) -> Event:
        return made | {"time_ms": int(1e3 * second)}

    run_dir = RunDir(tmp_path / "run")
    begun, ended = event("session_begun", tags={}), event("session_ended", status="interrupted", reason="")
    ahead, about = numbers("step", "student", 1), {"kind": "train", "name": "digits", "runs_root": str(tmp_path)}
    write_log(run_dir, about, at(1000, begun), at(9000, ahead))  # then its driver is killed
    add(run_dir, at(1100, begun), at(9000, ahead), at(1160, ended))
    assert result_of(run_dir).seconds == 160.0
    add(run_dir, at(1300, begun), at(1310, ahead))
    assert result_of(run_dir).seconds == 170.0
