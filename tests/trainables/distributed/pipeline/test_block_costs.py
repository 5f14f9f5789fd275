"""What is measured of a model's blocks, and that it is measured once."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.benchmarks import sleeping_model as sleeping
from tests.benchmarks.sleeping_model import SleepingBlock
from trainables.distributed.group import Group
from trainables.distributed.pipeline import block_costs as measuring
from trainables.distributed.pipeline.block_costs import Conditions, measure_blocks
from trainables.distributed.pipeline.costs import Block
from trainables.distributed.pipeline.cut_points import cut_points
from trainables.distributed.pipeline.plan_cut import block_costs, cache_folder, sizes_to_measure, starts_of, teacher_costs
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ModelError

CONDITIONS = Conditions(image_size=8, device=torch.device("cpu"), precision="fp32")


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


def _measured(model: nn.Module, sizes: list[int], *, training: bool = True) -> list[Block]:
    cuts = [point.module for point in cut_points(model, CONDITIONS.image_size)]
    return measure_blocks(model, cuts, CONDITIONS, sizes, training=training).blocks


def _model(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def _sleeping() -> nn.Module:
    return _model(SleepingBlock(0.01, 0.0, 0.01), SleepingBlock(0.0, 0.01, 0.02))


def test_forward_and_backward_are_timed_apart_block_by_block() -> None:
    with _clock():
        blocks = {block.begins_at: block for block in _measured(_sleeping(), [2, 4])}
    times_s = [(blocks[name].forward.seconds(size), blocks[name].backward.seconds(size)) for name in "12" for size in (2, 4)]
    expected_s = [(0.01, 0.03), (0.01, 0.05), (0.02, 0.04), (0.04, 0.08)]
    for found, expected in zip(times_s, expected_s, strict=True):
        assert found == pytest.approx(expected)


class _SometimesSlow(SleepingBlock):
    """Three times as slow in one of two passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fixed_s = 0.04 - self.fixed_s
        return super().forward(x)


def test_blocks_take_together_what_the_model_usually_takes() -> None:
    """One of the two is always slow."""
    model = _model(_SometimesSlow(0.01, 0.0, 0.0), _SometimesSlow(0.03, 0.0, 0.0))
    with _clock():
        blocks = {block.begins_at: block for block in _measured(model, [2])}
    for name in "12":
        assert (blocks[name].forward.seconds(2), blocks[name].backward.seconds(2)) == pytest.approx((0.02, 0.02))


def _shared_costs(group: Group, caches: list[Path]) -> list[Block]:
    """Of a model that is slower on later ranks."""
    model = _model(SleepingBlock(0.01 * (1 + group.rank), 0.0, 0.0))
    with _clock():
        return block_costs(model, cut_points(model, CONDITIONS.image_size), CONDITIONS, [2], group, cache=caches[group.rank])


def test_all_ranks_measure_and_get_the_costs_of_the_slowest_which_the_first_one_stores(ranks: RankPool, tmp_path: Path) -> None:
    caches = [tmp_path / str(rank) for rank in range(2)]
    first, second = ranks.run(2, _shared_costs, caches)
    assert first == second
    assert first[1].forward.seconds(2) == pytest.approx(0.02)
    assert [cache.exists() for cache in caches] == [True, False]
    assert ranks.run(2, _shared_costs, caches) == [first, first]


def _costs_without_memory(group: Group) -> str:
    kind = _TooLarge if group.rank else nn.Conv2d
    model = _model(kind(4, 4, 1))
    with pytest.raises(ModelError) as error:
        block_costs(model, cut_points(_model(nn.Conv2d(4, 4, 1)), 8), CONDITIONS, [2], group, cache=None)
    return str(error.value)


def test_where_one_rank_has_no_memory_for_the_model_all_say_so(ranks: RankPool) -> None:
    first, second = ranks.run(2, _costs_without_memory)
    assert first == second
    assert "the whole model does not fit it" in first


def test_bytes_are_those_of_a_sample() -> None:
    blocks = _measured(_model(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)), [2, 4])
    image_bytes = 8 * 8 * 4
    assert [block.begins_at for block in blocks][:3] == ["", "1", "2"]
    assert [block.parameter_bytes for block in blocks][:3] == [4 * 16, 4 * 40, 4 * 36]
    assert [block.output_bytes for block in blocks][:3] == [4 * image_bytes, 8 * image_bytes, 4 * image_bytes]
    assert [block.activation_bytes for block in blocks][:3] == [3 * image_bytes, 4 * image_bytes, 8 * image_bytes]


def test_a_size_that_batch_norm_refuses_is_left_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))
    assert _measured(model, [1, 2, 4])[0].forward.num_samples == (2, 4)
    with pytest.raises(ModelError, match="does not run on micro-batches of 1: Expected more than 1 value per channel"):
        _measured(model, [1])


class _TooLarge(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class _TooLargeToMove(nn.Conv2d):
    def _apply(self, *arguments: object, **options: object) -> "_TooLargeToMove":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("kind", [_TooLarge, _TooLargeToMove])
def test_a_model_that_does_not_fit_one_device_asks_for_a_cut_by_hand(kind: type[nn.Conv2d]) -> None:
    with pytest.raises(ModelError, match=r"write scale\.cut and scale\.micro_batches by hand \(CUDA out of memory"):
        measure_blocks(_model(kind(4, 4, 1)), ["1"], CONDITIONS, [2, 4])
    with pytest.raises(ModelError, match="the whole teacher, sharded or not, does not fit it"):
        teacher_costs(_model(kind(4, 4, 1)), CONDITIONS, [2, 4], Group(), cache=None)


def test_the_model_and_the_random_numbers_stay_as_they_are() -> None:
    model = _model(nn.BatchNorm2d(4)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    _measured(model, [2])
    assert not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_teacher_runs_forward_and_may_be_one_that_cannot_be_traced() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.mean() < 10 else x

    with _clock():
        (block,) = teacher_costs(Branching(*_sleeping()), CONDITIONS, [2], Group(), cache=None)
    assert block.forward.seconds(2) == pytest.approx(0.03)
    assert block.backward.seconds(2) == 0.0
    with pytest.raises(ModelError, match="Branching cannot be cut"):
        cut_points(Branching(*_sleeping()), CONDITIONS.image_size)


def test_costs_are_measured_once_under_the_same_conditions(tmp_path: Path) -> None:
    points = cut_points(_sleeping(), CONDITIONS.image_size)
    first = block_costs(_sleeping(), points, CONDITIONS, [2], Group(), cache=tmp_path)
    assert block_costs(_sleeping(), points, CONDITIONS, [2], Group(), cache=tmp_path) == first
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["key"]["torch"] == torch.__version__
    assert block_costs(_sleeping(), points, CONDITIONS, [2, 4], Group(), cache=tmp_path) != first
    path.write_text("{")
    assert block_costs(_sleeping(), points, CONDITIONS, [2], Group(), cache=tmp_path) != first, "a damaged file is measured anew"


def test_times_that_cannot_be_kept_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    points = cut_points(_sleeping(), CONDITIONS.image_size)
    assert block_costs(_sleeping(), points, CONDITIONS, [2], Group(), cache=tmp_path / "file" / "cache")
    assert "measured times cannot be stored" in caplog.text


def test_without_a_home_no_times_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["3.0"], "the model cannot be cut before 3.0: choose among 1, 2, 3"),
        (["1", "2"], "2 stages need 1 cuts"),
    ],
)
def test_cuts_that_a_model_does_not_have_are_refused(cuts: list[str], message: str) -> None:
    points = cut_points(_sleeping(), CONDITIONS.image_size)
    assert starts_of(points, ["1"], 2) == (0, 1)
    with pytest.raises(ModelError, match=message):
        starts_of(points, cuts, 2)


def test_of_a_frozen_teacher_the_most_memory_of_a_forward_pass_is_counted() -> None:
    """The images, and a layer's input and output; the outputs of earlier layers are freed."""
    layers = nn.Sequential(nn.Flatten(), *(nn.Linear(*sizes, bias=False) for sizes in ((192, 100), (100, 50), (50, 20))))
    (block,) = measure_blocks(layers, [], CONDITIONS, [4], training=False).blocks
    assert block.activation_bytes == 4 * (192 + 100 + 50)


def test_micro_batches_of_several_sizes_are_measured() -> None:
    assert sizes_to_measure(64, 2, None) == [4, 8, 16, 32, 64]
    assert sizes_to_measure(10, 2, 3) == [1, 2, 3, 4, 5, 10]
