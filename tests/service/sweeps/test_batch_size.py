"""`data.global_batch_size: auto`: timings decide it once, when a training begins."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.config.batch_size import TIMED, smallest_batch
from service.config.experiment import Resolved, load, read_resolved
from service.report import end_of_run
from service.runs.preflight import check_train
from service.runs.result import RunResult
from service.runs.run_directory import begin_run, check_same, has_begun
from service.runs.teacher_cache import fill_cache
from service.search.points import Observation
from service.search.replay import replay
from service.sweeps import batch_size
from service.sweeps.batch_size import Timing, batches_to_try, choose, timing_sweep, timings, with_batch_size
from service.sweeps.preflight import check_sweep
from service.sweeps.trials import plan_trials
from tests.run_log import result_of, write_log
from tests.service.commands import run
from tests.service.search import rows
from trainables.errors import ExperimentError, TrainingError
from trainables.notices import notices_to
from trainables.rules import replica_batch
from trainables.rundir import RunDir

BATCHES = [8 << power for power in range(8)]
AUTO = "data.global_batch_size=auto"


def experiment(*overrides: str) -> Resolved:
    return load("digits", [AUTO, "tracking.enabled=false", *overrides])


def timed(batch: int, step_s: float | None = None, status: str = "ok", peak_mib: float = 0.0) -> dict[str, Any]:
    """A row of the sweep."""
    point = {"scale.num_workers": 1, "data.global_batch_size": batch, "data.loader_workers": 4}
    row = rows.row(BATCHES.index(batch), point, status) | {"metrics": {}, "steps_s": []}
    if step_s is not None:
        memory = {"peak_memory_mib": peak_mib, "gpu_memory_mib": 1000.0}
        row |= {"metrics": {"step_s": step_s, "images_per_s": batch / step_s, **memory}, "steps_s": [step_s] * 20}
    return row


def teacher(batch: int, status: str, peak_mib: float = 0.0) -> dict[str, Any]:
    """A row of the stage that times the teacher."""
    metrics = {"step_s": 0.1, "peak_memory_mib": peak_mib, "gpu_memory_mib": 1000.0} if status == "ok" else {}
    return {"stage": f"teacher-{batch}", "model": "resnet34", "status": status, "metrics": metrics}


def searched(step_s: Callable[[int], float], out_of_memory: float = math.inf) -> RunResult:
    """A guided search over batches of which those from `out_of_memory` on do not fit."""
    found = {batch: timed(batch, status="untested") for batch in BATCHES}
    planner = replay(rows.result(list(found.values()), tolerance=0.025))
    while (point := planner.ask(1)) is not None:
        batch = point["data.global_batch_size"]
        fits = batch < out_of_memory
        found[batch] = timed(batch, step_s(batch)) if fits else timed(batch, status="oom")
        planner.tell(point, Observation("ok", [step_s(batch)] * 20, {"student": step_s(batch)}) if fits else Observation("oom"))
    return rows.result(list(found.values()), tolerance=0.025)


@pytest.mark.parametrize(
    ("images_per_s", "batch"),
    [
        ({8: 100, 16: 190, 32: 300, 64: 400}, 64),
        ({8: 100, 16: 190, 32: 300, 64: 307}, 32),
        ({8: 100, 16: 100, 32: 100, 64: 100}, 8),
        ({8: 100, 16: 99, 32: 80}, 8),
        ({8: 100, 32: 120, 64: 90}, 32),
        ({8: 100}, 8),
    ],
    ids=["grows", "levels off", "is flat", "falls", "has a peak", "one"],
)
def test_the_smallest_batch_about_as_fast_as_the_fastest_is_taken(images_per_s: dict[int, int], batch: int) -> None:
    assert choose({each: Timing(speed) for each, speed in images_per_s.items()}, 0.025) == batch


@pytest.mark.parametrize(
    ("step_s", "out_of_memory", "batch"),
    [(lambda batch: 0.02 + 0.001 * batch, 256, 128), (lambda batch: 0.001 * batch, math.inf, 8)],
    ids=["does not fit", "is flat"],
)
def test_a_guided_search_finds_it(step_s: Callable[[int], float], out_of_memory: float, batch: int) -> None:
    result = searched(step_s, out_of_memory)
    assert choose(timings(result), 0.025) == batch
    assert max(each for each, timing in timings(result).items() if timing.images_per_s) < out_of_memory


def test_a_batch_leaves_memory_to_spare_if_one_does() -> None:
    result = rows.result([timed(64, 0.1, peak_mib=900), timed(128, 0.15, peak_mib=970), timed(256, status="oom")])
    spare, tight, too_large = map(str, timings(result).values())
    assert (float(spare.removesuffix(" images/s")), too_large) == (pytest.approx(640, rel=0.02), "out of memory")
    assert tight.endswith(" images/s, too little memory left")
    assert choose(timings(result), 0.025) == 64
    result = rows.result([timed(64, 0.1, peak_mib=980), timed(128, 0.15, peak_mib=990)])
    assert choose(timings(result), 0.025) == 64


def test_the_batch_fits_the_training_of_the_teacher_too() -> None:
    result = rows.result([timed(64, 0.1), timed(128, 0.15), timed(256, 0.2)])
    assert choose(timings(result), 0.025) == 256
    limited = result.model_copy(update={"stages": rows.result([], stages=[teacher(256, "oom")]).stages})
    assert choose(timings(limited), 0.025) == 128
    assert str(timings(limited)[256]).endswith(" images/s, the teacher runs out of memory")
    limited = rows.result([timed(64, 0.1), timed(128, 0.15)], stages=[teacher(128, "ok", 990.0), teacher(64, "ok", 900.0)])
    assert choose(timings(limited), 0.025) == 64


def test_without_a_batch_that_fits_there_is_a_line() -> None:
    result = rows.result([timed(8, status="oom"), timed(16, status="failed")])
    assert {batch: str(timing) for batch, timing in timings(result).items()} == {8: "out of memory", 16: "failed"}
    with pytest.raises(TrainingError, match=r"^data\.global_batch_size: auto finds no batch that fits"):
        choose(timings(result), 0.025)


@pytest.mark.parametrize(
    ("overrides", "batches"),
    [
        ((), [8, 16, 32, 64]),  # of 1,442 images: 16 steps of an epoch or more
        (("scale.num_workers=2",), [16, 32, 64]),
        (("scale.num_workers=3",), [24, 48]),
        (("optim.accumulate=10",), [32, 64]),  # batch norms need two images of each part
        (("scale.num_workers=4", "scale.pipeline_stages=2", "scale.micro_batches=2"), [16, 32, 64]),
        (("scale.num_workers=100",), [800]),
        (("data.last_batch=short",), [8, 16, 32, 64]),
        (("data.more=[{path: synthetic, share: 0.25, labels: true}]",), [8, 16, 32, 64]),
        (("data.path=synthetic", "data.synthetic_images=8"), [8]),
    ],
)
def test_batches_are_powers_of_two_for_each_worker_and_none_exceeds_the_images(
    overrides: tuple[str, ...], batches: list[int]
) -> None:
    resolved = experiment("student.model=resnet8", "data.image_size=16", *overrides)
    assert batches_to_try(resolved, 10) == batches
    assert smallest_batch(resolved.experiment) == batches[0]
    sweep = timing_sweep(resolved, batches)
    assert sweep.experiment.sweep.budget_gpu_h == pytest.approx(resolved.experiment.scale.num_workers / 12)
    for trial, batch in zip(plan_trials(sweep), batches, strict=True):
        assert trial.outcome is None
        assert trial.resolved is not None
        settings = trial.resolved.experiment.stage("student", Path("/"), {})
        assert replica_batch(settings) * settings.scale.num_replicas == batch


@pytest.mark.parametrize("last_batch", ["drop", "short"])
def test_too_few_images_for_any_batch_are_refused(last_batch: str) -> None:
    few = experiment("data.path=synthetic", "data.synthetic_images=20", "scale.num_workers=3", f"data.last_batch={last_batch}")
    with pytest.raises(
        ExperimentError, match=r"auto finds no batch: write a number \(synthetic has 20 training images, .* 24\)$"
    ):
        batches_to_try(few, 10)


def decide(run_dir: RunDir, resolved: Resolved) -> tuple[Resolved, list[str]]:
    """The decision of a run whose batches are timed, and what is said of it."""
    lines: list[str] = []
    resolved, data = check_train(resolved)
    with notices_to(lines.append):
        decided = with_batch_size(resolved, run_dir, end_of_run, data)
    return decided, lines


def begun(folder: Path, *overrides: str) -> tuple[RunDir, Resolved]:
    """A run that was killed when its batches were timed, but for 8."""
    run_dir, resolved = RunDir(folder / "run"), experiment(*overrides)
    begin_run(resolved, "train", run_dir, folder)
    sweep_dir = RunDir(run_dir.batch_size)
    begin_run(timing_sweep(resolved, [8, 16, 32, 64]), "sweep", sweep_dir, folder)
    timings = [timed(8, status="untested"), timed(16, 0.02), timed(32, 0.03), timed(64, 0.06)]
    write_log(sweep_dir, rows.result(timings, status="complete", tolerance=0.025))
    return run_dir, resolved


def test_the_decision_is_said_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, resolved = begun(tmp_path, "optim.lr_scaling=linear", "optim.warmup_epochs=0", "optim.warmup_steps=100000")
    decided, (line, warmup) = decide(run_dir, resolved)
    said = re.sub(r"[\d,]+ images", "N images", line).removesuffix(str(run_dir.batch_size))
    assert said == (
        "data.global_batch_size: auto is 32, the smallest batch within 2.5% of the most images/s (16: N images/s; "
        "32: N images/s; 64: N images/s). Accuracy depends on the batch: optim.lr 0.05 becomes 0.00625 "
        "(optim.lr_scaling: linear). The timings are in "
    )
    assert warmup.startswith("optim.warmup_steps 100,000: the training has 540, ")
    assert decided.experiment.data.global_batch_size == 32
    assert result_of(run_dir).notices == [line, warmup]
    assert result_of(run_dir).sources["data.global_batch_size"] == TIMED

    again = read_resolved(run_dir.experiment)
    assert again.experiment == decided.experiment
    shutil.rmtree(run_dir.batch_size)
    assert decide(run_dir, again) == (again, [])
    check_same("train", resolved, run_dir.root)  # `train … --continue` with the same file
    with pytest.raises(ExperimentError, match=r"another data\.global_batch_size \(32\)"):
        check_same("train", load("digits", ["tracking.enabled=false"]), run_dir.root)
    _, out, _ = run(capsys, "show", run_dir.experiment)
    assert f"# {TIMED}" in next(line for line in out.splitlines() if line.startswith("data.global_batch_size"))


def test_a_kill_between_the_log_and_the_experiment_leaves_nothing_half_decided(tmp_path: Path) -> None:
    run_dir, resolved = begun(tmp_path)
    before = run_dir.experiment.read_text()
    first, _ = decide(run_dir, resolved)
    run_dir.experiment.write_text(before)
    second, _ = decide(run_dir, read_resolved(run_dir.experiment))
    assert first.experiment == second.experiment == read_resolved(run_dir.experiment).experiment


def test_a_run_without_a_batch_that_fits_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, resolved = begun(tmp_path)
    write_log(RunDir(run_dir.batch_size), rows.result([timed(8, status="oom"), timed(16, status="untested")], status="running"))

    def sweep(*_: object, **__: object) -> None:
        raise TrainingError("none of 2 trials measured images_per_s: see the table for reasons")

    monkeypatch.setattr(batch_size, "sweep", sweep)
    with pytest.raises(TrainingError, match="auto finds no batch that fits"):
        decide(run_dir, resolved)
    result = result_of(run_dir)
    assert result.status == "failed"
    assert (result.reason or "").startswith("data.global_batch_size: auto finds no batch that fits")
    assert read_resolved(run_dir.experiment).experiment.data.global_batch_size == "auto"
    assert run_dir.report.exists()


def test_a_method_in_a_file_is_the_runs_copy(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from trainables.methods.kd import KD\n\n\nclass Own(KD):\n    pass\n")
    run_dir, resolved = RunDir(tmp_path / "run"), experiment(f"distill.method={file}:Own")
    begin_run(resolved, "train", run_dir, tmp_path)
    (method,) = timing_sweep(resolved, [8]).experiment.distill.method
    assert method.startswith(str(run_dir.methods))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "train.max_steps=20",
            "--set: data.global_batch_size auto does not go with train.max_steps, a timing run, which times one batch: write "
            "data.global_batch_size: 128, or write train.max_steps: null",
        ),
        ("scale.num_workers=[2, 4]", "--set: data.global_batch_size auto does not go with scale.min_workers, since a worker's"),
        ("assistants=[{model: mlp_small}]", "--set: data.global_batch_size auto does not go with assistants, of which"),
        ("sweep.space={data.global_batch_size: [64, auto]}", "--set: sweep.space: data.global_batch_size: auto is decided when"),
        ("optim.clip_grad_agc=0.1 optim.clip_grad_norm=1", "--set: optim.clip_grad_agc does not go with optim.clip_grad_norm"),
        ("scale.num_workers=3 scale.pipeline_stages=2", "--set: scale.num_workers 3 is not divisible by scale.pipeline_stages 2"),
    ],
)
def test_what_does_not_go_with_auto_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        experiment(*(overrides.split(" ") if overrides.startswith(("optim", "scale")) and "[" not in overrides else [overrides]))
    assert str(refused.value).startswith(message)


def test_commands_that_begin_no_training_want_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = "sweep.space={data.global_batch_size: [64, 128]}"
    with pytest.raises(ExperimentError, match=r"^data\.global_batch_size: auto is decided when .* as sweep\.space: \{data"):
        check_sweep(experiment(space))
    with pytest.raises(ExperimentError, match=r"not by `distill cache`: write a number$"):
        fill_cache(experiment(f"teacher.cache={tmp_path}"), tmp_path)
    code, _, err = run(capsys, "split", "digits", "--set", AUTO)
    assert code == 2
    assert err.endswith("not by `distill split`: write a number\n")


def test_a_dry_run_and_show_say_that_it_is_decided_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "train", "digits", "--dry-run", "--set", AUTO, "--runs", tmp_path / "runs")
    assert code == 0
    assert "global batch auto (timed first), on" in out
    assert not has_begun(tmp_path / "runs")
    code, out, _ = run(capsys, "show", "digits", "--set", AUTO)
    assert code == 0
    assert "# data.global_batch_size is decided when `distill train` begins: it times batches" in out


def test_the_checks_before_a_run_keep_auto(tmp_path: Path) -> None:
    resolved, _ = check_train(experiment())
    assert resolved.experiment.data.global_batch_size == "auto"
    with pytest.raises(ExperimentError, match="mlp_large"):
        check_train(experiment("distill.method=fitnet", "student.model=mlp_small", "teacher.model=mlp_large"))
