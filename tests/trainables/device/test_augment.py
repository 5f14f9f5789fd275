"""The whole way from bytes to the models' input, and that it depends on nothing but (seed, epoch, sample)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from service.config.experiment import load
from tests.trainables.device.pictures import pictures
from tests.trainables.jobs import config, equal, relative_difference, train, write_teacher
from trainables.config import DataConfig, DeviceAugmentConfig
from trainables.data.order import REPEAT
from trainables.device.augment import TrainInputs
from trainables.device.device_batches import DeviceBatch
from trainables.device.tensor_format import to_pixels
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ExperimentError

ALL: dict[str, Any] = {
    "policy": {"name": "randaugment", "num_ops": 2, "magnitude": 9},
    "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "probability": 0.8},
    "grayscale": 0.5,
    "random_erasing": 0.25,
    "mixup": 0.2,
    "cutmix": 1.0,
}
IMAGES = pictures(8, 16)


def inputs(rows: list[int], epoch: int = 0, seed: int = 0, **sections: Any) -> DeviceBatch:
    """What the models see of these rows of IMAGES, as one batch; their labels and dataset-wide indices are the rows."""
    device, data = torch.device("cpu"), DataConfig.model_validate({"image_size": 16, "device_augment": sections})
    prepare = TrainInputs(data, partial(to_pixels, dtype=torch.float64), seed=seed, device=device)
    rows_B = torch.tensor(rows, dtype=torch.int64)
    return prepare(DeviceBatch(IMAGES[rows_B], rows_B, rows_B, rows_B, epoch, len(rows)))


def test_without_augmentation_the_pixels_are_the_images() -> None:
    inputs_3 = inputs([3, 1])
    assert torch.equal(inputs_3.images_BCHW, IMAGES[[3, 1]].double() / 255)
    assert inputs_3.labels_B.tolist() == [3, 1]
    assert inputs_3.mix is None


def test_what_a_pair_becomes_does_not_depend_on_the_rest_of_the_batch() -> None:
    whole, pair = inputs(list(range(8)), **ALL), inputs([4, 5], **ALL)
    assert whole.mix is not None
    assert pair.mix is not None
    assert torch.equal(whole.images_BCHW[4:6], pair.images_BCHW)
    assert torch.equal(whole.mix.labels_B[4:6], pair.mix.labels_B)
    assert torch.equal(whole.mix.share_B[4:6], pair.mix.share_B)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("mixup", "cutmix")])
def test_what_an_image_becomes_does_not_depend_on_its_batch(name: str) -> None:
    whole = inputs(list(range(8)), **{name: ALL[name]})
    assert all(torch.equal(whole.images_BCHW[row], inputs([row], **{name: ALL[name]}).images_BCHW[0]) for row in range(8))


@pytest.mark.parametrize("name", ALL)
def test_every_epoch_and_seed_shows_another_picture(name: str) -> None:
    section = {name: 1.0 if name == "random_erasing" else ALL[name]}
    first = inputs(list(range(8)), **section).images_BCHW
    assert torch.equal(first, inputs(list(range(8)), **section).images_BCHW)
    assert not torch.equal(first, inputs(list(range(8)), epoch=1, **section).images_BCHW)
    assert not torch.equal(first, inputs(list(range(8)), seed=1, **section).images_BCHW)


@pytest.mark.parametrize("name", ALL)
def test_each_repeat_of_an_image_is_another_picture_and_the_first_is_that_without_repeats(name: str) -> None:
    section = {name: 1.0 if name == "random_erasing" else ALL[name]}
    prepare = TrainInputs(
        DataConfig.model_validate({"image_size": 16, "device_augment": section}),
        partial(to_pixels, dtype=torch.float64),
        seed=0,
        device=torch.device("cpu"),
    )
    rows_B = torch.arange(8)
    pictures = [prepare(DeviceBatch(IMAGES, rows_B, rows_B + REPEAT * repeat, rows_B, 0)).images_BCHW for repeat in range(3)]
    assert torch.equal(pictures[0], inputs(list(range(8)), **section).images_BCHW)
    assert not any(torch.equal(pictures[first], pictures[second]) for first, second in ((0, 1), (0, 2), (1, 2)))


def test_switching_one_augmentation_on_leaves_what_the_others_draw() -> None:
    mean_C11 = torch.tensor(DataConfig().mean, dtype=torch.float64)[:, None, None]

    def erased_by(**others: Any) -> Tensor:
        return (inputs(list(range(8)), random_erasing=1.0, **others).images_BCHW - mean_C11).abs() < 1e-6

    erased, both = erased_by(), erased_by(policy={"name": "trivialaugment"}, color_jitter={"hue": 0.5})
    assert bool(erased.any(dim=(1, 2, 3)).all())
    assert bool((both | ~erased).all())


def test_a_mixed_input_is_the_mixture_of_the_images() -> None:
    plain, mixed = inputs(list(range(8))).images_BCHW, inputs(list(range(8)), mixup=0.4)
    assert mixed.mix is not None
    share = mixed.mix.share_B[:, None, None, None]
    assert torch.allclose(mixed.images_BCHW, share * plain + (1 - share) * plain[mixed.mix.labels_B], atol=1e-5)


def test_a_rank_without_samples_augments_nothing() -> None:
    assert inputs([], **ALL).images_BCHW.shape == (0, 3, 16, 16)


@pytest.mark.parametrize(("workers", "accumulate"), [(2, 1), (3, 3)])
def test_augmented_training_is_the_same_on_2_and_3_workers(
    ranks: RankPool, tmp_path: Path, workers: int, accumulate: int
) -> None:
    teacher = {"weights": write_teacher(tmp_path / "teacher.safetensors")}
    data = {"last_batch": "drop", "global_batch_size": 120, "device_augment": ALL, "repeats": accumulate}
    settings = {"data": data, "teacher": teacher, "optim": {"epochs": 2, "accumulate": accumulate}}
    one, several = (ranks.run(n, train, config(tmp_path / str(n), **settings))[0]["state"] for n in (1, workers))
    assert relative_difference(one, several) < 1e-9


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_augmented_run_that_died_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path, repeats: int) -> None:
    settings = {
        "teacher": None,
        "data": {"last_batch": "drop", "device_augment": ALL, "repeats": repeats},
        "train": {"checkpoint_every": 3},
        "optim": {"epochs": 2},
    }
    whole = ranks.run(1, train, config(tmp_path / "whole", **settings))[0]
    pieces = ranks.run(1, train, config(tmp_path / "pieces", **settings), 3)[0]
    assert pieces["died"]
    pieces = ranks.run(1, train, config(tmp_path / "pieces", **settings))[0]
    assert equal(whole["state"], pieces["state"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.device_augment.mixpu=0.2"], "data.device_augment.mixpu: no such key; did you mean data.device_augment.mixup?"),
        (["data.device_augment.policy={name: augmix, num_op: 2}"], "did you mean data.device_augment.policy.num_ops?"),
        (["data.device_augment.policy={num_ops: 2}"], "data.device_augment.policy.name: missing: write it"),
        (["data.device_augment.policy={name: augmix, magnitude: 2}"], "magnitude is of another policy than augmix: leave it out"),
        (["data.device_augment.policy={name: randaugment_timm, magnitude: 11}"], "randaugment_timm is at most 10, not 11"),
        (["data.device_augment.randaugment.num_ops=2"], "such key; write data.device_augment.policy: {name: randaugment,"),
        (["data.device_augment.random_erasing=1.5"], "data.device_augment.random_erasing: must be at most 1, not 1.5"),
        (["data.device_augment.policy={name: randaugment, magnitude: 31}"], "magnitude: must be at most 30, not 31"),
        (["data.device_augment.color_jitter.hue=0.6"], "hue: must be at most 0.5, not 0.6"),
        (
            ["data.device_augment.mixup=0.2", "data.global_batch_size=66", "scale.num_workers=2"],
            "data.global_batch_size 66: mixup and cutmix need an even number for each worker: write 68",
        ),
        (["data.device_augment.cutmix=1", "data.last_batch=short"], "set both to 0, or write data.last_batch: drop"),
        (
            ["data.device_augment.mixup=0.2", "distill.method=dkd"],
            "distill.method: dkd needs the one class of each image, which does not go with data.device_augment.mixup",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load("digits", overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_fits_is_taken() -> None:
    sections = [f"data.device_augment.{key}={value}".replace("'", "") for key, value in ALL.items()]
    resolved = load("digits", sections)
    assert resolved.experiment.data.device_augment == DeviceAugmentConfig.model_validate(ALL)
