"""What is measured of a model's blocks."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks import sleeping_model as sleeping
from tests.benchmarks.sleeping_model import SleepingBlock
from trainables.distributed.pipeline import block_costs as measuring
from trainables.distributed.pipeline.block_costs import Block, measure_blocks
from trainables.errors import ModelError
from trainables.models.cut_points import cut_points


class _Clock:
    """Of which only sleep takes time: that of a machine which other work never slows."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@contextlib.contextmanager
def _clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        clock = _Clock()
        patch.setattr(measuring, "time", clock)
        patch.setattr(sleeping, "time", clock)
        yield


def _measured(model: nn.Module, num_images: int, *, training: bool = True) -> list[Block]:
    return measure_blocks(model, cut_points(model, 8), torch.rand(num_images, 3, 8, 8), training=training)


def _model(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.mark.parametrize("training", [True, False])
def test_forward_and_backward_of_a_micro_batch_are_timed_apart_block_by_block(training: bool) -> None:
    model = _model(SleepingBlock(0.01, 0.0, 0.01), SleepingBlock(0.0, 0.01, 0.02))
    with _clock():
        blocks = {block.begins_at: block for block in _measured(model, 2, training=training)}
    found = [(blocks[name].forward_s, blocks[name].backward_s) for name in "12"]
    expected = [(0.01, 0.03), (0.02, 0.04)] if training else [(0.01, 0.0), (0.02, 0.0)]
    for times_s, expected_s in zip(found, expected, strict=True):
        assert times_s == pytest.approx(expected_s)


def test_bytes_are_those_of_a_micro_batch() -> None:
    blocks = _measured(_model(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)), 2)
    map_bytes = 2 * 8 * 8 * 4
    assert [block.begins_at for block in blocks][:3] == ["", "1", "2"]
    assert [block.parameter_bytes for block in blocks][:3] == [4 * 16, 4 * 40, 4 * 36]
    assert [block.activation_bytes for block in blocks][:3] == [3 * map_bytes, 4 * map_bytes, 8 * map_bytes]


def test_one_block_at_a_time_is_on_the_device() -> None:
    """So that a model can be timed that does not fit it."""
    moved: list[str] = []

    class Moved(nn.Conv2d):
        def _apply(self, fn: object, recurse: bool = True) -> "Moved":
            moved.append(self.name)
            return self

    model = _model(*(Moved(4, 4, 1) for _ in range(2)))
    for name in "12":
        model.get_submodule(name).name = name  # type: ignore[assignment]
    _measured(model, 2)
    assert moved == ["1", "1", "2", "2"], "to the device and back, one after the other"


class _TooLarge(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_model(_TooLarge(4, 4, 1)), r"begins at 1 does not run on 1 images.*\(CUDA out of memory"),
        (nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5)), "Expected more than 1 value"),
    ],
)
def test_a_block_that_does_not_run_on_a_micro_batch_is_named_in_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        measure_blocks(model, ["1"], torch.rand(1, 3, 8, 8))
    assert "write another scale.micro_batches" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_model_and_the_random_numbers_stay_as_they_are() -> None:
    model = _model(nn.BatchNorm2d(4)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    images_BCHW = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    measure_blocks(model, ["1"], images_BCHW)
    assert not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_teacher_that_cannot_be_traced_is_timed_as_a_whole() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() < 10 else x

    with _clock():
        (block,) = measure_blocks(Branching(SleepingBlock(0.0, 0.015, 0.01)), [], torch.rand(2, 3, 8, 8), training=False)
    assert (block.forward_s, block.backward_s) == pytest.approx((0.03, 0.0))
