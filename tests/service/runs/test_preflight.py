"""What is odd about data is one line before a run begins."""

import shutil
from pathlib import Path

import pytest

from service.config.experiment import load
from service.runs.preflight import check_data, check_train
from tests.trainables.data.image_folder import write_images
from tests.trainables.jobs import write_teacher
from trainables.errors import DataError
from trainables.notices import notices_to

MORE = "data.more=[{path: synthetic, share: 0.5, labels: false}]"


def noticed(folder: Path, *more: str) -> list[str]:
    lines: list[str] = []
    overrides = [
        f"data.path={folder}",
        "data.image_size=8",
        "data.global_batch_size=2",
        "student.model=mlp_small",
        "teacher=null",
        *more,
    ]
    with notices_to(lines.append):
        check_data(load("digits", overrides))
    return [line for line in lines if line.startswith(("data.path", "data.val_share", "data.more: 6", str(folder)))]


def test_validation_images_that_are_the_training_images_are_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    assert noticed(folder) == []
    shutil.rmtree(folder / "val")
    (folder / "val").symlink_to("train")
    says = f"data.path: {folder}: the validation images are the training images: accuracy on them says little"
    assert noticed(folder) == [says]
    assert says in noticed(folder, f"data.more=[{{path: {folder}, share: 0.5, labels: true}}]")


def test_more_validation_than_training_images_may_be_swapped_splits(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=1)
    says = f"data.path: {folder} has 2 training and 4 validation images: are they swapped?"
    assert noticed(folder) == noticed(folder, f"data.more=[{{path: {folder}, share: 0.5, labels: true}}]") == [says]


def test_what_is_held_out_of_images_without_labels_is_a_line(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=20) / "train"
    assert noticed(folder, *without_labels(tmp_path), "data.val_share=0.2") == [
        "data.val_share: 6 of 40 images are held out for validation, by a hash of their paths"
    ]
    assert noticed(folder.parent, *without_labels(tmp_path)) == [f"{folder.parent}: its labels are not used"]


def test_a_further_set_that_has_validation_images_is_a_line(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=20)
    shutil.rmtree(folder / "val")
    paths = "".join(f"{path.relative_to(tmp_path)}\n" for path in sorted(folder.rglob("*.*")))
    (tmp_path / "list.txt").write_text(paths)
    for further in (folder, tmp_path / "list.txt"):
        more = f"data.more=[{{path: {further}, share: 0.5}}]"
        says = f"data.more: 6 images of {further} are validation images too: a measure of these says little"
        assert says in noticed(folder, *without_labels(tmp_path), "data.val_share=0.2", more)
    assert not [line for line in noticed(folder, *without_labels(tmp_path), MORE) if "validation images too" in line]


def test_the_part_of_a_batch_that_a_fine_tuned_teacher_has_is_checked_too(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=3)
    teacher = f"teacher={{model: mlp_large, weights: {write_teacher(tmp_path / 't.safetensors')}, finetune: true}}"
    overrides = [teacher, "optim.epochs=1", "optim.warmup_epochs=0", "data.global_batch_size=8", MORE]
    with pytest.raises(DataError, match=r"data.global_batch_size: 8 is more than the 6 training images"):
        noticed(folder, *overrides)


def test_images_to_measure_a_backbone_by_need_labels(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=20)
    assert noticed(folder, *without_labels(tmp_path), f"eval.path={folder}")
    with pytest.raises(DataError, match=f"^eval.path: {folder / 'train'} has no folder train"):
        noticed(folder, *without_labels(tmp_path), f"eval.path={folder / 'train'}")
    shutil.rmtree(folder / "val")
    with pytest.raises(DataError, match=r"its images belong in val/CLASS/$"):  # data.val_share is of data.path
        noticed(folder, *without_labels(tmp_path), f"eval.path={folder}")


def test_a_student_named_by_its_folder_that_begins_with_random_weights_is_a_line(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    folder, name = write_images(tmp_path / "images"), f"local-dir:{tmp_path / 'own'}"
    timm.models.save_for_hf(timm.create_model("resnet10t", num_classes=2), tmp_path / "own")
    overrides = ["data.image_size=32", "data.global_batch_size=2", "teacher=null", f"student.model={name}"]
    says = f"student {name}: it begins with random weights; student.weights: DEFAULT begins with its own"
    for more in ([], ["student.weights=DEFAULT"]):
        lines: list[str] = []
        with notices_to(lines.append):
            check_data(load("digits", [f"data.path={folder}", *overrides, *more]))
        assert (says in lines) != bool(more)


def without_labels(folder: Path) -> list[str]:
    teacher = write_teacher(folder / "teacher.safetensors")
    return [
        "data.labels=false",
        f"teacher={{model: mlp_large, weights: {teacher}}}",
        "distill={method: embed, options: {embed: {map: 0}}}",
    ]


def test_the_size_of_a_cache_of_features_is_a_line_before_anything_is_written(tmp_path: Path) -> None:
    lines: list[str] = []
    weights = write_teacher(tmp_path / "teacher.safetensors", "convnet_large", num_classes=7)
    cached = f"teacher={{model: convnet_large, weights: {weights}, cache: {tmp_path / 'cache'}}}"
    own = ["data.labels=false", "distill={method: embed}", "student.model=convnet_small", "optim.epochs=3"]
    with notices_to(lines.append):
        check_train(load("digits", [cached, *own]))
        check_train(load("digits", [cached, *own, "data.augment=pad_crop_flip"]))
        check_train(load("digits", [cached, *own, "train.max_steps=5"]))
    holds = "embedding 128 + map 128×2×2 in float16"
    assert [line for line in lines if line.startswith("teacher.cache")] == [
        f"teacher.cache: 1.77 MiB for 1,442 images × 1 epoch: {holds}",
        f"teacher.cache: 5.3 MiB for 1,442 images × 3 epochs: {holds}",
    ]
    assert not (tmp_path / "cache").exists()


def test_a_warm_up_longer_than_the_training_is_a_line(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=20)
    overrides = ["data.image_size=8", "data.global_batch_size=4", "student.model=mlp_small", "teacher=null", "optim.epochs=2"]
    lines: list[str] = []
    with notices_to(lines.append):
        check_train(load("digits", [f"data.path={folder}", *overrides, "optim.warmup_steps=500"]))
    assert "optim.warmup_steps 500: the training has 20, all of which are warm-up" in lines


def test_trainings_that_end_before_their_first_milestone_are_a_line(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", num_train=20)
    own = [
        f"data.path={folder}",
        "data.image_size=8",
        "data.global_batch_size=4",
        "student.model=mlp_small",
        "teacher.model=mlp_small",
    ]

    def lines(*overrides: str) -> list[str]:
        found: list[str] = []
        with notices_to(found.append):
            check_train(load("digits", [*own, "optim.schedule=step", *overrides]))
        return [line for line in found if line.startswith("optim.milestones")]

    def line(name: str, epochs: int) -> str:
        return f"optim.milestones [30, 60, 90]: the {name} ends before them, after {epochs} epochs: its learning rate never falls"

    assert lines("optim.epochs=20", "teacher.epochs=10") == [line("teacher", 10), line("student", 20)]
    assert lines("optim.epochs=100", "teacher.epochs=30") == [line("teacher", 30)]
    for fitting in (["optim.epochs=2", "optim.milestones=[1]"], ["train.max_steps=3"], ["optim.schedule=cosine"]):
        assert lines("teacher.epochs=null", *fitting) == []
