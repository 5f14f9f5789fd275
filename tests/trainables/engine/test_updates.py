"""The mean gradients of all ranks, in one tensor that is a sum over ranks, are those of DDP; and what no loss reaches stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.config import OptimConfig
from trainables.distributed.group import GlobalCount, Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.loss_optimizers import build_optimizers
from trainables.engine.losses import Losses
from trainables.engine.updates import CapturableUpdate, FlatGradients, ParameterUpdate, UpdateSettings, build_update
from trainables.methods.distillation_module import DistillationModule

OPTIM = OptimConfig(name="sgd", lr=0.5, momentum=0.9, weight_decay=0.25)


def test_each_gradient_is_in_its_parameters_memory_order_and_begins_at_a_whole_vector() -> None:
    conv = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    parameters = [nn.Parameter(torch.randn(7)), conv, nn.Parameter(torch.randn(2, 6)[:, ::2]), nn.Parameter(torch.randn(()))]
    gradients = FlatGradients(parameters)
    expected = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, expected, strict=True):
        parameter.grad = gradient
    gradients.copy_from_parameters()
    assert all(parameter.grad is None for parameter in parameters)
    gradients.flat.mul_(2)
    gradients.assign_to_parameters()
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 2 * gradient)
        assert (parameter.grad.data_ptr() - gradients.flat.data_ptr()) % 64 == 0
    assert conv.grad is not None
    assert conv.grad.is_contiguous(memory_format=torch.channels_last)


def test_what_had_a_gradient_once_and_has_none_now_is_zero_in_the_sum_and_given_none() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    gradients = FlatGradients(parameters)
    for present in ((True, True), (True, False)):
        for parameter, has in zip(parameters, present, strict=True):
            parameter.grad = torch.ones_like(parameter) if has else None
        gradients.copy_from_parameters()
    gradients.assign_to_parameters()
    assert parameters[1].grad is None
    assert float(gradients.flat.sum()) == 2.0


class Net(nn.Module):
    """Two layers, of which the losses reach one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.used(inputs)
        return output


def updated(group: Group, steps: int) -> dict[str, Any]:
    """The student after steps on this rank's rows, of which the second rank has fewer."""
    student = Net()
    optimizers = build_optimizers(student, {}, OPTIM)
    settings = UpdateSettings(torch.amp.GradScaler("cpu", enabled=False), group, clip_grad_norm=1.0)
    update = build_update(DistillationModule(student), optimizers, settings, accumulate=1, capturable=True)
    assert isinstance(update, CapturableUpdate) == (group.world_size > 1)
    optimizers[0].set_learning_rate(0, steps_per_epoch=10, global_batch_size=1)
    rows = torch.arange(15.0).view(5, 3) / 10
    local_rows = rows if group.world_size == 1 else (rows[:3], rows[3:])[group.rank]
    for _ in range(steps):
        step(update, student, local_rows, group)
    return {name: tensor.detach().clone() for name, tensor in student.state_dict().items()}


def step(update: ParameterUpdate, student: nn.Module, rows: Tensor, group: Group) -> None:
    count = GlobalCount(len(rows), group, parts=1)
    losses_B = student(rows).square().sum(1)
    update.backward(Losses({"task": losses_B}, {}), count.weight())
    update.end_micro_batch(len(rows))
    update.average_gradients(count)
    update.step()


def test_two_ranks_with_unequal_rows_change_what_one_rank_with_all_rows_changes(ranks: RankPool) -> None:
    one = updated(Group(), steps=3)
    before = Net().state_dict()
    for found in ranks.run(2, updated, 3):
        for name, tensor in found.items():
            assert torch.allclose(tensor, one[name], rtol=1e-5)
        assert torch.equal(found["unused.weight"], before["unused.weight"]), "no loss reaches it: no weight decay either"
        assert not torch.equal(found["used.weight"], before["used.weight"])


@pytest.mark.parametrize("capturable", [False, True])
def test_one_rank_has_nothing_to_average(capturable: bool) -> None:
    student = Net()
    settings = UpdateSettings(torch.amp.GradScaler("cpu", enabled=False), Group())
    update = build_update(
        DistillationModule(student), build_optimizers(student, {}, OPTIM), settings, accumulate=1, capturable=capturable
    )
    assert update.allreduce_clocks is None
    assert update.noise is None
