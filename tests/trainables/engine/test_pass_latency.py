"""A step's cost on one image: measured after the training, which it leaves as it was."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainables.jobs import Recorded, config, equal, no_telemetry, write_teacher
from trainables.distributed.group import Group
from trainables.engine import pass_latency as latency
from trainables.engine import records
from trainables.engine.job import Job
from trainables.engine.pass_latency import pass_latency
from trainables.engine.passes import TrainState
from trainables.engine.train import build, run_job

IMAGE_SIZE = 32  # at which what an image adds is well above what other processes do to a clock


@pytest.fixture
def job(tmp_path: Path) -> Job:
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_small", image_size=IMAGE_SIZE)
    settings = config(
        tmp_path, model="resnet8", precision="fp32", data={"image_size": IMAGE_SIZE, "global_batch_size": 16},
        teacher={"model": "convnet_small", "weights": weights}, train={"max_steps": 4, "warmup_steps": 1},
    )  # fmt: skip
    return build(settings, Group(), lambda *_: None, no_telemetry)


def test_a_method_that_fails_on_images_of_zeros_ends_no_finished_training(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def singular(*_: object, **__: object) -> dict[str, float]:
        torch.linalg.cholesky(torch.zeros(2, 2))
        return {}

    monkeypatch.setattr(records, "pass_latency", singular)
    with contextlib.closing(job), caplog.at_level("WARNING", logger="raydistill"):
        summary = run_job(job)
    assert summary["steps"] == 5
    assert "one_image_ms" not in summary
    assert "cannot time the passes: _LinAlgError: linalg.cholesky" in caplog.text


def test_it_is_less_than_a_step_on_many_and_more_than_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s in ("_MAX_S", "_MAX_PASS_S"):  # which a busy machine reaches at once
        monkeypatch.setattr(latency, limit_s, float("inf"))
    monkeypatch.setattr(latency, "_MAX_FACTOR", 2)
    with contextlib.closing(job):
        summary = run_job(job)
    assert 0 < summary["one_image_ms"] < summary["phase/step_ms"]
    timed = {name: ms for name, ms in summary.items() if name.startswith("passes/")}
    assert list(timed)[:2] == ["passes/16_images_ms", "passes/32_images_ms"]
    assert summary["one_image_ms"] < timed["passes/16_images_ms"] < timed["passes/32_images_ms"]


def test_it_changes_neither_parameters_nor_statistics_nor_gradients_nor_random_numbers(job: Job) -> None:
    with contextlib.closing(job):
        before = {name: tensor.clone() for name, tensor in job.student.state_dict().items()}
        job.student.train()
        random = torch.random.get_rng_state()
        timed = pass_latency(job.train_state, IMAGE_SIZE, micro_batch=4, step_s=0.0, max_images=8)
        assert set(timed) <= {"one_image_ms", "passes/4_images_ms", "passes/8_images_ms"}
        assert equal(before, job.student.state_dict())
        assert torch.equal(random, torch.random.get_rng_state())
        assert job.student.training
        assert all(parameter.grad is None for parameter in job.student.parameters())


@pytest.mark.parametrize(
    ("passes_s", "micro_batch", "timed"),
    [
        (lambda num_images: 0.01, 2, [2, 4, 8, 16]),  # up to as many images as a micro-batch can have
        (lambda num_images: 0.0001, 1, [1, 2, 4, 8, 16]),
        (lambda num_images: 0.12, 2, [2, 4, 8, 16]),
        (lambda num_images: 0.13, 2, [2]),  # the next one may take more than a quarter second
    ],
)
def test_larger_batches_are_timed_as_long_as_that_is_worth_it(
    job: Job, monkeypatch: pytest.MonkeyPatch, passes_s: Callable[[int], float], micro_batch: int, timed: list[int]
) -> None:
    monkeypatch.setattr(latency, "passes_s", lambda train_state, image_size, num_images: passes_s(num_images))
    with contextlib.closing(job):
        found = pass_latency(job.train_state, IMAGE_SIZE, micro_batch=micro_batch, step_s=0.0, max_images=16)
    expected = {f"passes/{num_images}_images_ms": 1e3 * passes_s(num_images) for num_images in timed}
    assert found == {"one_image_ms": 1e3 * passes_s(1), **expected}


def test_batches_are_timed_in_turn_so_that_a_machine_that_is_slow_for_a_while_is_so_for_all(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = itertools.chain([3.0] * 6, itertools.repeat(1.0))

    def passes_s(train_state: TrainState, image_size: int, num_images: int) -> float:
        return 0.001 * num_images**0.5 * next(factors)

    monkeypatch.setattr(latency, "passes_s", passes_s)
    with contextlib.closing(job):
        timed = pass_latency(job.train_state, IMAGE_SIZE, micro_batch=4, step_s=0.0, max_images=16)
    assert timed == {
        "one_image_ms": 1.0,
        "passes/4_images_ms": 2.0,
        "passes/8_images_ms": pytest.approx(8**0.5),
        "passes/16_images_ms": 4.0,
    }


def test_a_batch_that_does_not_fit_is_recorded_and_the_ones_before_it_are_timed(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def with_little_memory(train_state: TrainState, image_size: int, num_images: int) -> float:
        if num_images >= 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.001

    monkeypatch.setattr(latency, "passes_s", with_little_memory)
    with contextlib.closing(job), caplog.at_level("INFO", logger="raydistill"):
        timed = pass_latency(job.train_state, IMAGE_SIZE, micro_batch=2, step_s=0.0, max_images=64)
    assert timed == {
        "one_image_ms": 1.0,
        "passes/2_images_ms": 1.0,
        "passes/4_images_ms": 1.0,
        "passes/out_of_memory_images": 8.0,
    }
    assert "not timing passes on 8 images: out of memory" in caplog.text


def test_a_trained_student_has_the_latency_of_its_forward_pass_alone(tmp_path: Path) -> None:
    teacher = {"weights": write_teacher(tmp_path / "teacher.safetensors")}
    with contextlib.closing(build(config(tmp_path, teacher=teacher), Group(), Recorded(), no_telemetry)) as job:
        summary = run_job(job)
        assert job.student.training
    assert 0 < summary["inference_ms"] < summary["one_image_ms"]
