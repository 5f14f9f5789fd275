"""Features of a split are each image's, once, in dataset order, on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainables.data.photos import encoded, photo
from tests.trainables.engine.test_evaluate import FirstOf, prepare
from trainables.config import DataConfig
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.device.device_batches import DeviceBatch
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ModelError
from trainables.probes.features import gather_features


def flat(batch: DeviceBatch) -> Tensor:
    return prepare(batch.images_BCHW).flatten(1)


def gathered(group: Group, num_samples: int, folder: str = "", *, main_only: bool = False) -> Any:
    data = DataConfig(path=folder or "digits", image_size=8, global_batch_size=7, max_bad=0.5)
    source = open_source(data, "train") if folder else FirstOf(num_samples)
    loader = Loader(source, data, split="val", seed=0, rank=group.rank, world_size=group.world_size, loader_workers=1)
    try:
        return tuple(each.numpy() for each in gather_features(flat, loader, group, main_only=main_only))
    finally:
        loader.close()


@pytest.mark.parametrize("num_samples", [1, 2, 23])
def test_every_image_is_there_once_in_dataset_order_for_any_world_size(ranks: RankPool, num_samples: int) -> None:
    source = FirstOf(num_samples)
    images = torch.from_numpy(np.stack([np.asarray(source.read(index)) for index in range(num_samples)]))
    expected = prepare(images.permute(0, 3, 1, 2)).flatten(1).numpy(), source.labels_N, np.arange(num_samples)
    for world_size in (1, 3):
        for found in ranks.run(world_size, gathered, num_samples):
            for array, values in zip(found, expected, strict=True):
                assert array.dtype == values.dtype
                assert np.array_equal(array, values)


def test_images_that_cannot_be_read_are_left_out(ranks: RankPool, tmp_path: Path) -> None:
    for number in range(20):
        (folder := tmp_path / "train" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        content = encoded(photo(number, 8, 8), "PNG")
        (folder / f"{number:02}.png").write_bytes(b"no image" if number in (3, 4) else content)
        (valid := tmp_path / "val" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        (valid / f"{number:02}.png").write_bytes(content)
    (alone,) = ranks.run(1, gathered, 0, str(tmp_path))
    assert alone[2].tolist() == [index for index in range(20) if index not in (2, 11)]
    assert alone[0].shape == (18, 192)
    assert alone[1].tolist() == [0] * 9 + [1] * 9
    for found in ranks.run(3, gathered, 0, str(tmp_path)):
        assert all(np.array_equal(array, values) for array, values in zip(found, alone, strict=True))


def test_rank_0_alone_has_them_where_that_is_enough(ranks: RankPool) -> None:
    first, second = ranks.run(2, main_only, 23)
    assert (first, second) == (23, 0)


def main_only(group: Group, num_samples: int) -> int:
    return len(gathered(group, num_samples, main_only=True)[1])


def test_features_that_are_no_numbers_are_refused_by_the_image() -> None:
    def embed(batch: DeviceBatch) -> Tensor:
        return torch.where(batch.indices_B[:, None] == 9, torch.nan, flat(batch))

    loader = Loader(FirstOf(12), DataConfig(global_batch_size=7), split="val", seed=0, rank=0, world_size=1, loader_workers=0)
    with pytest.raises(
        ModelError, match=r"the features of digits/val/9 are not finite: the weights are damaged, or need precision"
    ):
        gather_features(embed, loader, Group())
