"""A model without a classifier classifies by an embedding of each class, in the data's order, and is another with other ones."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.trainables.models.test_weights import CLASSES, convnet, load, refusal, write_checkpoint
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import has_classifier
from trainables.models.weights import teacher_sha256
from trainables.notices import notices_to

WIDTH = 32
"""The width of convnet_small's features."""


def headless(folder: Path) -> Path:
    path = folder / "headless.pth"
    torch.save({name: tensor for name, tensor in convnet().state_dict().items() if "head" not in name}, path)
    return path


def embeddings(num_rows: int = len(CLASSES), width: int = WIDTH, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(num_rows, width)).astype(np.float32)


def write(folder: Path, rows_KD: NDArray[Any], names: str | None = None) -> str:
    path = folder / "text.npy"
    np.save(path, rows_KD)
    if names is not None:
        path.with_suffix(".txt").write_text(names)
    return str(path)


def cosines(model: nn.Module, rows_KD: NDArray[Any], images: torch.Tensor) -> torch.Tensor:
    features_BD = model.eval().double()(images.double()).detach()
    rows = torch.from_numpy(rows_KD).double()
    return features_BD @ rows.T / features_BD.norm(dim=1, keepdim=True) / rows.norm(dim=1)


@pytest.mark.parametrize("kind", ["headless", "no classes", "projection"])
def test_logits_are_scaled_cosines_to_the_embeddings_of_the_classes(tmp_path: Path, kind: str) -> None:
    bare = convnet()
    bare.set_submodule("head", nn.Identity())
    if kind == "headless":
        path, rows_KD = headless(tmp_path), embeddings()
    elif kind == "no classes":
        path = write_checkpoint(tmp_path / "bare.safetensors", convnet(num_classes=0), num_classes=0, classes=())
        bare, rows_KD = convnet(num_classes=0), embeddings()
    else:  # as of a CLIP of timm's
        bare, rows_KD, path = convnet(num_classes=9), embeddings(width=9), tmp_path / "clip.pth"
        torch.save(bare.state_dict(), path)
    images, file = torch.randn(5, 3, 8, 8), write(tmp_path, rows_KD)
    teacher = load(path, zero_shot=(file, 30.0))
    assert has_classifier(teacher)
    assert teacher.state_dict().keys() == bare.state_dict().keys()
    expected = 30 * cosines(bare, rows_KD, images)
    torch.testing.assert_close(teacher(images), expected.float(), rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert teacher(images).dtype == torch.float32
    torch.testing.assert_close(teacher.double()(images.double()), expected, rtol=1e-6, atol=1e-5)


def test_taps_read_the_features_that_are_compared_with_the_classes(tmp_path: Path) -> None:
    teacher = load(headless(tmp_path), zero_shot=(write(tmp_path, embeddings()), 100.0))
    reader = TapReader(teacher, {"fitnet": ("pooled",)}, name="convnet_small", image_size=8)
    with reader.capture():
        outputs = reader.pop(teacher(torch.randn(2, 3, 8, 8)), 2)["fitnet"]
    assert outputs.features[0].shape == (2, WIDTH)
    assert outputs.logits_BK.shape == (2, len(CLASSES))


def test_rows_are_chosen_by_the_names_next_to_them_and_without_names_taken_in_order(tmp_path: Path) -> None:
    path, images, lines = headless(tmp_path), torch.randn(5, 3, 8, 8), list[str]()
    rows_KD, order = embeddings(6), [4, 2, 0, 1]
    names = ["emu", "fox", "dog", "ant", "cat", "bee"]
    plain = load(path, zero_shot=(write(tmp_path, rows_KD[order]), 100.0))
    with notices_to(lines.append):
        named = load(path, zero_shot=(write(tmp_path, rows_KD, "\n".join(names) + "\n"), 100.0))
    assert torch.equal(plain(images), named(images))
    file = tmp_path / "text.npy"
    assert lines == [f"weights {file}: 4 of its 6 classes are used, by name, in the order of the data's"]
    (tmp_path / "text.txt").unlink()
    lines.clear()
    with notices_to(lines.append):
        load(path, zero_shot=(write(tmp_path, rows_KD[:4]), 100.0))
    assert lines == [
        f"teacher.classes: {file}: there is no text.txt with class names: its rows are used as cat, dog, emu and 1 more "
        "in the data's order"
    ]


def test_a_teacher_is_another_one_with_other_embeddings_names_or_scale(tmp_path: Path) -> None:
    def sha256(rows_KD: NDArray[Any], names: str | None = None, scale: float = 100.0) -> str:
        options: dict[str, Any] = {"image_size": 8, "classes": CLASSES, "seed": 0}
        zero_shot = write(tmp_path, rows_KD, names), scale
        return teacher_sha256("convnet_small", str(headless(tmp_path)), **options, zero_shot=zero_shot)

    first = sha256(embeddings())
    assert sha256(embeddings(), "cat\ndog\nemu\nfox") == first
    others = [
        sha256(embeddings(), "dog\ncat\nemu\nfox"),
        sha256(embeddings(seed=1)),
        sha256(embeddings(), "cat\ndog\nemu\nfox", 99),
    ]
    assert all(one != other for one, other in itertools.combinations([first, *others], 2))
    file = write(tmp_path, embeddings(seed=1)), 100.0
    assert "is not the convnet_small that the job started with" in refusal(headless(tmp_path), zero_shot=file, sha256=first)


@pytest.mark.parametrize(
    ("rows_KD", "names", "says"),
    [
        (embeddings(width=9), None, "has embeddings of width 9, but the output of convnet_small has width 32: use"),
        (
            embeddings(),
            "cat\ndog\nemu\ngnu",
            "has 4 classes, none of them 'fox', and the data has 4: write each class of the data",
        ),
        (embeddings(), "cat\ndog\nemu\ncat", "has several classes 'cat': write each class"),
        (embeddings(5), "cat\ndog\nemu\nfox\ncat", "has several classes 'cat': write each class of the data once"),
        (embeddings(5), None, "has 5 rows and the data 4 classes: write one name per line into"),
        (embeddings(5), "cat\ndog", "text.txt 2 names: write one name per line"),
        (embeddings() * [[1], [np.nan], [1], [np.inf]], None, "not finite, or only zeros, in row 1, row 3: write it again"),
        (embeddings() * [[1], [1], [1], [0]], None, "not finite, or only zeros, in row 3"),
        (embeddings()[0], None, "is float32 (32,), not floats (K, D): write an embedding of each class"),
        (np.ones((4, 32), dtype=int), None, "is int64 (4, 32), not floats (K, D)"),
        (np.array(["cat", None]), None, "cannot be read (Object arrays cannot be loaded when allow_pickle=False): write a"),
    ],
)
def test_embeddings_that_are_not_of_these_classes_or_this_model_are_refused(
    tmp_path: Path, rows_KD: NDArray[Any], names: str | None, says: str
) -> None:
    says_all = refusal(headless(tmp_path), zero_shot=(write(tmp_path, rows_KD, names), 100.0))
    assert says in says_all
    assert says_all.startswith("teacher.classes: ")


def test_a_file_that_is_missing_and_a_teacher_with_a_classifier_are_refused(tmp_path: Path) -> None:
    assert "cannot be read ([Errno 2]" in refusal(headless(tmp_path), zero_shot=(str(tmp_path / "none.npy"), 100.0))
    file, own = (write(tmp_path, embeddings()), 100.0), "has its own classifier with 4 classes, which teacher.classes would"
    assert own in refusal(write_checkpoint(tmp_path / "best.safetensors", convnet()), zero_shot=file)
    torch.save(convnet().state_dict(), tmp_path / "plain.pth")
    assert own in refusal(tmp_path / "plain.pth", zero_shot=file)
    named = write(tmp_path, embeddings(width=4)), 100.0
    assert own in refusal(tmp_path / "best.safetensors", zero_shot=named)
