"""Which batch norms can be replaced by those over all ranks. What these compute is tested in `test_gather`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainables.distributed import batch_norm
from trainables.distributed.batch_norm import GlobalBatchNorm2d, convert, merge_statistics, use_batch_statistics
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ModelError


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(2, momentum=None),
        nn.BatchNorm2d(2, affine=False),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.BatchNorm3d(2),
    ],
    ids=str,
)
def test_a_batch_norm_of_another_kind_is_refused(norm: nn.Module) -> None:
    with pytest.raises(ModelError, match=f"an unsupported batch norm, {type(norm).__name__}: set a.key to off"):
        convert(nn.Sequential(norm), Group(), key="a.key", off="off")


def test_what_a_replaced_batch_norm_was_stays() -> None:
    norm = nn.BatchNorm2d(2, eps=0.25, momentum=0.75).eval()
    assert norm.running_mean is not None
    norm.running_mean.fill_(3.0)
    (replaced,) = convert(nn.Sequential(norm), Group()).children()
    assert isinstance(replaced, GlobalBatchNorm2d)
    assert (replaced.eps, replaced.momentum, replaced.training) == (0.25, 0.75, False)
    assert replaced.weight is norm.weight
    assert replaced.bias is norm.bias
    assert replaced.running_mean is not None
    assert replaced.running_mean.tolist() == [3.0, 3.0]
    assert convert(nn.Sequential(replaced), Group())[0] is replaced  # type: ignore[index]


def test_a_frozen_models_batch_norms_keep_their_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    use_batch_statistics(model, Group(), "a.key")
    norm = model[0]
    assert isinstance(norm, GlobalBatchNorm2d)
    assert norm.momentum == 0


def test_the_statistics_of_ranks_are_those_of_all_their_values_also_where_one_has_none() -> None:
    values = 1e3 + torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = values.split([5, 0, 3, 1])
    mean_WC = torch.stack([part.mean(0) if len(part) else part.new_zeros(4) for part in parts])
    var_WC = torch.stack([part.var(0, correction=0) if len(part) else part.new_zeros(4) for part in parts])
    merged = merge_statistics(mean_WC, var_WC, torch.tensor([len(part) for part in parts], dtype=torch.float64))
    assert torch.allclose(merged.mean_C, values.mean(0), rtol=1e-14)
    assert torch.allclose(merged.var_C, values.var(0, correction=0), rtol=1e-12)
    assert merged.num_values == 9
    assert all(torch.isfinite(each).all() for each in merge_statistics(*(torch.zeros(2, 4) for _ in range(2)), torch.zeros(2)))


class Kernels:
    """What torch's kernels for batch norms of several ranks compute, which exist for GPUs alone."""

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert x.numel(), "it gives NaN"
        return x.mean((0, 2, 3)), torch.rsqrt(x.var((0, 2, 3), correction=0) + eps)

    @staticmethod
    def batch_norm_elemt(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        return (x - wide(mean)) * wide(invstd * weight) + wide(bias)

    @staticmethod
    def batch_norm_backward_reduce(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: bool
    ) -> tuple[Tensor, ...]:
        sum_dy, sum_dy_xmu = dy.sum((0, 2, 3)), (dy * (x - wide(mean))).sum((0, 2, 3))
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy

    @staticmethod
    def batch_norm_backward_elemt(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, sum_dy: Tensor, sum_dy_xmu: Tensor, counts: Tensor
    ) -> Tensor:
        assert counts.dtype == torch.int32
        total = counts.sum()
        centred = dy - wide(sum_dy / total) - (x - wide(mean)) * wide(invstd.square() * sum_dy_xmu / total)
        return centred * wide(invstd * weight)


def wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)


def normalized(group: Group, rows: list[int], layout: torch.memory_format) -> dict[str, Any]:
    """This rank's rows of a batch, normalized as on a GPU by `Kernels`, and their gradients."""
    images = torch.randn(sum(rows), 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local = images.split(rows)[group.rank].contiguous(memory_format=layout).requires_grad_()
    norm = GlobalBatchNorm2d(3, group).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_norm, "runs_on_kernels", lambda _: True)
        for name in ("batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt"):
            patch.setattr(torch, name, getattr(Kernels, name))
        output = norm(local)
        output.sin().sum().backward()
    assert local.grad is not None
    state = norm.state_dict()
    return {"output": output.detach(), "gradient": local.grad, "state": state, "bias": norm.bias.grad, "weight": norm.weight.grad}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("rows", [[3, 2], [4, 0]], ids=str)
def test_ranks_normalize_by_torchs_kernels_as_one_would(ranks: RankPool, rows: list[int], layout: torch.memory_format) -> None:
    found = ranks.run(2, normalized, rows, layout)
    images = torch.randn(sum(rows), 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    bias, mean, var = torch.zeros(3, dtype=torch.float64, requires_grad=True), torch.zeros(3).double(), torch.ones(3).double()
    output = functional.batch_norm(images, mean, var, weight, bias, training=True)
    output.sin().sum().backward()
    for name, expected in (("output", output.detach()), ("gradient", images.grad)):
        assert expected is not None
        assert torch.allclose(torch.cat([each[name] for each in found]), expected, rtol=1e-10, atol=1e-12)
    for name, parameter in (("weight", weight), ("bias", bias)):
        assert parameter.grad is not None
        assert torch.allclose(found[0][name] + found[1][name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert torch.allclose(found[0]["state"]["running_mean"], mean, rtol=1e-10)
    assert torch.allclose(found[1]["state"]["running_var"], var, rtol=1e-10)


def test_timms_batch_norm_with_an_activation_in_it_keeps_that() -> None:
    layers = pytest.importorskip("timm.layers")
    plain, replaced = (nn.Sequential(layers.BatchNormAct2d(2, act_layer=nn.SiLU)).double() for _ in range(2))
    convert(replaced, Group())
    assert isinstance(replaced.get_submodule("0.act"), nn.SiLU)
    images = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    for training in (True, False):
        expected, found = (model.train(training)(images.clone()) for model in (plain, replaced))
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(replaced.state_dict(), plain.state_dict())
