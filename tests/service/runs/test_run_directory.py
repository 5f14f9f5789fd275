"""A run's directory when several processes want it."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from service.config.experiment import Resolved, load, read_resolved
from service.runs.run_directory import as_it_stands, begin_run, new_run_dir, reopen
from tests.service.report.runs import sweep_dir
from trainables.errors import ExperimentError
from trainables.rundir import RunDir


def test_of_several_that_begin_in_one_folder_at_once_one_does_and_the_others_change_nothing(tmp_path: Path) -> None:
    run_dir, together = RunDir(tmp_path / "run"), threading.Barrier(4)
    run_dir.root.mkdir()
    each = [load("digits", [f"seed={seed}"]) for seed in range(4)]

    def begin(resolved: Resolved) -> ExperimentError | None:
        together.wait()
        try:
            begin_run(resolved, "train", run_dir, tmp_path)
        except ExperimentError as refusal:
            return refusal
        return None

    with ThreadPoolExecutor(4) as pool:
        refusals = list(pool.map(begin, each))
    assert refusals.count(None) == 1
    winner = refusals.index(None)
    assert read_resolved(run_dir.experiment).experiment.seed == winner
    with pytest.raises(ExperimentError, match="already holds a run: continue it with `distill resume"):
        begin_run(load("digits", ["seed=9"]), "train", run_dir, tmp_path)
    assert reopen(run_dir.root)[0].experiment.seed == winner


def test_a_sweep_whose_driver_was_killed_has_not_run_since_its_trials_last_wrote_whatever_ray_wrote_later(tmp_path: Path) -> None:
    _, run_dir, result = reopen(sweep_dir(tmp_path / "s", {"data.global_batch_size": [64, 128]}, status="running").root)
    (run_dir.root / ".lock").touch()
    rays = run_dir.tune / "a trial" / "heartbeats.json"
    rays.parent.mkdir(parents=True)
    rays.touch()
    heartbeats = run_dir.trial("001").measurement(1).heartbeats
    heartbeats.parent.mkdir(parents=True)
    heartbeats.touch()
    times_s = {run_dir.events: 2e9, heartbeats: 3e9, rays: 4e9}
    for path, time_s in times_s.items():
        os.utime(path, (time_s, time_s))
    since = datetime.fromtimestamp(3e9)
    assert as_it_stands(run_dir, result).reason == f"not running since {since:%Y-%m-%d %H:%M:%S}: its process is gone"


def test_a_root_that_is_created_is_its_users_alone_and_one_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    assert new_run_dir(private, "r", None).root.parent == private
    assert new_run_dir(tmp_path, "r", tmp_path / "out" / "run").root.is_dir()
    new_run_dir(shared, "r", None)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (private, tmp_path / "out", shared)]
    assert modes == [0o700, 0o700, 0o2775]
