"""A run's directory when several processes want it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.config.experiment import Resolved, load, read_resolved
from service.runs.run_directory import begin_run, reopen
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
