"""The reference of all keys: complete, and the page of the documentation is current."""

import re
from pathlib import Path

import pytest

from service.config.messages import known_keys
from service.config.reference import all_keys, keys_below, markdown
from service.config.schema import Experiment
from tests.service.commands import run
from trainables.errors import ExperimentError

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "docs/configuration.md is not what the models say: run `python -m service.config.reference docs/configuration.md`"
    )


def test_the_page_has_every_key_in_the_table_of_its_section() -> None:
    sections = {part.partition("\n")[0].strip("`"): part for part in markdown().split("\n## ")[1:]}
    for key in all_keys():
        section = re.sub(r"\W.*", "", key.name)
        if section not in sections:
            assert f"| `{key.name}` |" in sections["The experiment"]
        elif key.name != section:
            assert f"| `{key.name}` |" in sections[section]


def test_every_key_that_validates_is_listed_once() -> None:
    names = [key.name for key in all_keys()]
    assert len(names) == len(set(names))
    plain = [name.replace("[N]", "").replace(".LOSS", "") for name in names if ".METHOD." not in name]
    assert plain == list(known_keys(Experiment))


def test_every_key_has_a_type_and_a_meaning() -> None:
    assert [key.name for key in all_keys() if not (key.type and key.meaning)] == []
    assert "any value" not in {key.type for key in all_keys()}


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("data.loader_workers", "integer ≥ 0 or auto", "auto"),
        ("data.mean", "list of 3 numbers ≥ 0, ≤ 1", "[0.485, 0.456, 0.406]"),
        ("optim.momentum", "number ≥ 0, < 1", "0.9"),
        ("teacher.model", "text", "required"),
        ("teacher", "section or null", "null"),
        ("assistants[N].epochs", "integer ≥ 1 or null", "null"),
        ("optim.losses.LOSS.nesterov", "true or false or null", "null"),
        ("distill.options.METHOD.decay", "none, linear or cosine", "none"),
        ("sweep.space", "mapping", "{}"),
        ("sweep.points", "list of mapping", "[]"),
    ],
)
def test_types_and_defaults_in_words(name: str, kind: str, default: str) -> None:
    key = next(key for key in all_keys() if key.name == name)
    assert (key.type, key.default) == (kind, default)


def test_keys_below_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert [key.name for key in keys_below("assistants")] == [
        "assistants",
        *(f"assistants[N].{key}" for key in ("model", "args", "epochs")),
    ]
    assert keys_below("") == all_keys()
    with pytest.raises(ExperimentError, match=r"optin: no such key; did you mean optim\?"):
        keys_below("optin")
    code, out, err = run(capsys, "show", "--keys", "scale.num_workers")
    assert (code, err) == (0, "")
    about = "Ray Train workers (world size); [2, 8] sets min_workers to 2 and this to 8"
    assert out == f"scale.num_workers  integer ≥ 1  default 1\n    {about}\n"


def test_show_wants_an_experiment_or_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "show")
    assert code == 2
    assert "give a recipe or a file, or --keys" in err
