"""The losses of a micro-batch."""

import pytest
import torch

from trainables.engine.losses import compute_losses
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationOutputs


@pytest.mark.parametrize("shape", [(4, 1), (1,), (4, 4)])
def test_a_term_that_torch_would_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    outputs = DistillationOutputs(torch.zeros(4, 3), (), {"Own": {"apart": torch.ones(shape)}})
    with pytest.raises(
        ExperimentError, match=r"Own's apart has the shape \(.*\) for 4 images: return one loss per image, \(4,\)"
    ):
        compute_losses(outputs, torch.zeros(4, dtype=torch.int64), None, {"task": 1.0, "Own": 1.0})
