"""What `distill clean` removes, and what it leaves because something needs it. Each run here is 40 days old."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.runs.clean import Cleaner, clean
from service.runs.run_directory import locked_run
from service.tracking.run_view import SyncState
from tests.run_log import write_log
from trainables.rundir import RunDir

DAY_S = 86400.0
Clean = Callable[..., list[str]]


def aged(path: Path, days: float = 40) -> Path:
    """All of a folder, neither changed nor read for so long."""
    then = time.time() - days * DAY_S
    for each in (*sorted(path.rglob("*"), reverse=True), path):
        os.utime(each, (then, then), follow_symlinks=False)
    return path


def make_run(path: Path, status: str = "complete", experiment: str = "base: digits", days: float = 40, **result: object) -> Path:
    last = RunDir(path).stage("student").last
    last.parent.mkdir(parents=True)
    last.write_bytes(b"x" * 1000)
    RunDir(path).stage("student").best.write_bytes(b"x" * 1000)
    RunDir(path).experiment.write_text(experiment)
    values = {"kind": "train", "name": "digits", "status": status, "runs_root": str(path.parent), **result}
    write_log(RunDir(path), values)
    (path / ".lock").touch()
    return aged(path, days)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs' root; this user's folders of the machine lie beside it."""
    for name in ("runs", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "runs"


@pytest.fixture
def run_clean(root: Path) -> Clean:
    """Clean what is older than 30 days; returns the lines that it says."""

    def run(*, dry_run: bool = False, unfinished: bool = False, checkpoints_only: bool = False) -> list[str]:
        lines: list[str] = []
        cleaner = Cleaner(time.time() - 30 * DAY_S, dry_run, lines.append)
        clean(root, cleaner, unfinished=unfinished, checkpoints_only=checkpoints_only)
        return lines

    return run


def test_an_old_complete_run_is_removed_and_a_dry_run_only_prints_it(root: Path, run_clean: Clean) -> None:
    old, young = make_run(root / "old"), make_run(root / "young", days=20)
    (said,) = run_clean(dry_run=True)
    assert said.endswith(f"iB  run {old}")
    assert old.exists()
    assert run_clean() == [said]
    assert [path.name for path in root.iterdir()] == [young.name]


def test_a_run_that_can_be_resumed_stays_unless_it_is_asked_for(root: Path, run_clean: Clean) -> None:
    run = make_run(root / "run", status="interrupted")
    assert run_clean() == [f"{run} kept: it is interrupted, and can be resumed; --unfinished removes it too"]
    run_clean(unfinished=True)
    assert not run.exists()


def test_a_run_that_a_process_works_on_stays(root: Path, run_clean: Clean) -> None:
    run = make_run(root / "run", status="running")
    with locked_run(RunDir(run)):
        assert run_clean(unfinished=True) == [f"{run} kept: in use"]
    assert run.exists()


def test_a_run_that_is_taken_up_while_others_are_removed_stays(root: Path) -> None:
    first, second = make_run(root / "first"), make_run(root / "second")
    lines: list[str] = []

    def echo(line: str) -> None:
        lines.append(line)
        (second / "report.html").touch()  # somebody resumes it while the first one goes

    clean(root, Cleaner(time.time() - 30 * DAY_S, dry_run=False, echo=echo), unfinished=False, checkpoints_only=False)
    assert lines[1] == f"{second} kept: in use"
    assert not first.exists()
    assert RunDir(second).stage("student").last.exists()


def test_a_run_whose_records_wait_for_mlflow_stays(root: Path, run_clean: Clean) -> None:
    target = {"uri": "http://mlflow:5000", "experiment": "x"}
    run, other = (make_run(root / name, mlflow=target) for name in ("run", "sent"))
    SyncState(**target, position=RunDir(other).events.stat().st_size).write(RunDir(other))
    aged(other)
    assert f"{run} kept: MLflow has not all of it: distill sync {run}" in run_clean()
    assert not other.exists()


def test_a_run_whose_weights_a_younger_run_uses_stays_and_so_does_what_it_uses_itself(root: Path, run_clean: Clean) -> None:
    first = make_run(root / "first")
    second = make_run(root / "second", experiment=f"teacher: {{weights: {first}/student/checkpoints/best.safetensors}}")
    third = make_run(root / "third", days=1, experiment=f"teacher: {{weights: {second}/student}}")
    other = make_run(root / "sec")  # the end of another one's name
    run_clean()
    assert first.exists()
    assert second.exists()
    assert not other.exists()
    aged(third)
    run_clean()
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    "experiment",
    [
        "teacher:\n  weights: {0}/second\n",
        "teacher: {{weights: '{0}/second', top1_pct: 80}}",
        "teachers: [{{weights: {0}/second}}]",
        "teacher: {{model: 'local-dir:{0}/second/exports/timm', weights: DEFAULT}}",
        "data: {{path: {0}/second/packed}}",
        "data: {{path: {0}/../runs/second/packed}}",
        "distill: {{method: {0}/second/mine.py:Mine}}",
        "teacher: {{weights: {0}/second",  # damaged
    ],
)
def test_a_run_that_a_younger_run_names_stays(root: Path, run_clean: Clean, experiment: str) -> None:
    second, begin = make_run(root / "second"), make_run(root / "sec")
    third = make_run(root / "third", days=1, experiment=experiment.format(root))
    assert f"{second} kept: {third} names it" in run_clean()
    assert second.exists()
    assert not begin.exists()


def test_a_run_with_the_name_of_a_data_set_or_a_recipe_is_referred_to_by_its_path_alone(root: Path, run_clean: Clean) -> None:
    digits, cifar10 = make_run(root / "digits"), make_run(root / "cifar10")
    make_run(root / "young", days=1, experiment="base: digits\nname: digits\ndata: {path: /data/cifar10}\n")
    assert len(run_clean()) == 2
    assert not digits.exists()
    assert not cifar10.exists()


def test_data_in_a_run_is_a_reason_for_it_to_stay(root: Path, run_clean: Clean) -> None:
    run = make_run(root / "cifar10")
    make_run(root / "young", days=1, experiment=f"data: {{path: {run}/packed}}\n")
    run_clean()
    assert run.exists()


@pytest.mark.parametrize("vanished", [".removed-one", ".cache/one", "begun"])
def test_a_folder_that_vanishes_while_it_is_looked_at_ends_nothing(root: Path, vanished: str) -> None:
    others = [make_run(root / name) for name in ("another", "last")]
    folder = root / vanished
    make_run(folder)

    class Vanishing(Cleaner):
        """Another `clean` removes the folder just before this one gets to it."""

        def is_old(self, path: Path, *, read: bool = False) -> bool:
            if path == folder and path.exists():
                shutil.rmtree(path)
            return super().is_old(path, read=read)

    lines: list[str] = []
    clean(root, Vanishing(time.time() - 30 * DAY_S, False, lines.append), unfinished=False, checkpoints_only=False)
    assert len(lines) == len(others)
    assert not any(run.exists() for run in others)


def test_a_damaged_run_stays(root: Path, run_clean: Clean) -> None:
    run = make_run(root / "run")
    RunDir(run).events.write_text("{")
    aged(run)
    (line,) = run_clean(unfinished=True)
    assert line.startswith(f"{run} kept: {run}/events.jsonl is damaged")


def test_a_cache_goes_with_the_last_run_that_names_it_once_nobody_has_read_it(root: Path, run_clean: Clean) -> None:
    cache = root.parent / "logits"
    folder = cache / ("0" * 32)
    (folder / "epoch-00000").mkdir(parents=True)
    segment = folder / "epoch-00000" / f"1-{'0' * 64}.arrow"
    segment.write_bytes(b"x")
    (cache / "notes").mkdir()
    aged(cache)
    young = make_run(root / "young", experiment=f"teacher: {{cache: {cache}}}", days=1)
    run_clean()
    assert segment.exists()
    aged(young)
    os.utime(segment, (time.time(), segment.stat().st_mtime))  # read by a run of another root
    run_clean()
    assert segment.exists()
    make_run(root / "again", experiment=f"teacher: {{cache: {cache}}}")
    aged(cache)
    run_clean(dry_run=True)  # which looks at the folder, and is no reading
    run_clean()
    assert [path.name for path in cache.iterdir()] == ["notes"]


def test_outputs_that_were_published_stay(root: Path, run_clean: Clean) -> None:
    folder = root.parent / "set" / ("0" * 32)
    folder.mkdir(parents=True)
    (folder / "images.txt").write_text("cat/1.png\n")
    aged(folder.parent)
    make_run(root / "old", experiment=f"teacher: {{cache: {folder.parent}}}")
    run_clean()
    assert folder.exists()
    assert not (root / "old").exists()


def test_the_cache_of_several_teachers_is_that_of_a_run_too(root: Path, run_clean: Clean) -> None:
    folder = root.parent / "set" / ("0" * 32)
    folder.mkdir(parents=True)
    aged(folder.parent)
    make_run(root / "old", experiment=f"{{teacher: null, teachers: [{{cache: {folder.parent}}}]}}")
    run_clean()
    assert not folder.exists()


def test_of_checkpoints_a_complete_run_needs_its_best_alone_and_a_sweep_those_of_its_best_trial(
    root: Path, run_clean: Clean
) -> None:
    scale = {"scale.num_workers": 1, "data.global_batch_size": 8, "data.loader_workers": 1}
    best = {"id": "001", "params": {}, "status": "ok", "scale": scale, "metrics": {"loss": 1.0}}
    sweep = make_run(root / "sweep", kind="sweep", trials=[best], space={}, metric="loss", mode="min")
    for trial in ("000", "001"):
        make_run(sweep / "trials" / trial)
    aged(sweep)
    unfinished = make_run(root / "unfinished", status="failed")
    run_clean(checkpoints_only=True)
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*.safetensors"))
    assert left == [
        "sweep/student/checkpoints/best.safetensors",
        "sweep/trials/001/student/checkpoints/best.safetensors",
        *(f"{unfinished.name}/student/checkpoints/{name}.safetensors" for name in ("best", "last")),
    ]


def test_a_kill_in_the_middle_leaves_no_checkpoint_under_another_name(
    root: Path, run_clean: Clean, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = RunDir(make_run(root / "one")).stage("student").last

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            run_clean(checkpoints_only=True)
    assert last.exists()
    run_clean(checkpoints_only=True)
    assert [path.name for path in last.parent.iterdir()] == ["best.safetensors"]


def test_what_a_kill_left_of_an_earlier_cleaning_is_removed(root: Path, run_clean: Clean) -> None:
    (root / ".removed-run").mkdir()
    aged(root / ".removed-run")
    run_clean()
    assert list(root.iterdir()) == []
