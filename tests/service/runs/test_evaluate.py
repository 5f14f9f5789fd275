"""What an evaluation takes from its checkpoint and reserves, and what it ends with where its workers fail."""

from pathlib import Path

import pytest
import torch

from service.cluster.resources import Cluster, Node, Reservation
from service.runs.evaluate import evaluation_error, reserve, resolve
from tests.trainables.data.photos import encoded, photo
from trainables.config import DataConfig, EvaluateConfig
from trainables.distributed.group import Group
from trainables.engine.checkpoint import write_tensors
from trainables.engine.evaluate import evaluate_checkpoint
from trainables.errors import CheckpointError, ClusterError, DistillError, ModelError
from trainables.failures import Failure, Kind, WorkersFailedError
from trainables.models.model_input import trained_input
from trainables.models.registry import build_model
from trainables.notices import notices_to


def test_an_evaluation_prepares_images_as_the_training_did_unless_overridden(tmp_path: Path) -> None:
    model = build_model("mlp_small", num_classes=10, image_size=12, seed=0)
    trained = {"image_size": 12, "val_resize": 14, "mean": [0.1, 0.2, 0.3], "std": None}
    about = {"model": "mlp_small", "num_classes": 10, "classes": [str(digit) for digit in range(10)], **trained}
    write_tensors(tmp_path / "best.safetensors", {f"model.{name}": value for name, value in model.state_dict().items()}, about)
    data = resolve(str(tmp_path / "best.safetensors"), "digits", []).data
    assert (data.image_size, data.val_resize, data.mean) == (12, 14, (0.1, 0.2, 0.3))
    assert data.std == DataConfig(path="digits").std
    assert resolve(str(tmp_path / "best.safetensors"), "digits", ["data.val_resize=13"]).data.val_resize == 13


def test_the_file_of_a_model_that_a_checkpoint_names_is_said_to_run(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n\n\ndef net(num_classes):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))\n"
    )
    model = build_model(f"{file}:net", num_classes=10, image_size=12, seed=0)
    about = {"model": f"{file}:net", "num_classes": 10, "classes": [str(digit) for digit in range(10)], "image_size": 12}
    path, lines = tmp_path / "best.safetensors", list[str]()
    write_tensors(path, {f"model.{name}": value for name, value in model.state_dict().items()}, about)
    with notices_to(lines.append):
        resolve(str(path), "digits", [])
        resolve(str(path), "digits", [], f"{file}:net")
    assert [line for line in lines if "runs another" in line] == [
        f"{path} is a net of {file}, which is run now: --model FILE.py:CLASS runs another"
    ]


def test_weights_without_a_header_are_evaluated_as_the_model_that_is_named(tmp_path: Path) -> None:
    model, path = build_model("mlp_small", num_classes=10, image_size=12, seed=0), tmp_path / "x.pth"
    torch.save({"student": model.state_dict(), "teacher": model.state_dict()}, path)
    with pytest.raises(CheckpointError, match=r"does not name its model: add --model NAME"):
        resolve(str(path), "digits", [])
    sets, lines = ["data.image_size=12", "data.mean=[0.5, 0.5, 0.5]"], list[str]()
    with notices_to(lines.append):
        config = resolve(str(path), "digits", sets, "mlp_small", "student")
    assert (config.model, config.weights_key, config.data.image_size) == ("mlp_small", "student", 12)
    assert lines[0].startswith(
        "images prepared by --set and the defaults, as the weights have no record: data.image_size 12, data.mean [0.5"
    )
    data = config.data.model_copy(update={"loader_workers": 0})
    assert evaluate_checkpoint(config.model_copy(update={"data": data}), Group())["num_images"] == 355
    with pytest.raises(CheckpointError, match="choose one with weights_key"):
        resolve(str(path), "digits", sets, "mlp_small")


def test_published_weights_are_evaluated_on_images_as_their_record_says() -> None:
    record = trained_input("resnet50", "IMAGENET1K_V2")
    assert record is not None
    assert record[:5] == (224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 1000, 232)
    assert trained_input("timm/resnet10t", "c3_in1k")[0] == 176  # type: ignore[index]
    with pytest.raises(ModelError, match="no_such"):
        resolve("no_such", "digits", [], "timm/resnet10t")
    with pytest.raises(CheckpointError, match="1000 classes, none of them '0', and the data has 10"):
        resolve("DEFAULT", "digits", [], "resnet18")
    with pytest.raises(CheckpointError, match="IMAGENET1K_FEATURES of vgg16 has no classifier"):
        resolve("IMAGENET1K_FEATURES", "digits", [], "vgg16")


def test_published_weights_are_not_evaluated_on_their_classes_in_another_order(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in range(1000):
            (folder := tmp_path / split / str(number)).mkdir(parents=True)
            (folder / "0.png").write_bytes(encoded(photo(0, 8, 8), "PNG"))
    with pytest.raises(CheckpointError, match="class 2 is number 2, the data's is '10'"):
        resolve("IMAGENET1K_V1", str(tmp_path), [], "resnet34")


def test_an_evaluation_reserves_its_workers_threads_and_is_refused_where_they_do_not_fit() -> None:
    scale = {"num_workers": 2, "cpus_per_worker": 2}
    config = EvaluateConfig.model_validate({"checkpoint": "x", "output": "y", "scale": scale, "data": {"path": "digits"}})
    assert reserve(config, Cluster((Node("a", 16, 0),))) == (6, Reservation(2, 8))
    assert reserve(config, Cluster((Node("a", 8, 2),))) == (2, Reservation(2, 4, 1))
    with pytest.raises(ClusterError, match=r"lower scale\.num_workers or data\.loader_workers"):
        reserve(config, Cluster((Node("a", 3, 0),)))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("user", DistillError, "evaluation failed: rank 1: KeyError: why"),
        ("out_of_memory", ClusterError, "evaluation failed: rank 1: why: lower data.global_batch_size or data.loader_workers"),
        ("node_out_of_memory", ClusterError, "rank 1: KeyError: why: lower data.global_batch_size or data.loader_workers"),
        ("worker_died", ClusterError, "evaluation failed: a worker died: why; repeat the command"),
    ],
)
def test_the_kind_of_a_failure_is_in_the_error_of_an_evaluation(kind: Kind, error: type[DistillError], words: str) -> None:
    ended = evaluation_error(WorkersFailedError([Failure("lost_peer", "gone", None, 0), Failure(kind, "why", "KeyError", 1)]))
    assert type(ended) is error
    assert str(ended).endswith(words)
