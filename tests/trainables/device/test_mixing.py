"""MixUp and CutMix: who is mixed with whom, by how much, and what the loss makes of it."""

import math

import pytest
import torch
from scipy import stats

from tests.trainables.device.pictures import pictures
from tests.trainables.methods.calls import make, terms
from trainables.device.device_batches import DeviceBatch
from trainables.device.mixing import Mix, Mixing, cut_boxes, own_area, partners, symmetric_beta
from trainables.device.random_numbers import Draws
from trainables.engine.losses import compute_losses
from trainables.engine.passes import micro_batches
from trainables.methods.distillation_module import DistillationOutputs

COUNT = 64
IMAGES, LABELS = pictures(COUNT, 12).double(), torch.arange(COUNT)
UNIFORMS = Draws(3, 1, torch.arange(COUNT)).uniforms("mixing", Mixing.num_uniforms)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 2.0, 8.0])
def test_shares_are_of_the_beta_distribution(alpha: float) -> None:
    shares = symmetric_beta(alpha, Draws(0, 0, torch.arange(20_000)).uniforms("mixing", 2))
    assert stats.kstest(shares.numpy(), stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_extreme_shares_are_numbers() -> None:
    edges = torch.tensor([[0.0, 0.0], [1 - 2**-53, 0.0], [0.0, 0.25], [1 - 2**-53, 0.25], [0.5, 0.5]], dtype=torch.float64)
    for alpha in (1e-3, 1.0, 1e3):
        shares = symmetric_beta(alpha, edges)
        assert bool(((shares >= 0) & (shares <= 1)).all())


def test_partners_are_pairs_and_an_odd_one_out_is_its_own() -> None:
    assert partners(6, torch.device("cpu")).tolist() == [1, 0, 3, 2, 5, 4]
    assert partners(5, torch.device("cpu")).tolist() == [1, 0, 3, 2, 4]
    assert partners(1, torch.device("cpu")).tolist() == [0]


def test_mixup_shares_every_pixel_with_the_partner() -> None:
    mixed, mix = Mixing(0.4, 0.0)(IMAGES, LABELS, UNIFORMS, LABELS)
    assert mix.labels_B.tolist() == (LABELS ^ 1).tolist()
    assert 0 < float(mix.share_B.min()) < float(mix.share_B.max()) < 1
    for row, share in enumerate(mix.share_B.tolist()):
        expected = IMAGES[row ^ 1] * (1 - share) + IMAGES[row] * share
        assert torch.allclose(mixed[row], expected, rtol=1e-12, atol=1e-9)


def torchvisions_box(share: float, x_at: float, y_at: float, size: int) -> tuple[int, int, int, int]:
    """(top, left, bottom, right) by torchvision's CutMix.make_params."""
    x, y, half = int(x_at * size), int(y_at * size), int(0.5 * math.sqrt(1 - share) * size)
    return max(y - half, 0), max(x - half, 0), min(y + half, size), min(x + half, size)


def test_cutmix_pastes_a_part_of_the_partner_and_shares_by_area() -> None:
    mixed, mix = Mixing(0.0, 1.0)(IMAGES, LABELS, UNIFORMS, LABELS)
    shares = symmetric_beta(1.0, UNIFORMS[:, 1:3])
    assert torch.equal(own_area(cut_boxes(shares, UNIFORMS[:, 3:], 12, 12), 12, 12), mix.share_B)
    for row in range(COUNT):
        y_at, x_at = UNIFORMS[row, 3:].tolist()
        top, left, bottom, right = torchvisions_box(float(shares[row]), x_at, y_at, 12)
        expected = IMAGES[row].clone()
        expected[:, top:bottom, left:right] = IMAGES[row ^ 1][:, top:bottom, left:right]
        assert torch.equal(mixed[row], expected)
        assert float(mix.share_B[row]) == pytest.approx(1 - (bottom - top) * (right - left) / 144)


def test_with_both_each_image_is_as_one_of_them_alone_would_make_it() -> None:
    (both, mix), (up, up_mix), (cut, cut_mix) = (
        Mixing(*alphas)(IMAGES, LABELS, UNIFORMS, LABELS) for alphas in ((0.4, 1.0), (0.4, 0.0), (0.0, 1.0))
    )
    is_up = [torch.equal(both[row], up[row]) and bool(mix.share_B[row] == up_mix.share_B[row]) for row in range(COUNT)]
    is_cut = [torch.equal(both[row], cut[row]) and bool(mix.share_B[row] == cut_mix.share_B[row]) for row in range(COUNT)]
    assert all(a or b for a, b in zip(is_up, is_cut, strict=True))
    assert 16 < sum(is_up) < 48


def test_the_cross_entropy_of_a_mixed_image_is_that_of_its_soft_label() -> None:
    student, aux, teacher = torch.randn((3, 4, 5), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3])
    mix = Mix(torch.tensor([1, 0, 2, 4]), torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64), torch.arange(4))
    soft = torch.zeros((4, 5), dtype=torch.float64)
    for row in range(4):
        soft[row, labels[row]] += mix.share_B[row]
        soft[row, mix.labels_B[row]] += 1 - mix.share_B[row]
    kd = terms(make("kd"), student, teacher, labels)
    ours = compute_losses(DistillationOutputs(student, ((0.3, aux),), {"kd": kd}), labels, mix, {"task": 1.0, "kd": 0.9}).named
    task = sum(w * torch.nn.functional.cross_entropy(x, soft, reduction="none") for w, x in ((1.0, student), (0.3, aux)))
    assert torch.allclose(ours["task_loss"], task, rtol=1e-12)
    assert torch.equal(ours["kd/kl"], kd["kl"])


def test_micro_batches_keep_an_images_two_labels_and_share_together() -> None:
    mixed = DeviceBatch(IMAGES, LABELS, LABELS + 100, LABELS + 100, epoch=0, mix=Mix(LABELS ^ 1, LABELS / COUNT, LABELS ^ 1))
    parts = micro_batches(mixed, 3)
    assert [len(part.labels_B) for part in parts] == [22, 21, 21]
    for part in parts:
        assert torch.equal(part.indices_B, part.labels_B + 100)
        assert part.mix is not None
        assert torch.equal(part.mix.labels_B, part.labels_B ^ 1)
        assert torch.equal(part.mix.share_B, part.labels_B / COUNT)
        assert torch.equal(part.images_BCHW, IMAGES[part.labels_B])
