"""Which names mean the training and the validation set."""

import pytest

from trainables.data.split_names import choose_splits, is_hidden
from trainables.errors import DataError
from trainables.notices import notices_to


@pytest.mark.parametrize(
    ("names", "val", "expected_notices"),
    [
        (("train", "val"), "val", []),
        (("train", "valid", "test"), "valid", ["data: valid is the validation set; test is not used"]),
        (("train", "dev", "eval"), "dev", ["data: dev is the validation set; eval is not used"]),
        (("train", "test"), "test", ["data: test is the validation set, since there is no val or valid or validation or dev"]),
        (("train",), None, []),
    ],
)
def test_the_validation_set_comes_before_a_test_set(names: tuple[str, ...], val: str | None, expected_notices: list[str]) -> None:
    lines: list[str] = []
    with notices_to(lines.append):
        chosen = choose_splits({name: name for name in names}, "data")
    assert (chosen["train"], chosen.get("val"), lines) == ("train", val, expected_notices)


@pytest.mark.parametrize("names", [("train", "val", "valid"), ("train", "training", "val"), ("train", "test", "eval")])
def test_two_names_of_one_meaning_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"which both mean the (training|validation) set: rename or remove one"):
        choose_splits({name: name for name in names}, "data")


def test_what_systems_and_editors_leave_is_hidden() -> None:
    left = [".ipynb_checkpoints", "__MACOSX", "._x.jpg", "@eaDir", "lost+found", ".DS_Store", "Thumbs.db"]
    assert all(map(is_hidden, left))
    assert not any(map(is_hidden, ["cat", "x.jpg", "Lost", "@home"]))
