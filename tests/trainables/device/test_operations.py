"""The operations of a batch, each image with its own, against torchvision's and timm's on one image after the other."""

from functools import cache

import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timms
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import AugMix, AutoAugment, RandAugment, TrivialAugmentWide
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from tests.trainables.device.pictures import levels_apart, pictures
from trainables.device.operations import OPERATIONS, SPACES, Operations, amounts

CPU = torch.device("cpu")
THEIRS = {"randaugment": RandAugment, "trivialaugment": TrivialAugmentWide, "autoaugment": AutoAugment, "augmix": AugMix}
MINUS, PLUS = torch.tensor(0.0), torch.tensor(1.0)


def their_name(name: str) -> str:
    """An operation's name at torchvision."""
    return "".join(part.capitalize() for part in name.split("_")).replace("Autocontrast", "AutoContrast")


def torchvisions(policy: str, image: Tensor, name: str, at: int, minus: bool) -> Tensor:
    """An operation of a policy in one of its bins by torchvision, on one uint8 image."""
    theirs = THEIRS[policy]()
    of_size, has_sign = {"Identity": (lambda *_: None, False), **theirs._AUGMENTATION_SPACE}[their_name(name)]
    values = of_size(SPACES[policy].bins, *image.shape[1:])
    amount = 0.0 if values is None else float(values[at]) * (-1 if has_sign and minus else 1)
    return theirs._apply_image_or_video_transform(image, their_name(name), amount, InterpolationMode.NEAREST, theirs._fill)


@cache
def operations(policy: str, size: int) -> Operations:
    return Operations(SPACES[policy], size, CPU)


@pytest.mark.parametrize("size", [2, 32, 65])
@pytest.mark.parametrize("policy", THEIRS)
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_each_image_gets_its_own_operation_as_torchvision_does_it(policy: str, part: float, size: int) -> None:
    at = round(part * (SPACES[policy].bins - 1))
    known = {"Identity", *THEIRS[policy]._AUGMENTATION_SPACE}
    kinds = [(name, sign) for name in OPERATIONS if their_name(name) in known for sign in (MINUS, PLUS)]
    kinds_B = torch.stack(
        [operations(policy, size).kinds(torch.tensor(OPERATIONS.index(name)), at, sign) for name, sign in kinds]
    )
    for image in pictures(4, size):
        batch = image.expand(len(kinds), -1, -1, -1).float().contiguous()
        expected = [torchvisions(policy, image, name, at, sign is MINUS) for name, sign in kinds]
        apart = [levels_apart(*pair) for pair in zip(operations(policy, size)(batch, kinds_B), expected, strict=True)]
        # The same arithmetic: where a machine fuses a multiplication with an addition, a tie may fall to the other side.
        assert [
            (name, most)
            for (name, _), (most, _) in zip(kinds, apart, strict=True)
            if most > 1 and not name.startswith(("shear", "rotate"))
        ] == []
        assert max(part for _, part in apart) < 2e-3


@pytest.mark.parametrize("at", range(0, 101, 5))
def test_magnitudes_of_randaugment_timm_are_timms(at: int) -> None:
    ours = {name: amounts(name, SPACES["randaugment_timm"], 100)[at] for name in OPERATIONS}
    theirs = {name: timms.LEVEL_TO_ARG[name] for name in timms._RAND_INCREASING_TRANSFORMS}
    found = {name: abs(level(at / 10, {})[0]) for name, level in theirs.items() if level is not None}
    assert ours["posterize"] == found["PosterizeIncreasing"]
    assert [before >= ours["solarize"] for before in range(256)] == [
        before >= found["SolarizeIncreasing"] for before in range(256)
    ]
    assert ours["solarize_add"] == found["SolarizeAdd"]
    assert ours["rotate"] == pytest.approx(found["Rotate"])
    assert ours["shear_x"] == ours["shear_y"] == pytest.approx(found["ShearX"])
    assert ours["translate_x"] == ours["translate_y"] == pytest.approx(100 * found["TranslateXRel"])
    for name in ("brightness", "color", "contrast", "sharpness"):
        assert min(abs(1 + sign * ours[name] - found[f"{name.capitalize()}Increasing"]) for sign in (1, -1)) < 1e-6


def test_solarize_add_is_timms_and_it_has_each_of_timms_operations() -> None:
    image, ours = pictures(5, 16)[4], operations("randaugment_timm", 16)
    kind = ours.kinds(torch.tensor([OPERATIONS.index("solarize_add")]), 70, PLUS)
    theirs = timms.solarize_add(to_pil_image(image), 77)
    assert isinstance(theirs, Image.Image)
    assert torch.equal(ours(image[None].float(), kind)[0], pil_to_tensor(theirs).float())
    named = {name.replace("Increasing", "").replace("Rel", "").lower() for name in timms._RAND_INCREASING_TRANSFORMS}
    assert named == {name.replace("_", "") for name in OPERATIONS[1:]}
