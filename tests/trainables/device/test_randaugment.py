"""RandAugment of a batch, each image with its own operation, against torchvision's RandAugment on one image after the other."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment as TorchvisionRandAugment

from tests.trainables.device.pictures import levels_apart, pictures
from trainables.config import RandAugmentConfig
from trainables.device.randaugment import OPERATIONS, RandAugment
from trainables.device.random_numbers import Draws

CPU = torch.device("cpu")
THEIRS = TorchvisionRandAugment()
KINDS = torch.arange(2 * len(OPERATIONS))


def torchvisions(image: Tensor, kind: int, magnitude: int) -> Tensor:
    """The operation and sign of `kind` by torchvision, on one uint8 image."""
    own = "".join(part.capitalize() for part in OPERATIONS[kind // 2].split("_")).replace("Autocontrast", "AutoContrast")
    of_size, has_sign = TorchvisionRandAugment._AUGMENTATION_SPACE[own]
    amounts = of_size(31, image.shape[1], image.shape[2])
    amount = 0.0 if amounts is None else float(amounts[magnitude]) * (-1 if has_sign and kind % 2 else 1)
    return THEIRS._apply_image_or_video_transform(image, own, amount, InterpolationMode.NEAREST, THEIRS._fill)


def test_the_operations_are_torchvisions() -> None:
    named = [name.replace("_", "") for name in OPERATIONS]
    assert named == [name.lower() for name in TorchvisionRandAugment._AUGMENTATION_SPACE]


@pytest.mark.parametrize("size", [2, 32, 65])
@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_each_image_gets_its_own_operation_as_torchvision_does_it(size: int, magnitude: int) -> None:
    for seed in range(3):
        images = pictures(4, size, seed)
        ours = RandAugment(RandAugmentConfig(magnitude=magnitude), size, CPU)
        for image in images:
            batch = image.expand(len(KINDS), -1, -1, -1).float().contiguous()
            expected = torch.stack([torchvisions(image, kind, magnitude) for kind in KINDS.tolist()])
            apart = [levels_apart(left, theirs) for left, theirs in zip(ours.apply(batch, KINDS), expected, strict=True)]
            names = [OPERATIONS[kind // 2] for kind in KINDS.tolist()]
            # The same arithmetic: where a machine fuses a multiplication with an addition, a tie may fall to the other side.
            assert [
                (name, most)
                for name, (most, _) in zip(names, apart, strict=True)
                if most > 1 and not name.startswith(("shear", "rotate"))
            ] == []
            assert max(part for _, part in apart) < 2e-3


def test_as_many_operations_follow_each_other_as_configured() -> None:
    images = pictures(6, 16).float()
    uniforms = Draws(1, 2, torch.arange(6)).uniforms("randaugment", 6)
    three = RandAugment(RandAugmentConfig(num_ops=3), 16, CPU)
    one = RandAugment(RandAugmentConfig(num_ops=1), 16, CPU)
    assert three.num_uniforms == 6
    assert torch.equal(three(images, uniforms), one(one(one(images, uniforms[:, :2]), uniforms[:, 2:4]), uniforms[:, 4:]))


def test_operations_and_signs_are_equally_likely() -> None:
    one = RandAugment(RandAugmentConfig(num_ops=1), 1, CPU)
    batches: list[Tensor] = []
    one.apply = lambda pixels, kinds: batches.append(kinds) or pixels  # type: ignore[method-assign, func-returns-value]
    one(torch.zeros((14_000, 3, 1, 1)), Draws(0, 0, torch.arange(14_000)).uniforms("randaugment", 2))
    counts = torch.bincount(batches[0], minlength=28)
    assert len(counts) == 28
    assert int((counts - 500).abs().max()) < 90  # 4 standard deviations
