"""A model in a user's file, FILE.py:CLASS, is used as those of the libraries are."""

from pathlib import Path

import pytest
import torch

from tests.trainables.jobs import config, train
from trainables.distributed.group import Group
from trainables.errors import DistillError, ModelError
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.models.model_input import trained_input
from trainables.models.registry import build_model
from trainables.models.weights import load_teacher, teacher_sha256
from trainables.rundir import StageDir

NET = """
from torch import nn

from trainables.models.libraries.interface import DeclaredTaps


class Net(nn.Module):
    declared_taps = DeclaredTaps(stem="a", stages=("a", "b"), map="b")

    def __init__(self, num_classes, width=4):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(2 * width, num_classes) if num_classes else nn.Identity()

    def forward(self, x):
        return self.head(self.b(self.a(x)).mean((2, 3)))


class Broken(Net):
    def forward(self, x):
        return x.nothing


class Maps(Net):
    def forward(self, x):
        return self.b(self.a(x))


class Naive(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(192, num_classes)

    def forward(self, x):
        return self.head(x.flatten(1))


def flat(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))


def fails(num_classes):
    raise KeyError("layers")


def no_model(num_classes):
    return 3


def empty(num_classes):
    return nn.Flatten()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def teacher_file(file: Path) -> str:
    """A state dict of the file's wider model."""
    model = build_model(f"{file}:Net(width=6)", num_classes=10, image_size=8, seed=5)
    torch.save(model.state_dict(), file.with_name("teacher.pth"))
    return str(file.with_name("teacher.pth"))


@pytest.mark.parametrize("method", ["kd", "embed", "fitnet"])
def test_a_model_in_a_file_teaches_and_learns(method: str, file: Path, tmp_path: Path) -> None:
    teacher = {"model": f"{file}:Net(width=6)", "weights": teacher_file(file)}
    distill = {"method": method, "options": {}}
    settings = config(tmp_path / "run", model=f"{file}:Net", teacher=teacher, distill=distill, train={"max_steps": 2})
    assert train(Group(), settings)["progress"].step == 4  # two of them warm up


def test_its_checkpoint_names_the_file_and_is_read_as_any_other(file: Path, tmp_path: Path) -> None:
    train(Group(), config(tmp_path / "run", model=f"{file}:Net(width=5)", teacher=None))
    best = StageDir(tmp_path / "run").best
    header = read_checkpoint_header(best)
    assert header is not None
    assert header.model == f"{file}:Net(width=5)"
    moved = tmp_path / "elsewhere" / "renamed.py"
    moved.parent.mkdir()
    file.rename(moved)
    record = trained_input(f"{moved}:Net", str(best))
    assert record is not None
    loaded = load_teacher(f"{moved}:Net", str(best), image_size=8, classes=header.classes, seed=0)
    assert loaded(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    with pytest.raises(DistillError, match=rf"{file} does not exist: write the file's current path, as FILE\.py:CLASS"):
        load_teacher(header.model, str(best), image_size=8, classes=header.classes, seed=0)
    with pytest.raises(DistillError, match=f"is a {file}:Net"):
        load_teacher(f"{moved}:Maps", str(best), image_size=8, classes=header.classes, seed=0)


def test_its_initial_values_depend_on_its_class_and_not_on_the_files_place(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.py"
    copy.write_text(NET)
    states = [build_model(f"{each}:Net", num_classes=3, image_size=8, seed=1).state_dict() for each in (file, copy)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_other_code_for_the_same_tensors_is_another_teacher(file: Path) -> None:
    weights, classes = teacher_file(file), [str(number) for number in range(10)]
    hashes = set()
    for text in (NET, NET.replace("nn.ReLU", "nn.GELU")):
        file.write_text(text)
        hashes.add(teacher_sha256(f"{file}:Net(width=6)", weights, image_size=8, classes=classes, seed=0))
    assert len(hashes) == 2


def test_without_classes_it_returns_features_and_a_function_gets_the_image_size(file: Path) -> None:
    features = build_model(f"{file}:Net", num_classes=0, image_size=8, seed=1)
    assert features(torch.zeros(2, 3, 8, 8)).shape == (2, 8)
    assert features.num_classes == 0
    assert build_model(f"{file}:flat", num_classes=7, image_size=4, seed=1)(torch.zeros(2, 3, 4, 4)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "num_classes", "words"),
    [
        ("other.py:Net", 10, "does not exist"),
        ("net.py", 10, "is a file: add the class in it, as .*net.py:CLASS"),
        ("net.py:Nett", 10, r"cannot be built \(AttributeError: .*Nett"),
        ("net.py:Net(depth=3)", 10, r"cannot be built \(TypeError: .*depth"),
        ("net.py:fails", 10, r"cannot be built \(KeyError: 'layers'\)"),
        ("net.py:no_model", 10, "is a int: name an nn.Module class"),
        ("net.py:empty", 10, "is a Flatten without parameters"),
        ("net.py:Broken", 10, r"\(AttributeError: 'Tensor' object has no attribute 'nothing'\): correct its code"),
        ("net.py:Maps", 10, r"returns shape \(2, 8, 3, 3\) for a batch of 2, not \(2, 10\); correct it for num_classes=10"),
        ("net.py:Naive", 0, r"returns shape \(2, 0\) for a batch of 2, not \(2, features\); correct it for num_classes=0"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_is_wrong_with_the_file_is_one_line_that_names_it(name: str, num_classes: int, words: str, file: Path) -> None:
    with pytest.raises(ModelError, match=words) as refused:
        build_model(str(file.with_name(name)), num_classes=num_classes, image_size=8, seed=0)
    assert str(file.with_name(name.partition(":")[0])) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_in_a_file_has_no_published_weights(file: Path) -> None:
    with pytest.raises(ModelError, match=r"net\.py:Net has no published weights 'DEFAULT'"):
        load_teacher(f"{file}:Net", "DEFAULT", image_size=8, classes=["a", "b"], seed=0)
