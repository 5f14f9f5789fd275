"""`report.html` of sweeps and runs of every size, read by a parser."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from service.config.experiment import load
from service.report import end_of_run
from service.report.terminal import report_of
from service.runs import run_log
from service.runs.event_log import log_lines
from service.runs.events import event
from service.runs.result import RunResult
from service.runs.run_directory import begin_run, reopen
from service.runs.session import open_session
from tests.run_log import add, change, result_of, write_log
from tests.service.commands import run
from tests.service.report.parsed import Parsed
from tests.service.report.runs import page_text, records_with, sweep_dir, train_dir, typed, written
from trainables.errors import TrainingError
from trainables.rundir import Line, RunDir

W, B, L = "scale.num_workers", "data.global_batch_size", "data.loader_workers"
PENDING = {"status": "pending", "metrics": {}, "steps_s": []}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def page(run_dir: RunDir) -> Parsed:
    return Parsed(page_text(run_dir))


def titles(parsed: Parsed) -> list[str]:
    return [figure["id"] for figure in parsed.figures]


def test_a_sweep_without_a_trial_that_ended_has_no_empty_frames(tmp_path: Path) -> None:
    space = {W: [1, 2], B: [64, 128]}
    parsed = page(sweep_dir(tmp_path / "s", space, status="running", ends={f"{n:03d}": PENDING for n in range(4)}))
    assert "no trial is complete: nothing to compare yet 0 of 4 trials have ended" in parsed.text
    assert parsed.figures == []
    assert parsed.all("figure") == []
    assert "Speed over each axis" not in parsed.text


def test_the_hangs_of_a_trials_repeated_measurements_are_on_the_page_as_in_the_terminal(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {B: [64]})
    for stage in ("student", "student-2"):
        add(run_dir, event("hang", f"trials/000/{stage}", message="rank 1 hangs in backward"))
    lines = [part for part in report_of(records_with(run_dir)) if " hung at " in str(part)]
    assert [line.split()[0] for line in lines] == ["trials/000/student", "trials/000/student-2"]
    text = page(run_dir).text
    assert all(line in text for line in lines)


def test_one_trial_is_a_page(tmp_path: Path) -> None:
    parsed = page(sweep_dir(tmp_path / "s", {B: [64]}))
    assert "1 GPU × batch 64 × 2 loader workers" in parsed.text
    assert titles(parsed) == ["phases", "utilization", "temperature", "clocks", "cpu"]


def test_nine_trials_have_every_figure_of_a_sweep_with_accuracies(tmp_path: Path) -> None:
    parsed = page(sweep_dir(tmp_path / "s", {W: [1, 2, 4], B: [64, 128, 256]}, epochs=4))
    assert titles(parsed) == [
        "speed-0",
        "speed-1",
        "phases",
        "efficiency",
        "pareto",
        "accuracy",
        "wall",
        "utilization",
        "temperature",
        "clocks",
        "cpu",
    ]


def test_the_winner_is_in_color_in_the_figure_over_time(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {W: [1, 2, 4], B: [64, 128, 256, 512]}, epochs=4)
    least_accurate = min(written(run_dir)["trials"], key=lambda row: float(row["metrics"]["top1_pct"]))
    parsed = Parsed(page_text(run_dir, typed({**written(run_dir), "chosen": least_accurate["id"]})))
    (figure,) = [figure for figure in parsed.figures if figure["id"] == "accuracy"]
    in_color = [trace["name"] for trace in figure["traces"] if trace.get("showlegend", True)]
    assert in_color[0] == f"trial {least_accurate['id']}"


def test_a_timing_sweeps_wall_time_is_shown_of_its_fastest_trials(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {W: [1, 2, 4], B: [64, 128, 256, 512]})
    result = written(run_dir)
    for row in result["trials"]:
        row["metrics"] |= {"wall_s": 20.0, "train_s": 18.0, "eval_s": 0.0, "checkpoint_s": 0.0, "other_s": 2.0}
    (wall,) = [each for each in Parsed(page_text(run_dir, typed(result))).figures if each["id"] == "wall"]
    fastest = sorted(result["trials"], key=lambda row: -row["metrics"]["images_per_s"])
    shown = wall["traces"][0]["y"]
    assert shown == [f"trial {row['id']}" for row in fastest[: len(shown)]]


def test_the_first_two_lines_say_what_won_and_why(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {W: [1, 4], B: [64, 512], L: [2, 4]})
    best = result_of(run_dir).best
    assert best is not None
    parsed = page(run_dir)
    text = parsed.text[parsed.text.index("demo complete") if "demo complete" in parsed.text else 0 :]
    first = text.index(f"4 GPUs × batch 512 × {best.scale.loader_workers} loader workers")
    second = text.index("Compared with the next best value of each axis, others unchanged: 4 GPUs:")
    assert first < second < text.index("distill train")


@pytest.mark.parametrize("workers", [[1], pytest.param([1, 2, 4, 8, 16], marks=pytest.mark.slow)], ids=len)
def test_the_page_of_500_trials_takes_5_mb_and_5_cpu_seconds(tmp_path: Path, workers: list[int]) -> None:
    share = len(workers) / 5
    space = {W: workers, B: [32, 64, 128, 256, 512], L: [0, 1, 2, 4, 8], "precision": ["fp32", "bf16"], "seed": [0, 1]}
    run_dir = sweep_dir(tmp_path / "s", space)
    page(sweep_dir(tmp_path / "first", {B: [64, 128]}))  # imports are paid for once
    began = time.process_time()  # of this process alone: others may have the cores
    parsed = page(run_dir)
    assert time.process_time() - began < 5
    assert len(reopen(run_dir.root)[2].rows) == 500 * share
    assert run_dir.report.stat().st_size < 2e6 + 3e6 * share  # the program of the page, and its rows
    assert f"All {500 * share:.0f} trials" in parsed.text


def test_points_of_unlike_keys_are_a_page_while_some_of_them_wait(tmp_path: Path) -> None:
    ends = {"000": {"params": {"seed": 1}}, "001": {"params": {"seed": 2}}, "002": PENDING, "003": PENDING}
    parsed = page(sweep_dir(tmp_path / "s", {"seed": [1, 2], "optim.lr": [0.1, 0.2]}, status="running", ends=ends))
    assert "Speed over each axis" in parsed.text
    assert "pending" in parsed.text


def test_the_seconds_of_an_epoch_that_was_not_whole_have_a_star(tmp_path: Path) -> None:
    run_dir = train_dir(tmp_path / "t")
    stages = [stage.model_dump(mode="json") for stage in result_of(run_dir).stages]
    seconds = f"{stages[1]['metrics']['epoch_s']:.2f}"
    assert f"{seconds}*" in page(run_dir).text
    for stage in stages:
        del stage["metrics"]["epoch_projected"]
    change(run_dir, stages=stages)
    assert f"{seconds}*" not in page(run_dir).text
    assert seconds in page(run_dir).text


def test_a_run_shows_its_learning_and_where_its_time_goes(tmp_path: Path) -> None:
    parsed = page(train_dir(tmp_path / "t"))
    assert "The student resnet8: " in parsed.text
    assert titles(parsed) == [
        "loss",
        "accuracy",
        "wall",
        "phases",
        "waits",
        "speed",
        "utilization",
        "temperature",
        "clocks",
        "cpu",
    ]


def test_a_run_that_has_not_begun_is_a_page(tmp_path: Path) -> None:
    run_dir = train_dir(tmp_path / "t", status="running")
    result = written(run_dir)
    write_log(run_dir, result)
    parsed = Parsed(page_text(run_dir, typed({**result, "stages": []})))
    assert "No stage is complete yet." in parsed.text


def test_trials_without_a_result_are_listed_with_their_reasons(tmp_path: Path) -> None:
    ends = {
        "001": {"status": "oom", "metrics": {}, "reason": "rank 0: CUDA out of memory", "steps_s": []},
        "002": {"status": "infeasible", "metrics": {}, "reason": "needs 8 GPUs, the cluster has 4", "steps_s": []},
        "003": {"status": "failed", "metrics": {}, "reason": "a worker died", "steps_s": []},
    }
    parsed = page(sweep_dir(tmp_path / "s", {B: [64, 128, 256, 512]}, ends=ends))
    heads, *rows = parsed.tables["3 trials and their reasons"]
    assert [row[heads.index("status")] for row in rows] == [f"{end['status']}: {end['reason']}" for end in ends.values()]


def test_text_from_outside_is_shown_and_not_run(tmp_path: Path) -> None:
    ends = {"001": {"status": "failed", "metrics": {}, "reason": HOSTILE, "steps_s": []}}
    run_dir = sweep_dir(tmp_path / "s", {B: [64, 128, 256], "student.model": ["resnet8", "resnet14"]}, ends=ends)
    result = written(run_dir)
    for row in result["trials"]:
        row["id"] = row["params"]["student.model"] = f"{HOSTILE}{row['id']}</script>"
    result |= {"name": HOSTILE, "reason": HOSTILE, "chosen": result["trials"][0]["id"]}
    text = page_text(run_dir, typed(result))
    parsed = Parsed(text)
    assert HOSTILE in parsed.text
    assert parsed.all("img") == []
    assert "<script>alert" not in text
    assert len(parsed.all("script")) == 3
    assert all(
        attributes.get("nonce") or attributes.get("type") == "application/octet-stream" for attributes in parsed.all("script")
    )
    shown = str(parsed.figures)  # plotly.js reads tags in labels: none may be left
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    assert "<img" not in shown


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    parsed = page(sweep_dir(tmp_path / "s", {W: [1, 2], B: [64, 128]}, epochs=3))
    assert parsed.fetched() == []
    policy = [
        attributes["content"] or ""
        for attributes in parsed.all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy[0].startswith("default-src 'none'; script-src 'nonce-")
    assert policy[0].endswith("; base-uri 'none'; form-action 'none'")
    styles = [attributes.get("style") or "" for _, attributes in parsed.elements]
    assert not any("url(" in style for style in styles)


def test_every_figure_has_words_and_numbers_in_its_place(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {W: [1, 2, 4], B: [64, 128, 256]}, epochs=4)
    parsed = page(run_dir)
    drawn = [attributes for attributes in parsed.all("div") if attributes.get("role") == "img"]
    assert [attributes["id"] for attributes in drawn] == titles(parsed)
    assert all(len(attributes["aria-label"] or "") > 40 for attributes in drawn)
    regions = [attributes["aria-label"] or "" for attributes in parsed.all("div") if attributes.get("role") == "region"]
    assert len([label for label in regions if label.startswith("Numbers of: ")]) == len(drawn)
    assert len(parsed.all("figcaption")) == len(drawn)


@pytest.mark.parametrize(("status", "reloads"), [("running", True), ("complete", False), ("interrupted", False)])
def test_the_page_loads_itself_again_only_while_the_run_goes_on(tmp_path: Path, status: str, reloads: bool) -> None:
    parsed = page(sweep_dir(tmp_path / "s", {B: [64, 128]}, status=status))
    assert any(attributes.get("http-equiv") == "refresh" for attributes in parsed.all("meta")) is reloads


def test_what_a_guided_search_predicts_for_the_rest_is_shown(tmp_path: Path) -> None:
    untested = {"status": "untested", "metrics": {}, "steps_s": []}
    search = {"why": "no untested point …", "spent_gpu_s": 812.3, "bound_pct": 1.8}
    run_dir = sweep_dir(tmp_path / "s", {B: [32, 64, 128, 256]}, ends={"001": untested}, policy="guided", search=search)
    parsed = page(run_dir)
    assert "With 90% probability, no point is more than 1.8% better; 3 of 4 points were tried" in parsed.text
    assert ", for 812 GPU-seconds." in parsed.text
    assert "untested" not in parsed.text[parsed.text.index("GPUs × batch × loader workers") :].lower()


def test_a_training_to_the_target_is_no_point_and_leaves_its_probes_speed_in_the_figures(tmp_path: Path) -> None:
    search = {"why": "so", "spent_gpu_s": 9.0, "bound_pct": 1.8}
    run_dir = sweep_dir(tmp_path / "s", {B: [32, 64, 128, 256]}, policy="guided", search=search)
    result = written(run_dir)
    probe = result["trials"][1]
    trained = {**probe, "id": "001-trained", "speed_trial": "001", "metrics": {**probe["metrics"], "images_per_s": 1.0}}
    result |= {"trials": [*result["trials"], trained]}
    parsed = Parsed(page_text(run_dir, typed(result)))
    assert "4 of 4 points were tried" in parsed.text
    figure = next(figure for figure in parsed.figures if figure["id"] == "speed-0")
    assert 1.0 not in [speed for trace in figure["traces"] for speed in trace["y"]]
    assert "001-trained" in parsed.text


def test_a_trial_that_a_resumed_sweep_has_recalled_may_say_auto(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {W: [1, 2], B: [64, 128], L: [1, 2]})
    result = written(run_dir)
    for row in result["trials"][:3]:
        row["scale"][L] = "auto"
    parsed = Parsed(page_text(run_dir, typed(result)))
    assert "auto loader workers" in parsed.text


def test_what_an_auto_precision_came_to_is_on_the_page_with_its_reason(tmp_path: Path) -> None:
    run_dir = train_dir(tmp_path / "r")
    assert "Precision auto" not in page(run_dir).text
    chosen = {"precision": "bf16", "precision_reason": "images of 224 px, on GPUs that have it"}
    result = written(run_dir)
    change(run_dir, stages=[stage | chosen for stage in result["stages"]])
    assert "Precision auto: bf16: images of 224 px, on GPUs that have it." in page(run_dir).text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = sweep_dir(tmp_path / "s", {B: [64, 128]})
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, "report", run_dir.root, "--html", tmp_path / "file" / "page.html")
    assert code == 2
    assert "best: trial" in out
    assert err.startswith(f"error: {tmp_path}/file/page.html cannot be written: ")
    assert err.endswith("choose another file with --html FILE\n")


def test_a_report_that_fails_does_not_fail_the_run(tmp_path: Path) -> None:
    printed: list[str] = []
    result = RunResult(kind="sweep", name="digits", status="complete", runs_root=str(tmp_path))
    end_of_run.write_page_at_end(RunDir(tmp_path), result, printed.append)
    assert len(printed) == 1
    assert printed[0].endswith(f"distill report {tmp_path}")


@pytest.mark.parametrize("status", ["complete", "interrupted", "failed"])
def test_every_run_leaves_a_page_when_it_ends(tmp_path: Path, status: str) -> None:
    resolved, run_dir = load("digits", ["tracking.enabled=false"]), RunDir(tmp_path / "r")
    run_dir.root.mkdir()
    begin_run(resolved, "train", run_dir, tmp_path)
    ends = {"complete": None, "interrupted": KeyboardInterrupt(), "failed": TrainingError("the loss is not finite")}
    with contextlib.suppress(KeyboardInterrupt, TrainingError), open_session(resolved, run_dir, end_of_run):
        if error := ends[status]:
            raise error
    parsed = Parsed(run_dir.report.read_text())
    assert f"run {status} digits" in parsed.text
    assert ("the loss is not finite" in parsed.text) is (status == "failed")


def test_report_writes_the_page_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = sweep_dir(tmp_path / "s", {B: [64, 128]})
    code, out, _ = run(capsys, "report", run_dir.root)
    assert code == 0
    assert out.endswith(f"page: {run_dir.report}\n")
    code, out, _ = run(capsys, "report", run_dir.root, "--html", tmp_path / "elsewhere.html")
    assert out.endswith(f"page: {tmp_path}/elsewhere.html\n")
    assert (tmp_path / "elsewhere.html").stat().st_size == pytest.approx(run_dir.report.stat().st_size, rel=0.01)


@pytest.mark.parametrize("status", ["complete", "running"])
def test_a_report_reads_the_log_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    run_dir, read = sweep_dir(tmp_path / "s", {B: [64, 128]}, status=status), list[Path]()

    def counted(path: Path) -> Iterable[Line]:
        read.append(path)
        return log_lines(path)

    monkeypatch.setattr(run_log, "log_lines", counted)
    code, _, _ = run(capsys, "report", run_dir.root)
    assert (code, read) == (0, [run_dir.events])
