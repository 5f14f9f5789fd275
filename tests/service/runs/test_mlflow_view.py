"""What MLflow has of a run: a function of its log."""

from pathlib import Path

import pytest

from service.runs.event_log import log_lines
from service.runs.events import event
from service.runs.mlflow_view import MlflowView
from service.tracking.run_view import RunView
from tests.service.tracking.store import Run, epoch, row
from trainables.rundir import RunDir


def view_of(run: Run) -> dict[str, RunView]:
    view = MlflowView(run.run_dir)
    for line in log_lines(run.run_dir.events):
        view.take(line)
    return view.runs


def metrics(view: RunView) -> list[tuple[str, float]]:
    return [item.value[:2] for item in view.items if item.kind == "metrics"]


def begun(trial: str, stage: str = "student") -> dict[str, object]:
    return event("stage_begun", f"trials/{trial}/{stage}", trial=trial, model="resnet8")


def ended(trial: str, **metrics: float) -> dict[str, object]:
    return event("trial_ended", trial=trial, outcome={"status": "ok", "metrics": metrics})


def test_of_stages_each_epoch_is_shown_under_the_names_of_the_final_numbers_and_the_rest_once(tmp_path: Path) -> None:
    run = Run(RunDir(tmp_path / "run"), "sqlite:////a.db")
    numbers = {"val/loss": 2.00004, "val/top1_pct": 94.0845, "epoch/train/loss": 0.5, "epoch/node0/cpu_pct": 50.04}
    run.add(
        event("start", "student", step=0, epoch=0.0, metrics={"epochs": 2.0}),
        event("step", "student", step=5, epoch=0.5, metrics={"train/loss": 1.0}),
        event("resume", "student", step=5, epoch=0.5, metrics={}),
        epoch(10, metrics=numbers),
        event("summary", "student", step=10, epoch=1.0, metrics={"steps": 10.0, "epoch_wall_s": 8.0, "train/loss": 0.5}),
        epoch(10, "teacher", {"val/top1_pct": 99.0}),
        event("summary", "teacher", step=10, epoch=1.0, metrics={"steps": 10.0, "epoch_wall_s": 8.0, "wall_s": 3.0}),
        event("hang", "student", message="rank 1 hangs"),
    )
    view = view_of(run)["train"]
    assert metrics(view) == [
        ("top1_pct", 94.08),
        ("val_loss", 2.0),
        ("train/loss", 0.5),
        ("system/cpu_utilization_percentage", 50.0),
        ("epoch_wall_s", 8.0),
        ("steps", 10.0),
        ("teacher/top1_pct", 99.0),
        ("teacher/wall_s", 3.0),
    ]
    assert view.tags["hang"] == "rank 1 hangs"


@pytest.mark.parametrize(
    ("changes", "kind", "begins_with", "ends_with"),
    [
        (["sweep.metric=top1_pct"], "accuracy", "top1_pct", ["top1_pct", "images_per_s", "epoch_s"]),
        (["sweep.metric=epoch_s", "sweep.steps=3"], "timing", "", ["epoch_s", "images_per_s", "top1_pct"]),
        (
            ["sweep.metric=phase/data_p95_ms", "sweep.steps=3"],
            "timing",
            "",
            ["phase/data_p95_ms", "images_per_s", "top1_pct", "epoch_s"],
        ),
        (["sweep.policy=guided", "sweep.metric=pareto"], "timing", "", ["images_per_s", "top1_pct", "epoch_s"]),
    ],
)
def test_the_first_metric_of_a_trial_is_that_by_which_trials_are_compared(
    changes: list[str], kind: str, begins_with: str, ends_with: list[str], tmp_path: Path
) -> None:
    run = Run(RunDir(tmp_path / "run"), "sqlite:////a.db", "sweep", changes)
    run.change(trials=[row("000", kind)])
    numbers = {"phase/data_p95_ms": 2.0, "epoch_s": 1.0, "top1_pct": 50.0, "images_per_s": 9.0}
    run.add(begun("000"), ended("000", **numbers))
    names = [name for name, _ in metrics(view_of(run)["trial/000"])]
    assert names == ([begins_with] if begins_with else []) + ends_with


def test_a_resumed_sweep_that_another_trial_wins_leaves_one_winner_and_names_it_by_its_point(tmp_path: Path) -> None:
    run = Run(RunDir(tmp_path / "run"), "sqlite:////a.db", "sweep")
    rows = [row(trial, **{"optim.lr": lr, "scale.num_workers": 1}) for trial, lr in (("000", 0.1), ("001", 0.2))]
    run.change(trials=rows)
    for trial, top1_pct, verdict in (("000", 50.0, ["first", "by far"]), ("001", 60.0, ["second"])):
        run.add(begun(trial), ended(trial, steps=5.0, top1_pct=top1_pct))
        run.change(verdict=verdict)
        run.end()
        run.add(event("session_begun"))
    runs = view_of(run)
    marks = {
        view.name: (view.tags["raydistill.winner"], view.tags["mlflow.note.content"]) for view in runs.values() if view.parent
    }
    assert marks == {"000 lr=0.1 workers=1": ("false", ""), "001 lr=0.2 workers=1": ("true", "second")}
    assert runs["sweep"].tags["mlflow.note.content"] == "second"
    assert metrics(runs["sweep"]) == [("top1_pct", 50.0), ("steps", 5.0), ("top1_pct", 60.0), ("steps", 5.0)]


def test_trials_end_with_the_sweep_those_that_cannot_run_are_shown_and_what_was_measured_twice_counts_once(
    tmp_path: Path,
) -> None:
    run = Run(RunDir(tmp_path / "run"), "sqlite:////a.db", "sweep", ["sweep.metric=images_per_s", "sweep.steps=3"])
    wrong = row("003", "timing", "infeasible") | {"reason": "3 workers do not divide 64"}
    run.change(trials=[row("000", "timing"), row("001", "timing"), row("002", "timing", "untested"), wrong])
    run.add(begun("000"), ended("000", steps=3.0, images_per_s=10.0))
    run.add(begun("000", "student-2"), ended("000", steps=3.0, images_per_s=20.0), begun("001"))
    run.end("interrupted")
    runs = view_of(run)
    assert {key: view.status for key, view in runs.items()} == {
        "sweep": "KILLED",
        "trial/000": "FINISHED",
        "trial/001": "KILLED",
        "trial/003": "FAILED",
    }
    tags = runs["trial/003"].tags
    assert (tags["status"], tags["reason"]) == ("infeasible", "3 workers do not divide 64")
    assert runs["trial/000"].tags["measurements"] == "2"
    assert [value for name, value in metrics(runs["trial/000"]) if name == "steps"] == [3.0, 6.0]
    assert runs["trial/000"].params() == {"data.loader_workers": "2"}
