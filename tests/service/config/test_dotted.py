"""Nested mappings by dotted keys."""

from typing import Any

from service.config.dotted import flatten, merge, put


def test_merging_replaces_a_space_as_a_whole_and_sections_key_by_key() -> None:
    below = {"sweep": {"space": {"a": [1]}, "steps": 3}, "optim": {"lr": 1, "epochs": 2}}
    merged = merge(below, {"sweep": {"space": {"b": [2]}}, "optim": {"lr": 3}})
    assert merged == {"sweep": {"space": {"b": [2]}, "steps": 3}, "optim": {"lr": 3, "epochs": 2}}
    assert below["optim"] == {"lr": 1, "epochs": 2}


def test_putting_opens_the_sections_on_the_way() -> None:
    tree: dict[str, Any] = {"teacher": None}
    put(tree, {"teacher.model": "resnet8", "sweep.space.a.b": [1]}, "here")
    assert tree == {"teacher": {"model": "resnet8"}, "sweep": {"space": {"a.b": [1]}}}


def test_flattening_keeps_a_space_as_one_value() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "sweep": {"space": {"x.y": [1]}}}) == {
        "a.b": 1,
        "a.c": {},
        "sweep.space": {"x.y": [1]},
    }
