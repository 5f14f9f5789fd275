"""The losses of a micro-batch."""

import pytest
import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor

from trainables.device.mixing import Mix
from trainables.distributed.group import GlobalCount, Group
from trainables.engine.losses import TaskLoss, compute_losses, num_labeled
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationOutputs


@pytest.mark.parametrize("shape", [(4, 1), (1,), (4, 4)])
def test_a_term_that_torch_would_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    outputs = DistillationOutputs(torch.zeros(4, 3), (), {"Own": {"apart": torch.ones(shape)}})
    with pytest.raises(
        ExperimentError, match=r"Own's apart has the shape \(.*\) for 4 images: return one loss per image, \(4,\)"
    ):
        compute_losses(outputs, torch.zeros(4, dtype=torch.int64), None, {"task": 1.0, "Own": 1.0})


@pytest.mark.parametrize("labels", [[2, -1, 0, -1, -1, 1], [-1] * 6, [0, 1, 2, 0, 1, 2]])
def test_the_cross_entropy_is_the_mean_over_images_with_a_label_in_whatever_micro_batches(labels: list[int]) -> None:
    logits_BK = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels_B = torch.tensor(labels)
    count = GlobalCount(6, Group(), accumulate=2, num_labeled=num_labeled(labels_B, None))
    scale, found, reported = count.task_scale, [], []
    for rows in (slice(0, 4), slice(4, 6)):
        terms = {"kd": {"kl": logits_BK[rows].square().sum(1)}}
        losses = compute_losses(
            DistillationOutputs(logits_BK[rows], (), terms), labels_B[rows], None, {"task": 0.5, "kd": 2.0}
        ).with_task_scale(1.0 if scale is None else scale)
        found.append(losses.total(count.weight()))
        reported.append({name: value.sum() / 6 for name, value in losses.named.items()})
    task = F.cross_entropy(logits_BK, labels_B, ignore_index=-1) if max(labels) >= 0 else logits_BK.new_zeros(())
    expected = 0.5 * task + 2 * logits_BK.square().sum(1).mean()
    torch.testing.assert_close(sum(found), expected)
    torch.testing.assert_close(sum(each["loss"] for each in reported), expected)
    torch.testing.assert_close(sum(each["task_loss"] for each in reported), task)


def test_a_mixed_image_counts_by_the_share_of_it_that_has_a_label() -> None:
    labels_B, share_B = torch.tensor([1, -1, 0, 2]), torch.tensor([0.25, 0.75, 0.5, 0.5], dtype=torch.float64)
    mix = Mix(torch.tensor([-1, 1, 2, 0]), share_B, torch.arange(4))
    assert num_labeled(labels_B, mix).item() == 0.25 + 0.25 + 1 + 1
    logits_BK = torch.zeros(4, 3, dtype=torch.float64)
    task_B = compute_losses(DistillationOutputs(logits_BK, (), {}), labels_B, mix, {"task": 1.0}).named["task_loss"]
    torch.testing.assert_close(task_B, torch.tensor([0.25, 0.25, 1, 1], dtype=torch.float64) * torch.tensor(3.0).double().log())


@pytest.mark.parametrize("labels_B", [None, torch.tensor([0, 2])])
def test_what_has_no_weight_is_0_and_has_no_gradient_although_it_is_not_finite(labels_B: Tensor | None) -> None:
    logits_BK = torch.tensor([[1.0, float("inf"), 0.0], [0.0, 1.0, 2.0]], requires_grad=True)
    aux_BK = torch.full((2, 3), float("nan"), requires_grad=True)
    term_B, dropped_B = (torch.full((2,), float("inf"), requires_grad=True) for _ in range(2))
    learned_B = torch.tensor([1.0, 2.0], requires_grad=True)
    terms = {"later": {"term": term_B}, "dropped": {"term": dropped_B}, "learned": {"term": learned_B}}
    weights = {"task": 0.0, "later": 0.0, "dropped": torch.zeros(2), "learned": 0.5}
    losses = compute_losses(DistillationOutputs(logits_BK, ((0.3, aux_BK),), terms), labels_B, None, weights)
    total = losses.total(1.0)
    total.backward()
    assert total.item() == losses.named["loss"].sum().item() == losses.named["distill_loss"].sum().item() == 1.5
    for unused in (logits_BK, aux_BK, term_B, dropped_B):
        assert unused.grad is not None, "DDP waits for it"
        assert not unused.grad.count_nonzero()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_task_loss_is_that_of_timm(smoothing: float, threshold: float | None, mixed: bool) -> None:
    logits_BK = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels_B, others_B = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([3, 1, 0, 2, 1, 4])
    share_B = torch.tensor([0.9, 0.5, 0.15, 0.3, 1.0, 0.0], dtype=torch.float64)
    mix = Mix(others_B, share_B, others_B) if mixed else None
    if not mixed:
        share_B = torch.ones(6, dtype=torch.float64)
    off = smoothing / 5
    one, other = (F.one_hot(each, 5).double() * (1 - smoothing) + off for each in (labels_B, others_B))
    targets_BK = share_B[:, None] * one + (1 - share_B[:, None]) * other
    soft_B = torch.stack([SoftTargetCrossEntropy()(x[None], y[None]) for x, y in zip(logits_BK, targets_BK, strict=True)])
    torch.testing.assert_close(TaskLoss(label_smoothing=smoothing)(logits_BK, labels_B, mix), soft_B, rtol=1e-12, atol=1e-14)
    binary = BinaryCrossEntropy(target_threshold=threshold)
    bce_B = torch.stack([binary(x[None], y[None]) for x, y in zip(logits_BK, targets_BK, strict=True)])
    found_B = TaskLoss(label_smoothing=smoothing, bce=True, bce_threshold=threshold)(logits_BK, labels_B, mix)
    torch.testing.assert_close(found_B, bce_B, rtol=1e-12, atol=1e-14)
