"""A teacher whose parameters are divided among workers computes and teaches what a whole one does, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchvision.models import VisionTransformer, resnet18

from tests.trainables.jobs import config, equal, train, write_teacher
from trainables.config import TrainConfig
from trainables.device.memory import parameter_bytes
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.dry_run import check_fit
from trainables.engine.teacher_placement import is_sharded
from trainables.errors import ExperimentError
from trainables.methods.tap_reader import TapReader
from trainables.models.registry import construct
from trainables.teachers.network import TeacherNetwork
from trainables.teachers.sharded import LARGEST, block_paths, shard

SIZE = 16


class Tied(nn.Sequential):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * SIZE**2, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self[4].weight = self[2].weight


def vit() -> nn.Module:
    return VisionTransformer(SIZE, 4, num_layers=8, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5)


NETWORKS = {
    "resnet8": lambda: construct("resnet8", num_classes=5, image_size=SIZE, seed=0),
    "vit": vit,
    "tied": Tied,
}
TAPS = {"resnet8": ("layer1", "layer2", "pooled"), "vit": ("encoder.layers.encoder_layer_3",), "tied": ("2",)}


def outputs(group: Group, name: str, dtype: torch.dtype, sharded: bool) -> tuple[list[Tensor], float]:
    """Logits and taps for two batches of this rank's, and the part of the parameters that it has between them."""
    torch.manual_seed(0)
    network = NETWORKS[name]().eval().requires_grad_(False).to(dtype)
    whole_bytes = parameter_bytes(network)
    teacher = TeacherNetwork([network], [TapReader(network, {"kd": TAPS[name]}, name=name, image_size=SIZE)])
    if sharded:
        shard(network, group, SIZE)
    generator, found = torch.Generator().manual_seed(group.rank), []
    for _ in range(2):
        of_kd = teacher(torch.randn(3, 3, SIZE, SIZE, generator=generator).to(dtype), 3)["kd"]
        found += [of_kd.logits_BK, *of_kd.features]
    local_bytes = sum(each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in network.parameters())
    return found, local_bytes / whole_bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_and_taps_have_the_bits_of_the_whole_network(ranks: RankPool, name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        whole = [ranks.run(2, outputs, name, dtype, False), ranks.run(2, outputs, name, dtype, True)]
        for (expected, _), (found, part) in zip(*whole, strict=True):
            assert all(map(torch.equal, expected, found))
            assert part < 0.55, "of the parameters once a forward pass has run"


def test_no_block_but_one_that_cannot_be_taken_apart_is_large() -> None:
    network = resnet18(num_classes=10)
    paths = block_paths(network, 64)
    assert paths[0] == ""
    blocks = {path: network.get_submodule(path) for path in paths[1:]}
    whole_bytes = parameter_bytes(network)
    assert all(isinstance(block, nn.Conv2d) or parameter_bytes(block) <= LARGEST * whole_bytes for block in blocks.values())
    inside = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    left = sum(parameter.nbytes for parameter in network.parameters() if id(parameter) not in inside)
    assert left < 0.02 * whole_bytes


def job(folder: Path, placement: str, **sections: Any) -> TrainConfig:
    """On ranks of which one has no sample of the last batch, or fewer parts of it than another."""
    weights = folder.parent / "teacher.safetensors"
    if not weights.exists():
        write_teacher(weights, "resnet8", image_size=SIZE)
    settings: dict[str, Any] = {
        "teacher": {"model": "resnet8", "weights": str(weights), "placement": placement},
        "data": {"path": "synthetic", "synthetic_images": 65, "image_size": SIZE, "global_batch_size": 32},
        "scale": {"num_workers": 2},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section
    return config(folder, **settings)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"optim": {"accumulate": 3}}, id="accumulate"),
        pytest.param({"model": "resnet8", "distill": {"method": ["fitnet"], "options": {}}}, id="features"),
    ],
)
def test_a_job_with_a_sharded_teacher_trains_the_bits_of_one_with_a_whole_one(
    ranks: RankPool, tmp_path: Path, sections: dict[str, Any]
) -> None:
    whole, sharded = (ranks.run(2, train, job(tmp_path / each, each, **sections)) for each in ("whole", "sharded"))
    for expected, found in zip(whole, sharded, strict=True):
        assert equal(expected["state"], found["state"])


def is_sharded_on(memory_bytes: float, monkeypatch: pytest.MonkeyPatch, folder: Path, **sections: Any) -> bool:
    monkeypatch.setattr("trainables.engine.teacher_placement.memory_bytes", lambda device: memory_bytes)
    settings = job(folder, "auto", **sections)
    return is_sharded(
        settings,
        2,
        torch.device("cpu"),
        nn.Linear(1, 1, bias=False),
        [nn.Linear(10, 10, bias=False), nn.Linear(15, 10, bias=False)],
    )


def test_by_default_a_teacher_is_sharded_where_it_fills_more_than_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed_bytes = 4 * (250 + 3 * 1)  # SGD: a parameter, its gradient, its momentum
    assert not is_sharded_on(2 * needed_bytes, monkeypatch, tmp_path / "fits")
    assert is_sharded_on(2 * needed_bytes - 1, monkeypatch, tmp_path / "larger")
    assert is_sharded_on(2 * needed_bytes, monkeypatch, tmp_path / "adamw", optim={"name": "adamw", "nesterov": False})
    assert not is_sharded_on(1, monkeypatch, tmp_path / "compiled", train={"compile": True})
    assert not is_sharded_on(1, monkeypatch, tmp_path / "srrl", model="resnet8", distill={"method": ["srrl"], "options": {}})
    assert not is_sharded(job(tmp_path / "one", "sharded"), 1, torch.device("cpu"), nn.Identity(), [nn.Identity()])


def test_a_method_that_reads_the_teachers_parameters_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ExperimentError, match=r"^distill.method: srrl reads the teacher's parameters.* teacher.placement sharded"
    ):
        check_fit(job(tmp_path / "srrl", "sharded", model="resnet8", distill={"method": ["srrl"], "options": {}}), 10)
