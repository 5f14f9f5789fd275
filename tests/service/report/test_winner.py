"""The sentences on a winner: how much better, how sure, and the command that trains it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from service.config import strict_yaml
from service.config.experiment import load
from service.config.strict_yaml import parse
from service.report.winner import bound, command, describe_lead, memory_to_spare, notes, why, written
from service.runs.result import TrialRow
from service.runs.run_directory import reopen
from service.runs.run_log import read_log
from service.runs.stored.stored_runs import run_folder
from tests.run_log import add, numbers, result_of
from tests.service.report.runs import sweep_dir, typed, typed_row
from trainables.rundir import RunDir

W, B, L = "scale.num_workers", "data.global_batch_size", "data.loader_workers"


def row(name: str, workers: int, batch: int, speed: float, steps_s: Sequence[float] = ()) -> TrialRow:
    scale = {W: workers, B: batch, L: 2}
    metrics = {"images_per_s": speed, "epoch_s": 1e4 / speed}
    params = {W: workers, B: batch}
    return typed_row({"id": name, "params": params, "scale": scale, "status": "ok", "steps_s": list(steps_s), "metrics": metrics})


def spread(error: float) -> list[float]:
    """Times of steps whose mean is known to this share of it: four times, of a standard deviation of twice the error."""
    return [1 + sign * error * 3**0.5 for sign in (1, -1, 1, -1)]


def why_best(rows: list[TrialRow]) -> str:
    """Why the fastest of these trials is the best."""
    result = typed({"trials": rows, "use_gpu": True})
    assert result.best is not None
    return why(result, result.best)


def best_row(run_dir: RunDir) -> TrialRow:
    best = reopen(run_dir.root)[2].best
    assert best is not None
    return best


def test_each_value_of_the_winner_is_weighed_against_the_next_best_one() -> None:
    best = row("3", 2, 256, 300.0)
    rows = [row("0", 1, 128, 90.0), row("1", 1, 256, 100.0), row("2", 2, 128, 250.0), best]
    assert why_best(rows) == (
        "Compared with the next best value of each axis, others unchanged: "
        "2 GPUs: 3.0 times as fast as 1; batch 256: 20.0% faster than 128."
    )


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        ((0.02, 0.02), "3.0% faster, within noise, than"),
        ((0.02, 0.001), "3.0% faster, within noise, than"),
        ((0.005, 0.005), "3.0% faster than"),
        ((None, 0.02), "3.0% faster than"),
    ],
)
def test_a_lead_that_the_steps_spread_explains_is_called_noise(errors: tuple[float | None, float], says: str) -> None:
    best, close = (
        row("0", 1, 256, speed, [] if error is None else spread(error))
        for speed, error in zip((103.0, 100.0), errors, strict=True)
    )
    assert describe_lead(best, close, "images_per_s", "max") == says


def test_of_times_the_shorter_is_the_better() -> None:
    best, slow = row("0", 1, 256, 120.0), row("1", 1, 128, 100.0)
    assert describe_lead(best, slow, "epoch_s", "min") == "20.0% faster than"


def test_of_costs_the_lower_is_the_better_and_not_called_fast() -> None:
    best, dear = row("0", 1, 256, 120.0), row("1", 1, 128, 100.0)
    best.metrics["gpu_s_per_epoch"], dear.metrics["gpu_s_per_epoch"] = 40.0, 100.0
    assert describe_lead(best, dear, "gpu_s_per_epoch", "min") == "costs 60.0% less than"
    assert describe_lead(dear, best, "gpu_s_per_epoch", "min") == "costs 150.0% more than"


def test_accuracies_are_compared_in_points() -> None:
    best, other = row("0", 1, 256, 1.0), row("1", 1, 128, 1.0)
    best.metrics["top1_pct"], other.metrics["top1_pct"] = 92.5, 92.25
    assert describe_lead(best, other, "top1_pct", "max") == "+0.25 points over"


def test_a_lone_trial_is_the_best_of_one() -> None:
    assert why_best([row("0", 1, 128, 10.0)]) == "It has the highest images/s of 1 trial that ran."


def test_how_sure_the_winner_is_depends_on_what_was_left_untried() -> None:
    rows = [row("0", 1, 128, 10.0), row("1", 1, 256, 20.0)]
    assert bound(typed({"trials": rows})) == ["All points measured: 2 points, the whole space."]
    assert bound(typed({"trials": rows, "policy": "random"})) == ["2 points drawn at random: another one may be better."]
    pending = rows[0].model_copy(update={"status": "pending"})
    assert bound(typed({"trials": [pending, rows[1]]})) == ["1 point of 2 not tried yet: one of them may be better."]
    guided = {
        "trials": [rows[0].model_copy(update={"status": "untested"}), rows[1]],
        "search": {"bound_pct": 2.04, "spent_gpu_s": 99.0, "grid_share": 0.12, "why": "so"},
    }
    assert bound(typed(guided)) == [
        "With 90% probability, no point is more than 2.0% better; 1 of 2 points were tried, for 99 worker-seconds, 12% of "
        "what measuring every point briefly would take.",
        "Why the search ended: so.",
    ]
    assert bound(typed({"trials": []})) == []


def test_a_winner_at_the_brim_of_memory_says_so_and_names_the_next_one_that_is_not() -> None:
    rows = [row("0", 1, 128, 10.0), row("1", 1, 256, 20.0), row("2", 1, 512, 30.0)]
    for one, peak_mib in zip(rows, (500.0, 960.0, 970.0), strict=True):
        one.metrics.update(peak_memory_mib=peak_mib, gpu_memory_mib=1000.0)
    assert memory_to_spare(typed({"trials": rows, "chosen": "2"})) == [
        "trial 2 took 97.0% of a GPU's memory: a long run may not fit; take trial 1, the next best that leaves 4%"
    ]
    assert memory_to_spare(typed({"trials": rows, "chosen": "1"})) == []


def test_a_training_to_the_target_is_not_counted_as_a_point() -> None:
    rows = [row("0", 1, 128, 10.0), row("1", 1, 256, 20.0)]
    trained = rows[1].model_copy(update={"id": "1-trained", "speed_trial": "1"})
    assert bound(typed({"trials": [*rows, trained]})) == ["All points measured: 2 points, the whole space."]


def test_a_search_for_speed_and_cost_names_its_front() -> None:
    rows = [row("0", 1, 128, 10.0), row("1", 2, 128, 15.0)]
    for one, cost in zip(rows, (1000.0, 1333.4), strict=True):
        one.metrics["gpu_s_per_epoch"] = cost
    sentences = notes(
        typed(
            {
                "trials": rows,
                "chosen": "1",
                "metric": "pareto",
                "mode": "max",
                "search": {"front": ["0", "1"], "bound_pct": 0.0, "spent_gpu_s": 9.0, "why": "so"},
            }
        )
    )
    front = sentences.index("the front of speed and cost:")
    assert sentences[front + 1 : front + 3] == [
        "  0: 1 worker × batch 128 × 2 loader workers: 10.0 images/s for 1,000 worker-s/epoch",
        "  1: 2 workers × batch 128 × 2 loader workers: 15.0 images/s for 1,333 worker-s/epoch",
    ]


def test_the_command_trains_at_the_winners_point(tmp_path: Path) -> None:
    space = {
        W: [1, 2],
        B: [64, 128],
        L: ["auto"],
        "precision": ["bf16"],
        "data.shuffle": ["full", "window(64)"],
        "optim.lr": [1e-4],
    }
    run_dir = sweep_dir(tmp_path / "a run", {**space, L: [1]})
    best = best_row(run_dir)
    words = shlex.split(command(run_dir, read_log(run_dir), best))
    assert words[:3] == ["distill", "train", str(run_dir.experiment)]
    assert words[3::2] == ["--set"] * len(words[4::2])
    experiment = load(words[2], words[4::2]).experiment
    assert experiment.scale.num_workers == best.params[W]
    assert experiment.data.global_batch_size == best.params[B]
    assert (experiment.data.loader_workers, experiment.precision, experiment.optim.lr) == (1, "bf16", 1e-4)
    assert experiment.data.shuffle == best.params["data.shuffle"]


def test_the_command_takes_the_loader_workers_that_auto_came_to_and_the_sweeps_own_teacher(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {B: [64]})
    teacher = run_dir.stage("teacher").best
    teacher.parent.mkdir(parents=True)
    teacher.write_bytes(b"")
    words = shlex.split(command(run_dir, read_log(run_dir), best_row(run_dir)))
    assert f"{L}=2" in words
    assert f"teacher.weights={teacher}" in words


def test_the_command_takes_the_last_assistant_that_a_sweep_has_trained(tmp_path: Path) -> None:
    run_dir = sweep_dir(tmp_path / "s", {B: [64]})
    tree = strict_yaml.parse(run_dir.experiment.read_text(), "")
    tree["teacher"] |= {"weights": "of_other_classes.pt", "weights_key": "model", "finetune": True}
    run_dir.experiment.write_text(strict_yaml.dump({**tree, "assistants": [{"model": "resnet14"}, {"model": "resnet8"}]}))
    for name in ("teacher", "assistant1", "assistant2"):
        best = run_dir.stage(name).best
        best.parent.mkdir(parents=True)
        best.write_bytes(b"")
    words = shlex.split(command(run_dir, read_log(run_dir), best_row(run_dir)))
    experiment = load(words[2], words[4::2]).experiment
    assert experiment.teacher is not None
    assert (experiment.teacher.model, experiment.teacher.weights) == ("resnet8", str(run_dir.stage("assistant2").best))
    assert (experiment.teacher.finetune, experiment.teacher.weights_key) == (None, None)
    assert list(experiment.preparation) == ["teacher"]


def test_the_command_of_a_run_in_an_object_store_names_what_is_there_and_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path))
    uri = "s3://bucket/runs/one"
    run_dir = sweep_dir(run_folder(uri), {B: [64]})
    best = result_of(run_dir).best
    assert best is not None
    assert command(run_dir, read_log(run_dir), best).startswith(f"distill train {uri}/experiment.yaml --set ")
    add(run_dir, numbers("summary", "teacher", 1))  # its checkpoint is not brought to this machine
    words, _, comment = command(run_dir, read_log(run_dir), best).partition("  # ")
    assert "--set teacher.weights=teacher.safetensors" in words
    assert comment == f"teacher.safetensors: copy it from {uri}/teacher/checkpoints/best.safetensors"


def test_every_value_is_read_back_as_it_was() -> None:
    for swept in (
        1,
        0.1,
        1e-5,
        True,
        None,
        "bf16",
        "true",
        "1",
        "1e-4",
        "a: b",
        "{x",
        "#no",
        "",
        " a ",
        "[1]",
        [1, "2"],
        {"a": 0.5},
    ):
        assert parse(written(swept), "") == swept
        assert type(parse(written(swept), "")) is type(swept)
