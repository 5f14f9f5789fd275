"""A student that predicts with a teacher's classifier: as a model, and as what SimKD trains, keeps and hands on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainables.jobs import config, equal, train, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.batch_norm import convert
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.errors import ModelError
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.models.forward import seeded
from trainables.models.libraries.interface import DeclaredTaps
from trainables.models.registry import build_model
from trainables.models.reused_classifier import ReusedClassifier
from trainables.models.tap_names import classifier
from trainables.models.weights import load_teacher
from trainables.rundir import StageDir

JOINED = "convnet_small+convnet_large"


def built(name: str = JOINED, image_size: int = 8) -> ReusedClassifier:
    model = build_model(name, num_classes=10, image_size=image_size, seed=0)
    assert isinstance(model, ReusedClassifier)
    return model


def test_it_answers_with_the_teachers_classifier_on_the_mean_of_its_projected_map() -> None:
    model, teacher = built().eval(), build_model("convnet_large", num_classes=10, image_size=8, seed=5)
    model.reuse(teacher, 8)
    student = build_model("convnet_small", num_classes=10, image_size=8, seed=0).eval()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        projected = model.projector(student.features(images))  # type: ignore[operator]
        assert projected.shape == (4, 128, 2, 2)
        torch.testing.assert_close(model(images), classifier(teacher)(projected.mean((2, 3))))
    assert classifier(model) is model.classifier


def test_a_larger_map_than_the_teachers_is_averaged_to_its_size() -> None:
    """The teacher halves an image of 32 pixels five times, the student twice."""
    model = built("convnet_small+resnet18", 32).eval()
    inputs: list[torch.Tensor] = []
    model.projector.register_forward_hook(lambda module, args, out: inputs.append(out))
    model(torch.randn(2, 3, 32, 32))
    assert inputs[0].shape == (2, 512, 1, 1)


@pytest.mark.parametrize(
    ("name", "image_size"), [(JOINED, 8), ("mobilenet_v3_small+resnet18", 32), (f"convnet_small+{JOINED}", 8)]
)
def test_whatever_is_trained_has_a_gradient_and_the_classifier_has_none(name: str, image_size: int) -> None:
    model = built(name, image_size)
    model(torch.randn(2, 3, image_size, image_size)).sum().backward()
    assert all(parameter.requires_grad is (parameter.grad is not None) for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.classifier.parameters())
    assert all(parameter.requires_grad for parameter in model.projector.parameters())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mlp_small+convnet_large", "mlp_small has no stage-1"),
        ("convnet_small+mlp_large", "mlp_large has no unpooled: its classifier does not read the mean of a map"),
        ("convnet_small+convnet_larg", "did you mean convnet_large?"),
        ("convnet_small+", "there is no model ''"),
    ],
)
def test_models_that_cannot_be_joined_are_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        built(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


class Normed(nn.Module):
    """Classifies its normalized pooled map."""

    declared_taps = DeclaredTaps("body", map="body")

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(3, 128, 1), nn.LayerNorm(128), nn.Linear(128, 10)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        logits_BK: torch.Tensor = self.head(self.norm(self.body(images_BCHW).mean((2, 3))))
        return logits_BK


def test_a_teacher_that_classifies_something_else_than_the_mean_of_its_map_is_refused() -> None:
    with pytest.raises(ModelError, match="does not classify the mean of its last map"):
        built().reuse(Normed(), 8)


class EndsWithNorm(nn.Module):
    """A student whose last map is what a batch norm gives."""

    declared_taps = DeclaredTaps("stage1.0", map="stage1.1")

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        logits_BK: torch.Tensor = self.head(self.stage1[1](self.stage1[0](images_BCHW)).mean((2, 3)))
        return logits_BK


def logits_of_a_part(group: Group) -> torch.Tensor:
    """What a rank's images get of a student whose batch norms look at all ranks'."""
    with seeded("a student"):
        teacher = build_model("convnet_large", num_classes=10, image_size=8, seed=5)
        model = ReusedClassifier(EndsWithNorm(), teacher, name="student+convnet_large", image_size=8)
        images_BCHW = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    part_BCHW = images_BCHW.tensor_split(group.world_size)[group.rank]
    logits_BK: torch.Tensor = convert(model, group).double()(part_BCHW).detach()
    return logits_BK


def test_it_reads_its_last_map_where_batch_norms_were_replaced_by_those_of_all_workers(ranks: RankPool) -> None:
    trunk = EndsWithNorm()
    ReusedClassifier(trunk, build_model("convnet_large", num_classes=10, image_size=8, seed=5), name="a+b", image_size=8)
    assert trunk.stage1[1]._forward_hooks  # the case that is meant
    (whole,) = ranks.run(1, logits_of_a_part)
    torch.testing.assert_close(torch.cat(ranks.run(2, logits_of_a_part)), whole, rtol=1e-9, atol=1e-12)


def simkd(output_dir: Path, weights: str, **sections: Any) -> TrainConfig:
    about: dict[str, Any] = {
        "model": "convnet_small",
        "precision": "fp32",
        "teacher": {"model": "convnet_large", "weights": weights},
        "distill": {"method": "simkd", "task_weight": None, "options": {}},
        "optim": {"epochs": 1, "lr": 0.05},
    }
    return config(output_dir, **about | sections)


@pytest.mark.parametrize("world_size", [1, 2])
def test_simkd_trains_it_and_keeps_a_checkpoint_that_is_the_whole_model(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_large")
    results = ranks.run(world_size, train, simkd(tmp_path / "run", weights))
    state, teacher = results[0]["state"], build_model("convnet_large", num_classes=10, image_size=8, seed=11)
    assert torch.equal(state["classifier.weight"], classifier(teacher).weight)
    before = build_model(JOINED, num_classes=10, image_size=8, seed=3).state_dict()
    for part in ("trunk.features.0.weight", "projector.0.weight", "projector.7.bias"):
        assert not torch.equal(state[part], before[part])
    best = StageDir(tmp_path / "run").best
    header = read_checkpoint_header(best)
    assert header is not None
    assert header.model == JOINED
    loaded = load_teacher(JOINED, str(best), image_size=8, classes=header.classes, seed=7)
    assert equal(loaded.state_dict(), state)
    assert not any("head" in name for name in state)
    (epoch,) = [metrics for kind, _, metrics in results[0]["calls"] if kind == "epoch"]
    assert epoch["epoch/train/loss"] == pytest.approx(epoch["epoch/train/simkd/feature"])


def test_a_student_of_simkd_goes_on_where_it_was_and_may_teach(ranks: RankPool, tmp_path: Path) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_large")
    two = {"optim": {"epochs": 2, "lr": 0.05}}
    whole = ranks.run(1, train, simkd(tmp_path / "whole", weights, **two))[0]
    first = ranks.run(1, train, simkd(tmp_path / "parts", weights, **two), 10)[0]
    assert first["died"]
    rest = ranks.run(1, train, simkd(tmp_path / "parts", weights, **two))[0]
    assert equal(whole["state"], rest["state"])
    best = str(StageDir(tmp_path / "whole").best)
    taught = simkd(tmp_path / "next", best, teacher={"model": JOINED, "weights": best})
    assert any(name.startswith("projector") for name in ranks.run(1, train, taught)[0]["state"])
