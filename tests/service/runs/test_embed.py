"""Where features are written, and what is refused before anything heavy is done."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.runs.evaluate import embed, resolve, write_npy
from tests.trainables.data.photos import encoded, photo
from tests.trainables.jobs import write_teacher
from trainables.errors import CheckpointError, ExperimentError
from trainables.notices import notices_to


def test_an_npy_file_has_the_embeddings_and_a_text_file_the_paths(tmp_path: Path) -> None:
    values_ND = np.arange(30, dtype=np.float32).reshape(10, 3)
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(values_ND.ravel()), 3)
    table = pa.table({"path": [f"val/a/{number}.jpg" for number in range(10)], "embedding": embedding})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=4)
    (tmp_path / "x.txt").write_text("a.jpg\n")  # such as the list of the images
    write_npy(tmp_path / "x.parquet", tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.npy"), values_ND)
    assert (tmp_path / "x.npy.txt").read_text().splitlines() == table["path"].to_pylist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "x.npy.txt", "x.parquet", "x.txt"]
    assert (tmp_path / "x.txt").read_text() == "a.jpg\n"


def test_what_cannot_be_embedded_is_refused_with_what_to_write(tmp_path: Path) -> None:
    root, file = tmp_path / "runs", tmp_path / "x.pth"
    with pytest.raises(ExperimentError, match=r"--to x.csv: write FILE.parquet or FILE.npy"):
        embed("m.safetensors", "digits", Path("x.csv"), [], root)
    with pytest.raises(CheckpointError, match=r"no checkpoint at resnet18: .* or a model with --weights DEFAULT"):
        embed("resnet18", "digits", tmp_path / "x.npy", [], root)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x.pth does not name its model: write `distill embed MODEL --weights .*x.pth`"):
        embed(str(file), "digits", tmp_path / "x.npy", [], root)
    assert not root.exists()


def test_a_probe_takes_a_checkpoint_of_other_classes_than_the_data_has(tmp_path: Path) -> None:
    checkpoint = write_teacher(tmp_path / "m.safetensors", num_classes=3)
    advice = "give images of its classes, or measure its features with --probe knn"
    with pytest.raises(CheckpointError, match=rf"has 3 classes, none of them.*: {advice}$"):
        resolve(checkpoint, "digits", [])
    assert resolve(checkpoint, "digits", [], measure="knn").measure == "knn"


def test_an_accuracy_without_labels_is_refused_and_features_are_not(tmp_path: Path) -> None:
    checkpoint, without = write_teacher(tmp_path / "m.safetensors"), ["data.labels=false"]
    for measure in ("knn", "accuracy"):
        with pytest.raises(ExperimentError, match=r"an accuracy needs labels: leave it out, or run `distill embed`"):
            resolve(checkpoint, "digits", without, measure=measure)
    assert resolve(checkpoint, "digits", without, measure="embed").data.labels is False


def test_a_probe_says_where_its_validation_images_are_the_training_images(tmp_path: Path) -> None:
    for split, label in itertools.product(("train", "val"), "ab"):
        (folder := tmp_path / "images" / split / label).mkdir(parents=True)
        (folder / "0.png").write_bytes(encoded(photo(0, 8, 8), "PNG"))
    lines = list[str]()
    with notices_to(lines.append):
        resolve(write_teacher(tmp_path / "m.safetensors", num_classes=3), str(tmp_path / "images"), [], measure="linear")
    same = f"data.path: {tmp_path}/images: the validation images are the training images: accuracy on them says little"
    assert same in lines
