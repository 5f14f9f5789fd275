"""Rows of all ranks on every rank, and batch norm over them, against one rank that has all rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainables.distributed.batch_norm import GlobalBatchNorm2d, convert, has_local_batch_norm
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group, all_reduce_sum
from trainables.distributed.rank_pool import RankPool

SIZES = [(3, 5), (8, 0), (4, 4), (1, 7, 0), (0, 0, 8)]


def rows(group: Group, sizes: tuple[int, ...]) -> slice:
    """This rank's part of the rows; one rank has them all."""
    begin = sum(sizes[: group.rank])
    return slice(begin, begin + sizes[group.rank]) if group.world_size > 1 else slice(0, sum(sizes))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(group: Group, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A loss over all pairs of rows, and the gradient of a weight before the gathering, as DDP would average it."""
    mine = rows(group, sizes)
    weight = drawn(4, 3, seed=1).requires_grad_()
    gather = Gather(mine.stop - mine.start, group)
    every = gather(drawn(sum(sizes), 4)[mine] @ weight)
    loss = (every @ every.T).exp().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    return loss.detach(), all_reduce_sum(gradient.contiguous(), group) / group.world_size


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_loss_over_gathered_rows_and_its_gradient_are_those_of_one_rank(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    ((loss, gradient),) = ranks.run(1, compare, sizes)
    for theirs, their_gradient in ranks.run(len(sizes), compare, sizes):
        torch.testing.assert_close(theirs, loss, rtol=1e-13, atol=0)
        torch.testing.assert_close(their_gradient, gradient, rtol=1e-12, atol=1e-14)


def compare_together(group: Group, sizes: tuple[int, ...]) -> list[Tensor]:
    """What two gatherings give, and what one message gives: rows, single numbers and maps, and their gradients."""
    mine = rows(group, sizes)
    found = []
    for at_once in (False, True):
        gather = Gather(mine.stop - mine.start, group)
        own = [drawn(sum(sizes), *shape, seed=seed)[mine].requires_grad_() for seed, shape in enumerate([(4,), (), (2, 3, 3)])]
        every = gather.all_gather_many(*own) if at_once else [gather(tensor) for tensor in own]
        found += [*every, *torch.autograd.grad(sum(tensor.square().sum() for tensor in every), own)]
    return [tensor.detach() for tensor in found]


@pytest.mark.parametrize("sizes", [(3, 5), (1, 7, 0)], ids=str)
def test_one_message_carries_what_several_would(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    for found in ranks.run(len(sizes), compare_together, sizes):
        for apart, together in zip(found[:6], found[6:], strict=True):
            assert together.shape == apart.shape
            assert torch.equal(together, apart)


def gathered_labels(group: Group, sizes: tuple[int, ...]) -> list[int]:
    mine = rows(group, sizes)
    gather = Gather(mine.stop - mine.start, group)
    found: list[int] = gather(torch.arange(sum(sizes))[mine]).tolist()
    return found


def test_whole_numbers_are_gathered_in_the_order_of_ranks(ranks: RankPool) -> None:
    assert ranks.run(3, gathered_labels, (1, 7, 0)) == [list(range(8))] * 3


def normalize(group: Group, sizes: tuple[int, ...]) -> list[Tensor]:
    """Output rows, running statistics, and the gradients of scale, shift and a weight before, as DDP would average them."""
    mine = rows(group, sizes)
    norm = GlobalBatchNorm2d(3, group).double()
    weight = drawn(3, 2, seed=1).requires_grad_()
    maps = torch.einsum("bchw,dc->bdhw", drawn(sum(sizes), 2, 4, 5)[mine], weight)
    out = norm(maps)
    target = drawn(sum(sizes), 3, 4, 5, seed=2)[mine]
    loss = group.world_size * (out * target).pow(2).sum() / sum(sizes)
    gradients = torch.autograd.grad(loss, [weight, norm.weight, norm.bias])
    averaged = [all_reduce_sum(gradient.contiguous(), group) / group.world_size for gradient in gradients]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return [out.detach(), norm.running_mean, norm.running_var, *averaged]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_batch_norm_over_all_rows_and_its_gradients_are_those_of_one_rank(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    ((out, *rest),) = ranks.run(1, normalize, sizes)
    theirs = ranks.run(len(sizes), normalize, sizes)
    torch.testing.assert_close(torch.cat([answer[0] for answer in theirs]), out, rtol=1e-11, atol=1e-12)
    for answer in theirs:
        for one, several in zip(rest, answer[1:], strict=True):
            torch.testing.assert_close(several, one, rtol=1e-11, atol=1e-12)


class NothingWaits(TorchDispatchMode):
    """Refuses what makes the host wait for a device: a tensor's value, or a shape that depends on one."""

    waiting = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique", "_unique2", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(args[1:])
        )
        assert name not in self.waiting, name
        assert not masks, name
        return func(*args, **(kwargs or {}))


def normalize_without_waiting(group: Group) -> bool:
    norm, maps = GlobalBatchNorm2d(3, group), torch.ones(4, 3, 5, 5).requires_grad_()
    with NothingWaits():
        norm(maps).square().sum().backward()
    return maps.grad is not None


def test_no_layer_waits_for_the_device_in_its_forward_or_backward_pass(ranks: RankPool) -> None:
    assert ranks.run(2, normalize_without_waiting) == [True, True]
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingWaits():
        torch.ones(1).item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_layer_waits_on_a_gpu() -> None:
    norm, maps = GlobalBatchNorm2d(3, Group()).cuda(), torch.ones(4, 3, 5, 5, device="cuda").requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm(maps).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_one_rank_it_is_torchs_batch_norm() -> None:
    ours, torchs = GlobalBatchNorm2d(3, Group()).double(), nn.BatchNorm2d(3).double()
    for _ in range(2):
        maps = drawn(4, 3, 2, 5)
        torch.testing.assert_close(ours(maps), torchs(maps), rtol=1e-12, atol=1e-13)
    for name, tensor in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(ours.eval()(maps), torchs.eval()(maps), rtol=1e-13, atol=0)


def test_one_value_a_channel_becomes_the_shift_and_nothing_becomes_nothing() -> None:
    norm = GlobalBatchNorm2d(3, Group()).double()
    assert torch.equal(norm(drawn(1, 3, 1, 1)), torch.zeros(1, 3, 1, 1, dtype=torch.float64))
    assert not torch.isnan(norm.running_var).any()  # type: ignore[arg-type]


def test_a_converted_model_has_the_same_names_and_values_and_takes_no_images_at_all() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert has_local_batch_norm(model)
    convert(model, Group())
    assert not has_local_batch_norm(model)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
