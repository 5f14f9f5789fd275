"""What steps add up: every image once, and the first loss that is not finite, however many steps are pending."""

import math

import pytest
import torch

from trainables.engine import step_sums
from trainables.engine.step_sums import NEVER, StepSums

NAMES = ("images", "top1", "top5", "loss", "term", "absent")
LOGITS_BK = torch.eye(8)[:4]


def add(sums: StepSums, step: int, loss: float, rows: int = 4) -> None:
    losses = {"loss": torch.full((rows,), loss), "term": torch.tensor(2.0)}
    sums.add(step, LOGITS_BK[:rows], torch.tensor([0, 1, 7, 3])[:rows], losses)


def test_images_hits_and_losses_are_added_up_over_steps_and_micro_batches() -> None:
    sums = StepSums(NAMES, torch.device("cpu"))
    add(sums, 3, 1.0)
    add(sums, 4, 2.0)
    add(sums, 4, 4.0, rows=2)
    add(sums, 9, 1.0, rows=0)
    assert sums.values_N.tolist() == [10, 8, 8 + _in_five(), 4 + 8 + 8, 2.0 * 10, 0]
    sums.clear()
    assert sums.values_N.tolist() == [0] * 6
    assert int(sums.bad_step) == NEVER


def _in_five() -> int:
    """Of the two labels 7, whose logits are as large as others: those among the five that topk names."""
    return 2 * int((LOGITS_BK[2].topk(5).indices == 7).sum())


@pytest.mark.parametrize("pending", [2, 3, 256])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_step_whose_loss_is_not_finite_is_found_and_stays(
    monkeypatch: pytest.MonkeyPatch, pending: int, bad: float
) -> None:
    monkeypatch.setattr(step_sums, "_MAX_PENDING", pending)
    sums = StepSums(NAMES, torch.device("cpu"))
    for step, loss in enumerate([1.0, 1.0, 1.0, 1.0, bad, 1.0, bad, 1.0], start=10):
        add(sums, step, loss)
        add(sums, step, 1.0)  # a second micro-batch of the same step
        if step == 16:
            sums.clear()
    assert int(sums.bad_step) == 14
    assert sums.values_N[0] == 8


def test_a_step_beyond_what_may_be_pending_adds_up_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sums, "_MAX_PENDING", 2)
    sums = StepSums(NAMES, torch.device("cpu"))
    for step in range(5):
        add(sums, step, 1.0)
    assert sums.values_N[0] == 20
    assert sums.values_N[3] == 20
