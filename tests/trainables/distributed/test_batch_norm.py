"""Which batch norms can be replaced by those over all ranks. What these compute is tested in `test_gather`."""

import pytest
from torch import nn

from trainables.distributed.batch_norm import GlobalBatchNorm2d, convert, use_batch_statistics
from trainables.distributed.group import Group
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
    with pytest.raises(ModelError, match=f"a batch norm of its own kind, {type(norm).__name__}: set a.key to off"):
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
