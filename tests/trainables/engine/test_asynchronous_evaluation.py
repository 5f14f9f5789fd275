"""`eval.asynchronous`: the numbers, the best checkpoint and the order of records are those of a training that waits."""

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, train
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import checkpoint
from trainables.engine.checkpoint_evaluation import CheckpointEvaluation, Evaluation
from trainables.engine.train import build, run_job
from trainables.engine.weight_average import WeightAverage
from trainables.errors import CheckpointError, DataError, StageInterruptedError
from trainables.metrics.heartbeat import Heartbeat
from trainables.models.registry import build_model
from trainables.rundir import StageDir


class KilledError(Exception):
    """As if the process was killed."""


class InThread:
    """An evaluator in a thread of rank 0, in place of Ray's actor.

    `at_once`: a result is taken within the next epoch; otherwise at its end. `rooms`: whether each start finds room; at the end
    of the list the last one again.
    """

    def __init__(self, *, at_once: bool = True, rooms: tuple[bool, ...] = (True,)) -> None:
        self._at_once, self._rooms = at_once, list(rooms)
        self._thread = ThreadPoolExecutor(1)
        self._result: Future[Evaluation] | None = None

    def start(self) -> bool:
        return self._rooms.pop(0) if len(self._rooms) > 1 else self._rooms[0]

    def begin(self, settings: TrainConfig, path: Path, step: int) -> None:
        # Built here: building seeds torch's generator, which the threads of a process share.
        evaluation = CheckpointEvaluation(settings, torch.device("cpu"), Heartbeat())
        self._result = self._thread.submit(evaluate, evaluation, path, step)

    def is_done(self, timeout_s: float = 0.0) -> bool:
        if self._result is None or not (timeout_s or self._at_once):
            return False
        self._result.exception()
        return True

    def result(self) -> Evaluation:
        assert self._result is not None
        result, self._result = self._result, None
        return result.result()


def evaluate(evaluation: CheckpointEvaluation, path: Path, step: int) -> Evaluation:
    with contextlib.closing(evaluation._loader):
        return evaluation(path, step)


AT_ONCE, AT_THE_END = partial(InThread), partial(InThread, at_once=False)


def job(folder: Path, *, asynchronous: bool, **sections: Any) -> TrainConfig:
    """Accuracies that rise and fall, and weights whose average is evaluated."""
    settings: dict[str, Any] = {"teacher": None, "model": "convnet_small", "optim": {"epochs": 4, "lr": 0.1, "ema_decay": 0.9}}
    settings["data"] = {"path": "synthetic", "synthetic_images": 130, "global_batch_size": 26}
    return config(folder, **(settings | sections), eval={"asynchronous": asynchronous})


def rows(result: dict[str, Any]) -> list[dict[str, float]]:
    """The history without seconds."""
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in result["progress"].history]


def epochs(*results: dict[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """The step of each epoch's record and its validation, as a log keeps them: of each step the first record."""
    calls = {step: metrics for result in reversed(results) for kind, step, metrics in result["calls"] if kind == "epoch"}
    return [(step, {k: v for k, v in calls[step].items() if k.startswith("val/")}) for step in sorted(calls)]


def best(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    tensors, meta = checkpoint.read(StageDir(folder).best)
    return tensors, meta["progress"]["epoch"]


@pytest.mark.parametrize("evaluator", [AT_ONCE, AT_THE_END])
def test_one_worker_records_the_same_bits_and_keeps_the_same_checkpoint(tmp_path: Path, evaluator: Any) -> None:
    synchronous = train(Group(), job(tmp_path / "waits", asynchronous=False, precision="fp32"))
    asynchronous = train(Group(), job(tmp_path / "goes on", asynchronous=True, precision="fp32"), None, evaluator)
    assert rows(synchronous) == rows(asynchronous)
    assert epochs(synchronous) == epochs(asynchronous)
    assert [step for kind, step, _ in asynchronous["calls"] if kind == "epoch"] == [5, 10, 15, 20]
    assert equal(synchronous["state"], asynchronous["state"])
    (waits, its_epoch), (goes_on, other_epoch) = best(tmp_path / "waits"), best(tmp_path / "goes on")
    assert equal(waits, goes_on)
    assert its_epoch == other_epoch == synchronous["progress"].best_epoch == asynchronous["progress"].best_epoch
    kinds = [kind for kind, *_ in asynchronous["calls"]]
    assert kinds != [kind for kind, *_ in synchronous["calls"]]  # steps of the next epoch come before the record


def test_two_workers_record_what_one_evaluator_measures(ranks: RankPool, tmp_path: Path) -> None:
    synchronous = ranks.run(2, train, job(tmp_path / "waits", asynchronous=False))[0]
    both = ranks.run(2, train, job(tmp_path / "goes on", asynchronous=True), None, AT_ONCE)
    for row, (own, other) in zip(rows(synchronous), zip(*map(rows, both), strict=True), strict=True):
        assert own == pytest.approx(row, rel=1e-9)
        assert {k: v for k, v in own.items() if k.startswith("val/")} == {k: v for k, v in other.items() if k.startswith("val/")}
    assert equal(synchronous["state"], both[0]["state"])
    assert equal(best(tmp_path / "waits")[0], best(tmp_path / "goes on")[0])


@pytest.mark.parametrize("evaluator", [AT_ONCE, AT_THE_END])
def test_a_job_that_dies_anywhere_records_and_keeps_the_same(tmp_path: Path, evaluator: Any) -> None:
    settings: dict[str, Any] = {"model": "mlp_small", "optim": {"epochs": 3, "lr": 0.5}, "train": {"checkpoint_every": 6}}
    whole = train(Group(), job(tmp_path / "whole", asynchronous=True, **settings), None, evaluator)
    for die_after in range(1, len(whole["calls"])):
        pieces = job(tmp_path / str(die_after), asynchronous=True, **settings)
        died = train(Group(), pieces, die_after, evaluator)
        ended = train(Group(), pieces, None, evaluator)
        assert died["died"]
        assert rows(ended) == rows(whole)
        assert epochs(died, ended) == epochs(whole)
        assert equal(ended["state"], whole["state"])
        assert equal(*(best(tmp_path / name)[0] for name in ("whole", str(die_after))))


def test_seconds_of_an_evaluation_are_those_that_the_workers_spend_on_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "raydistill")
    settings = job(tmp_path, asynchronous=True, model="mlp_small", optim={"epochs": 3})
    died = train(Group(), settings, 1 + 3 + 1, AT_THE_END)  # the start, the log lines of one epoch, and one of the next
    assert died["progress"].evaluation_pending
    assert died["progress"].history[0]["epoch/eval_s"] == 0
    resumed = train(Group(), settings, None, AT_THE_END)  # the workers evaluate the first epoch, and the last
    assert resumed["progress"].history[0]["epoch/eval_s"] > 0
    lines = [line for line in caplog.messages if "student epoch " in line]
    assert [", " in line[line.index(" images") :] for line in lines] == [True, False, True]


def test_a_job_that_dies_in_any_of_its_writes_keeps_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "mlp_small", "optim": {"epochs": 3, "lr": 0.5}}
    whole = train(Group(), job(tmp_path / "whole", asynchronous=False, **settings))
    for number in itertools.count(1):
        pieces, writes = job(tmp_path / str(number), asynchronous=True, **settings), itertools.count(1)

        def check(writes: Iterator[int] = writes, last: int = number) -> None:
            if next(writes) == last:
                raise KilledError

        made = build(pieces, Group(), Recorded(), no_telemetry, evaluator=AT_ONCE(), check=check)
        with contextlib.closing(made), contextlib.suppress(KilledError):
            run_job(made)
            break  # there are no more writes
        assert rows(train(Group(), pieces, None, AT_ONCE)) == rows(whole)
        assert equal(*(best(tmp_path / name)[0] for name in ("whole", str(number))))
    assert number > 4  # `last` of three epochs, and its copy as `best`


def test_while_an_evaluation_is_pending_its_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    every_step = {"checkpoint_every": 1, "log_every": 1}
    settings = job(tmp_path, asynchronous=True, train=every_step)
    result = train(Group(), settings, 1 + 5 + 4, AT_THE_END)  # the start, one epoch, and all but the last step of the next
    _, meta = checkpoint.read(StageDir(tmp_path).last)
    assert result["died"]
    assert (meta["progress"]["step"], meta["progress"]["evaluation_pending"]) == (5, True)
    assert not StageDir(tmp_path).best.exists()
    train(Group(), settings, 1 + 1 + 2, AT_ONCE)  # the workers evaluate; dies in the second step after that
    _, meta = checkpoint.read(StageDir(tmp_path).last)
    assert (meta["progress"]["step"], meta["progress"]["evaluation_pending"]) == (6, False)
    assert best(tmp_path)[1] == 1


def test_a_job_that_is_interrupted_in_an_evaluation_ends_at_once_and_goes_on_from_what_is_evaluated(tmp_path: Path) -> None:
    settings = job(tmp_path, asynchronous=True)
    made = build(
        settings,
        Group(),
        Recorded(),
        no_telemetry,
        evaluator=AT_THE_END(),
        interruption_request=lambda: "preempted" if made.progress.step > 5 else None,
    )
    made.interruptions.after_step = made.interruptions.exchange  # type: ignore[method-assign]
    with contextlib.closing(made), pytest.raises(StageInterruptedError):
        run_job(made)
    _, meta = checkpoint.read(StageDir(tmp_path).last)
    assert (meta["progress"]["step"], meta["progress"]["evaluation_pending"]) == (5, True)
    whole = train(Group(), job(tmp_path / "whole", asynchronous=False))
    assert rows(train(Group(), settings)) == rows(whole)


def test_without_room_the_workers_evaluate_until_there_is_some(tmp_path: Path) -> None:
    synchronous = train(Group(), job(tmp_path / "waits", asynchronous=False))
    rooms = train(Group(), job(tmp_path / "rooms", asynchronous=True), None, partial(InThread, rooms=(False, True, False)))
    assert epochs(synchronous) == epochs(rooms)
    assert equal(best(tmp_path / "waits")[0], best(tmp_path / "rooms")[0])


def broken_validation(folder: Path, num_broken: int) -> str:
    for split in ("train", "val"):
        for number in range(16):
            file = folder / split / "ab"[number % 2] / f"{number:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            broken = split == "val" and 0 < number <= num_broken
            file.write_bytes(b"broken") if broken else Image.new("RGB", (8, 8), (number, 0, 0)).save(file)
    return str(folder)


def test_images_that_the_evaluator_cannot_read_are_counted_and_too_many_end_all_workers(ranks: RankPool, tmp_path: Path) -> None:
    data = {"path": broken_validation(tmp_path / "data", 2), "global_batch_size": 4, "max_bad": 0.2}
    counted = ranks.run(2, train, job(tmp_path / "counted", asynchronous=True, data=data), None, AT_ONCE)
    assert [[row["epoch/skipped_images"] for row in rows(result)] for result in counted] == [[2.0] * 4] * 2
    broken_validation(tmp_path / "data", 5)
    with pytest.raises(DataError, match=r"^5 unreadable images in one epoch, more than the 3 of 16"):
        ranks.run(2, train, job(tmp_path / "too many", asynchronous=True, data=data), None, AT_ONCE)


def test_a_checkpoint_that_a_node_does_not_see_yet_is_awaited_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = build_model("mlp_small", num_classes=10, image_size=8, seed=0)
    state = {f"model.{name}": tensor for name, tensor in student.state_dict().items()}
    checkpoint.write_tensors(tmp_path / "last.safetensors", state, {"model": "mlp_small", "progress": {"step": 15}})
    average: WeightAverage | None = None
    checkpoint.load_student(tmp_path / "last.safetensors", 15, student, average)
    monkeypatch.setattr(checkpoint, "OLD_FILE_S", 0.0)
    with pytest.raises(CheckpointError, match=r"last.safetensors is of step 15, and not that of step 30: check that the nodes"):
        checkpoint.load_student(tmp_path / "last.safetensors", 30, student, average)
