"""Which files of a packed layout are which split."""

from pathlib import Path

import pytest

from tests.trainables.data.packed import noticed, packed, refusal, write_tar
from tests.trainables.data.photos import encoded, photo

JPEG = encoded(photo(0), "JPEG")


def write_tars(root: Path, *files: str) -> Path:
    """Tars whose only key is their own path."""
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tar(
            path,
            [
                (f"{file.replace('/', '-')}-{label}.{kind}", content)
                for label in (0, 1)
                for kind, content in (("jpg", JPEG), ("cls", b"%d" % label))
            ],
        )
    return root


@pytest.mark.parametrize("name", ["valid", "validation", "dev", "val", "test", "eval"])
def test_a_validation_set_has_any_of_its_usual_names(tmp_path: Path, name: str) -> None:
    root = write_tars(tmp_path / "set", "train-0.tar", f"{name}/0.tar")
    assert packed(root)[1].name(0).startswith(f"{name}/0.tar/")


def test_valid_comes_before_test_which_is_named_as_not_used(tmp_path: Path) -> None:
    root = write_tars(tmp_path / "set", "train/0.tar", "test/0.tar", "valid/0.tar")
    assert f"{root}: valid is the validation set; test is not used" in noticed(root)
    assert packed(root)[1].name(0).startswith("valid/")


def test_two_names_of_one_split_are_refused(tmp_path: Path) -> None:
    assert "has val and dev, which both mean the validation set" in refusal(
        write_tars(tmp_path / "set", "train-0.tar", "val-0.tar", "dev-0.tar")
    )


def test_the_last_word_of_a_path_names_its_split(tmp_path: Path) -> None:
    train, val = packed(write_tars(tmp_path / "set", "dev-corpus/train-0.tar", "dev-corpus/test-0.tar"))
    assert (train.name(0).split("/")[1], val.name(0).split("/")[1]) == ("train-0.tar", "test-0.tar")


def test_hidden_files_and_folders_are_no_shards(tmp_path: Path) -> None:
    root = write_tars(
        tmp_path / "set", "train-0.tar", "val-0.tar", ".ipynb_checkpoints/train-0-checkpoint.tar", "__MACOSX/train-1.tar"
    )
    (root / "._train-0.tar").write_bytes(b"\0\5\x16\7")
    assert len(packed(root)[0]) == 2


def test_files_that_name_no_split_are_a_notice(tmp_path: Path) -> None:
    root = write_tars(tmp_path / "set", "train-0.tar", "val-0.tar", "extra.tar")
    assert f"{root}: tars whose paths name no split are not used: extra.tar" in noticed(root)


def test_files_lie_two_folders_deep_as_hugging_faces_converted_ones(tmp_path: Path) -> None:
    train, _ = packed(write_tars(tmp_path / "set", "default/train/0000.tar", "default/validation/0000.tar"))
    assert len(train) == 2
