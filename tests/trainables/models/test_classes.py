"""Which of a teacher's classes are the data's."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainables.errors import CheckpointError
from trainables.models.classes import class_rows
from trainables.models.libraries.interface import TrainedInput
from trainables.models.model_input import trained_input
from trainables.notices import notices_to

IMAGENET = trained_input("resnet18", "DEFAULT")
assert IMAGENET is not None
NAMES = [name.replace(" ", "_") for name in IMAGENET.categories]


def rows(classes: Sequence[str], record: TrainedInput | None = None, *, ours: bool = False) -> tuple[int, ...] | None:
    return class_rows(record or IMAGENET, classes, "DEFAULT of resnet18", ours=ours)


def refusal(classes: Sequence[str], record: TrainedInput | None = None, *, ours: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        rows(classes, record, ours=ours)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def own(*classes: str) -> TrainedInput:
    return TrainedInput(8, (), (), len(classes), categories=classes)


def test_a_part_of_imagenet_is_found_by_wordnet_id_in_whatever_order() -> None:
    pytest.importorskip("timm")
    ids, lines = IMAGENET.wordnet_ids, list[str]()
    assert len(ids) == 1000
    with notices_to(lines.append):
        assert rows([ids[7], ids[3]]) == (7, 3)
        assert rows([ids[1], ids[0], *ids[2:]]) == (1, 0, *range(2, 1000))
    assert lines[0] == "weights DEFAULT of resnet18: 2 of its 1000 classes are used, by WordNet id, in the order of the data's"
    assert rows(ids) is None
    assert "none of them 'n00000001'" in refusal([ids[7], "n00000001"])
    assert "none of them 'n00000000'" in refusal([f"n{number:08d}" for number in range(1000)])


def test_a_part_of_imagenet_is_found_by_name_without_case_and_underscores() -> None:
    assert rows(["Great_White_Shark", "tench"]) == (2, 0)
    assert rows(NAMES) is None
    assert "has 1000 classes, none of them 'a product', and the data has 2" in refusal(["tench", "a product"])
    assert "several classes 'cardigan': name the data's classes by WordNet ids" in refusal(["tench", "cardigan"])
    assert "several classes" in refusal(sorted(NAMES))


def test_a_synonym_is_a_name_and_two_of_one_class_are_refused() -> None:
    record = own("tench, Tinca tinca", "goldfish")
    assert rows(["goldfish", "tinca_tinca"], record) == (1, 0)
    assert "'tench' and 'Tinca_tinca' of the data are both its class 0" in refusal(["tench", "Tinca_tinca", "goldfish"], record)


def test_as_many_classes_of_other_names_are_taken_to_be_the_datas() -> None:
    assert rows([f"product {number}" for number in range(1000)]) is None
    assert rows([f"{number:04d}" for number in range(1000)]) is None
    assert rows([str(number) for number in range(1000)]) is None


@pytest.mark.parametrize("form", ["{}", "class_{}"])
def test_numbers_that_were_sorted_as_text_are_not_imagenets_labels(form: str) -> None:
    numbers = [form.format(number) for number in range(1000)]
    assert f"class 2 is number 2, the data's is {numbers[10]!r}: name the data's classes by numbers of equal length" in refusal(
        sorted(numbers)
    )
    assert "has 1000 classes, none of them" in refusal(numbers[:2])


def test_a_checkpoint_of_ours_has_the_datas_classes_by_their_very_names() -> None:
    record = own("0", "1", "10", "2")
    assert rows(["0", "1", "10", "2"], record, ours=True) is None
    assert rows(["0", "1", "2", "10"], record, ours=True) == (0, 1, 3, 2)
    assert rows(["10", "1"], record, ours=True) == (2, 1)
    assert "has 4 classes, none of them '3', and the data has 4" in refusal(["0", "1", "10", "3"], record, ours=True)


def test_without_timm_wordnet_ids_are_in_their_order_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # Python's own way to mark a package as not importable
    record = trained_input("resnet18", "DEFAULT")
    ids = [f"n{number:08d}" for number in range(1000)]
    assert rows(ids, record) is None
    assert rows([ids[1], ids[0], *ids[2:]], record) == (1, 0, *range(2, 1000))
    assert "which only timm can look up: `pip install raydistill[timm]`" in refusal(ids[:3], record)


@pytest.mark.parametrize("as_dict", [False, True])
def test_the_class_names_that_timm_saves_in_a_folder_are_read(tmp_path: Path, as_dict: bool) -> None:
    timm = pytest.importorskip("timm")
    from timm.models import save_for_hf

    model = timm.create_model("resnet10t", num_classes=3)
    save_for_hf(model, tmp_path, model_config={"label_names": ["cat", "dog", "bird"]}, safe_serialization=True)
    if as_dict:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "label_names": {"2": "bird", "0": "cat", "1": "dog"}}))
    record = trained_input("timm/resnet10t", str(tmp_path))
    assert record is not None
    assert record.categories == ("cat", "dog", "bird")
    assert class_rows(record, ("bird", "cat"), "it", ours=False) == (2, 0)


def test_names_that_are_ids_or_end_in_digits_are_compared() -> None:
    ids = tuple(f"n{number:08d}" for number in range(4))
    record = TrainedInput(32, (), (), 4, categories=tuple(reversed(ids)), wordnet_ids=tuple(reversed(ids)))
    assert class_rows(record, ids, "it", ours=False) == (3, 2, 1, 0)
    numbered = TrainedInput(32, (), (), 2, categories=("class2", "class1"))
    assert class_rows(numbered, ("class1", "class2"), "it", ours=False) == (1, 0)


def test_other_names_are_taken_in_their_order_and_that_is_a_note() -> None:
    record, lines = TrainedInput(32, (), (), 3, categories=("cat", "dog", "bird")), list[str]()
    with notices_to(lines.append):
        assert class_rows(record, ("chat", "chien", "oiseau"), "it", ours=False) is None
    assert lines == ["weights it: its 3 classes have other names than the data's, and are matched by order"]
