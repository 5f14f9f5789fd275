"""Run directories that are damaged, or that another version wrote: what commands that read them say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config.experiment import load
from service.config.space import GLOBAL_BATCH
from service.config.sweep import SweepConfig
from service.runs.events import Event, event
from service.runs.result import write_result
from service.runs.run_log import as_json
from service.sweeps.trials import plan_trials, rows_of
from tests.run_log import add, change, result_of
from tests.service.commands import run
from tests.service.report.runs import sweep_dir, train_dir
from trainables.errors import ExperimentError
from trainables.rundir import RunDir

SPACE = {"scale.num_workers": [1, 2], "data.global_batch_size": [64]}
PENDING = {"status": "pending", "metrics": {}, "steps_s": []}
READERS = ("report", "doctor", "sync")


def spoil(run_dir: RunDir, change: Callable[[Any], object]) -> None:
    """Change what the log's `result` says."""
    first, second, *rest = run_dir.events.read_text().splitlines()
    event = json.loads(second)
    change(event["changes"])
    run_dir.events.write_text("\n".join([first, json.dumps(event), *rest, ""]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(kind=5), "kind: must be train or sweep, not 5"),
        (lambda r: r.update(name=["a"]), 'name: must be text, not ["a"]'),
        (lambda r: r.update(sources=[]), "sources: must be a section of keys, not []"),
        (lambda r: r["trials"][1].update(metrics=[1]), "trials[1].metrics: must be a section of keys, not [1]"),
        (lambda r: r["trials"][1].pop("scale"), "trials[1].scale: missing"),
        (
            lambda r: r["trials"][0]["scale"].update({"scale.num_workers": "2"}),
            'trials[0].scale.scale.num_workers: must be an integer, not "2"',
        ),
        (lambda r: r["trials"][0]["metrics"].update(step_s="slow"), 'trials[0].metrics.step_s: must be a number, not "slow"'),
        (lambda r: r["trials"][0].update(steps_s=[0.1, None]), "trials[0].steps_s[1]: must be a number, not null"),
        (lambda r: r.update(chosen=3), "chosen: must be text, not 3"),
        (lambda r: r.update(search=[]), "search: must be a section of keys, not []"),
        (lambda r: r.update(space=[]), "space: must be a section of keys, not []"),
        (lambda r: r.update(mlflow={"uri": "sqlite:///m.db"}), "mlflow.experiment: missing"),
        (lambda r: r.update(seconds="9"), 'seconds: must be a number, not "9"'),
        (lambda r: r["trials"][1].update(end_s=[2]), "trials[1].end_s: must be a number, not [2]"),
        (lambda r: r["trials"][1].update(status="infeasible", scale=3), "trials[1].scale: must be a section of keys, not 3"),
    ],
)
def test_a_result_with_a_wrong_type_is_one_line_that_names_the_file_and_the_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE)
    spoil(run_dir, change)
    for command in READERS:
        code, out, err = run(capsys, command, run_dir.root)
        assert (code, out) == (2, "")
        assert err == (f"error: {run_dir.events} is damaged: {message}: restore a copy, or start a new run\n")


def test_a_stage_with_a_wrong_type_is_named_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = train_dir(tmp_path / "t")
    spoil(run_dir, lambda r: r["stages"][1].update(model=None))
    code, _, err = run(capsys, "report", run_dir.root)
    assert code == 2
    assert f"{run_dir.events} is damaged: stages[1].model: must be text, not null: " in err


def test_the_best_of_a_sweep_has_the_maximum_or_minimum_of_complete_trials_however_its_driver_died(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64, 32, 16]}, ends=dict.fromkeys(("000", "001", "002"), PENDING))
    assert result_of(run_dir).best is None
    ends = {"000": ("ok", 10.0, 3.0), "001": ("oom", 99.0, 1.0), "002": ("ok", 20.0, 2.0)}
    for trial, (status, speed, epoch_s) in ends.items():  # each is the last line of the log, were its driver killed there
        metrics = {"images_per_s": speed, "epoch_s": epoch_s}
        add(run_dir, event("trial_ended", trial=trial, outcome={"status": status, "metrics": metrics}))
        best = result_of(run_dir).best
        assert best is not None
        assert best.id == ("002" if trial == "002" else "000")
    for metric, mode, winner in (("epoch_s", "min", "002"), ("top1_pct", "max", None)):
        change(run_dir, metric=metric, mode=mode)
        found = result_of(run_dir).best
        assert (found.id if found else None) == winner
    change(run_dir, chosen="000")  # by a search that has ended, in the light of all probes
    write_result(run_dir.result, result_of(run_dir))
    assert json.loads(run_dir.result.read_text())["best"]["id"] == "000"


@pytest.mark.parametrize("name", ["seconds", "start_s", "end_s"])
def test_a_stage_with_a_time_that_is_no_number_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    run_dir = train_dir(tmp_path / "t")
    spoil(run_dir, lambda r: r["stages"][0].update({name: "long"}))
    code, _, err = run(capsys, "report", run_dir.root)
    assert code == 2
    assert f'{run_dir.events} is damaged: stages[0].{name}: must be a number, not "long": ' in err


def test_a_stage_whose_clock_is_not_whole_has_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = train_dir(tmp_path / "t")
    spoil(run_dir, lambda r: [stage["metrics"].pop("train_s") for stage in r["stages"]])
    assert run(capsys, "report", run_dir.root)[0] == 0


KINDS = {
    "list": [1e-3, 1e-2],
    "range": {"range": [0.1, 0.3, 0.1]},
    "uniform": {"uniform": [0.1, 0.2]},
    "loguniform": {"loguniform": [1e-3, 1.0]},
    "randint": {"randint": [1, 4]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_over_every_kind_of_space_is_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE)
    axes = SweepConfig(space={"optim.lr": KINDS[kind]}, policy="random").axes
    spoil(run_dir, lambda r: r.update(space=axes))
    assert result_of(run_dir).space == {"optim.lr": KINDS[kind]}
    for command in ("report", "doctor"):
        assert run(capsys, command, run_dir.root)[::2] == (0, "")


def test_a_sweep_with_values_that_no_trial_can_have_is_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = [64, 64.5, "x", [1, 2], 32]
    resolved = load("digits", [f"sweep.space={json.dumps({GLOBAL_BATCH: values})}"])
    planned = [as_json(row) for row in rows_of(plan_trials(resolved), resolved, timing=True)]
    assert [row["status"] for row in planned] == ["pending", "infeasible", "infeasible", "infeasible", "pending"]
    assert [row["scale"][GLOBAL_BATCH] for row in planned] == values
    run_dir = sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64, 32]})
    spoil(run_dir, lambda r: r.update(trials=[r["trials"][0], *planned[1:4], r["trials"][1] | {"id": "004"}]))
    for command in ("report", "doctor"):
        assert run(capsys, command, run_dir.root)[::2] == (0, "")


@pytest.mark.parametrize(
    ("trials", "mistake"),
    [
        (7, "trials: must be a list, not 7"),
        (["a"], 'trials[0]: must be a section of keys, not "a"'),
        ([{"id": "000"}, {"status": "ok"}], "trials[1].id: missing"),
        ([{"id": ["000"]}], 'trials[0].id: must be text, not ["000"]'),
    ],
)
def test_rows_that_are_none_are_one_line_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trials: object, mistake: str
) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE)
    spoil(run_dir, lambda r: r.update(trials=trials))
    code, _, err = run(capsys, "report", run_dir.root)
    assert code == 2
    assert re.search(rf"is damaged: the line that ends at byte \d+: result\.{re.escape(mistake)}: restore a copy", err)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("ended", "mistake"),
    [
        (event("trial_ended", trial="000", outcome={"reason": "?"}), "trial_ended.outcome.status: missing"),
        (event("stage_ended", "student", outcome={"reason": "?"}), "stage_ended.outcome.status: missing"),
        (event("stage_ended", "student", outcome={"status": 1}), "stage_ended.outcome.status: must be ok, oom"),
    ],
)
def test_an_outcome_with_a_wrong_field_is_named(ended: Event, mistake: str, tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE)
    add(run_dir, ended)
    with pytest.raises(ExperimentError, match=rf"ends at byte \d+: {re.escape(mistake)}.*: restore a copy"):
        result_of(run_dir)


def test_an_event_of_a_trial_without_a_name_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE)
    add(run_dir, event("discarded") | {"trial": ["000"]})
    assert result_of(run_dir).trials
    assert "discarded.trial must be str, not ['000']" in caplog.text


def test_a_run_of_another_format_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", SPACE, status="interrupted")
    run_dir.events.write_text(run_dir.events.read_text().replace('"version": 1', '"version": 2'))
    for command in (*READERS, "resume"):
        code, _, err = run(capsys, command, run_dir.root)
        assert code == 2
        assert err == f"error: {run_dir.events} has format 2, and this version reads 1: start a new run\n"


def rewritten(run_dir: RunDir, change: Callable[[Any], object]) -> RunDir:
    tree = yaml.safe_load(run_dir.experiment.read_text())
    change(tree)
    run_dir.experiment.write_text(yaml.safe_dump(tree))
    return run_dir


UNKNOWN_VALUES = [
    lambda t: t["distill"]["options"].update(kd={"alpha": 0.9}),
    lambda t: t["distill"].update(method=["kd", "gone"]),
    lambda t: t["student"].update(model="resnet9000"),
    lambda t: t["sweep"]["space"].update({"data.prefetch_factor": [1, 2]}),
]


@pytest.mark.parametrize("change", UNKNOWN_VALUES, ids=range(len(UNKNOWN_VALUES)))
def test_a_run_with_methods_models_and_options_that_are_not_there_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: Callable[[Any], object]
) -> None:
    sweep, single = rewritten(sweep_dir(tmp_path / "s", SPACE), change), rewritten(train_dir(tmp_path / "t"), change)
    for run_dir in (sweep, single):
        code, out, err = run(capsys, "report", run_dir.root)
        assert (code, err) == (0, "")
        assert "images/s" in out
        assert run_dir.report.exists()
    assert run(capsys, "doctor", single.root)[0] == 0
    assert run(capsys, "compare", sweep.root, sweep_dir(tmp_path / "new", SPACE).root)[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"prefetch_factor": 2}}, r"data\.prefetch_factor: no such key"),
        ({"data": {"augment": "mosaic"}}, r'data\.augment: must be none, .*, not "mosaic"'),
        ({"profiler": {"on": True}, "data": {"augment": 1}}, "data.augment: must be"),
    ],
)
def test_a_run_of_another_version_is_refused_in_one_line_that_says_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, dict[str, Any]], words: str
) -> None:
    def put(tree: Any) -> None:
        for section, values in change.items():
            tree.setdefault(section, {}).update(values)

    run_dir = rewritten(train_dir(tmp_path / "t", status="interrupted"), put)
    for command in ("report", "doctor", "compare", "resume"):
        arguments = [run_dir.root] * (2 if command == "compare" else 1)
        code, _, err = run(capsys, command, *arguments)
        assert code == 2
        assert re.match(rf"error: {run_dir.experiment}:\d+:\d+: {words}", err), err
        if command != "resume":
            assert err.endswith("; if another version of raydistill wrote this run, read it with that one\n")
            assert len(err.splitlines()) == 1
