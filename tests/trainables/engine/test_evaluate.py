"""Distributed evaluation equals a plain loop for every length and world size."""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainables.data.packed import pack_here
from tests.trainables.data.photos import photo
from tests.trainables.jobs import write_teacher
from tests.waiting import wait_until
from trainables.config import DataConfig, EvaluateConfig
from trainables.data.decode import Sample
from trainables.data.interface import Source
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.data.storage.cleaner import remove_unused
from trainables.data.storage.staging import stage_set
from trainables.device.compilation import Compilation
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.evaluate import correct_counts, evaluate, evaluate_checkpoint, logits_of
from trainables.models.registry import build_model


class FirstOf(Source):
    """The first n samples of the digits' validation split."""

    def __init__(self, num_samples: int):
        self._all = open_source(DataConfig(), "val")
        self.classes, self.labels_N = self._all.classes, self._all.labels_N[:num_samples]

    def name(self, index: int) -> str:
        return self._all.name(index)

    def read(self, index: int) -> Sample:
        return self._all.read(index)


def prepare(images_BCHW: torch.Tensor) -> torch.Tensor:
    return images_BCHW.double() / 255 - 0.5


def evaluate_first(group: Group, num_samples: int) -> dict[str, float]:
    source = FirstOf(num_samples)
    data = DataConfig(global_batch_size=7)
    loader = Loader(source, data, split="val", seed=0, rank=group.rank, world_size=group.world_size, loader_workers=1)
    model = build_model("convnet_small", num_classes=10, image_size=8, seed=0).double()
    try:
        return evaluate(model, loader.epoch(0), logits_of(model, prepare, contextlib.nullcontext, Compilation()), group, group)
    finally:
        loader.close()


def plain_loop(num_samples: int) -> dict[str, float]:
    source, model = FirstOf(num_samples), build_model("convnet_small", num_classes=10, image_size=8, seed=0).double().eval()
    first = first_five = entropy = 0.0
    for index in range(num_samples):
        pixels = torch.from_numpy(np.asarray(source.read(index)).copy()).permute(2, 0, 1)[None]
        with torch.no_grad():
            logits = model(prepare(pixels))[0]
        label = int(source.labels_N[index])
        order = sorted(range(10), key=lambda k: -float(logits[k]))
        first += order[0] == label
        first_five += label in order[:5]
        entropy -= float(logits[label] - torch.logsumexp(logits, 0))
    return {"top1_pct": 100 * first / num_samples, "top5_pct": 100 * first_five / num_samples, "loss": entropy / num_samples}


@pytest.mark.parametrize("num_samples", [1, 2, 8, 23])
def test_every_sample_counts_once_for_any_world_size(ranks: RankPool, num_samples: int) -> None:
    expected = plain_loop(num_samples)
    for world_size in (1, 2, 3):
        for result in ranks.run(world_size, evaluate_first, num_samples):
            assert result["num_images"] == num_samples
            assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def diverging_buffers(group: Group) -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(192, affine=False), torch.nn.Linear(192, 10)).double()
    model[1].running_mean.fill_(float(group.rank))
    source = FirstOf(12)
    loader = Loader(
        source,
        DataConfig(global_batch_size=4),
        split="val",
        seed=0,
        rank=group.rank,
        world_size=group.world_size,
        loader_workers=0,
    )
    result = evaluate(model, loader.epoch(0), logits_of(model, prepare, contextlib.nullcontext, Compilation()), group, group)
    return {"loss": result["loss"], "mean": float(model[1].running_mean[0]), "training": model.training}


def test_all_ranks_evaluate_rank_0s_running_statistics(ranks: RankPool) -> None:
    alone, both = ranks.run(1, diverging_buffers), ranks.run(2, diverging_buffers)
    assert {result["mean"] for result in both} == {0.0}
    assert both[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-12)
    assert all(result["training"] for result in both)


def test_an_evaluation_reads_its_nodes_copy_and_gives_it_up(tmp_path: Path) -> None:
    packed, node = tmp_path / "set", tmp_path / "node"
    for split, label, number in itertools.product(("train", "val"), "01", range(3)):
        folder = tmp_path / "images" / split / label
        folder.mkdir(parents=True, exist_ok=True)
        photo(number).save(folder / f"{number}.jpg")
    pack_here(tmp_path / "images", packed)
    copy, _ = stage_set(str(packed), str(node))
    for shard in packed.glob("*.arrow"):
        shard.unlink()  # of the set; the copy is whole
    copy.close()
    config = EvaluateConfig(
        checkpoint=write_teacher(tmp_path / "model.safetensors", num_classes=2, image_size=8),
        output=str(tmp_path / "output.json"),
        data=DataConfig(path=str(packed), stage=str(node), image_size=8, global_batch_size=4, loader_workers=1),
    )
    assert evaluate_checkpoint(config, Group())["num_images"] == 6
    (folder,) = node.glob("raydistill-*/*/")
    wait_until(lambda: remove_unused(str(folder)))  # for a moment its cleaner has the lock


def test_fewer_than_five_classes_are_all_in_the_first_five() -> None:
    first, first_five = correct_counts(torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3]]), torch.tensor([1, 1]))
    assert (int(first), int(first_five)) == (1, 2)
