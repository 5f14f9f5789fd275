"""The methods as a table, and one with its options; one that cannot be loaded takes no other with it."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from service import cli
from service.report.method_table import in_stages, method_parts, method_table
from tests.trainables.methods.offering import installed
from trainables.errors import ExperimentError
from trainables.methods.registry import METHODS, load_method

OWN_METHOD = """
from trainables.config import MethodOptions
from trainables.methods.contract import Method


class MineOptions(MethodOptions):
    weight: float
    rate: float = 1e-3
    layers: tuple[str, ...] = ("a", "b")


class Mine(Method):
    '''A loss of [mine].'''

    Options = MineOptions
    terms = ("apart",)
    taps = ("pooled",)
"""


def text_of(*parts: RenderableType, width: int = 130) -> str:
    console = Console(width=width, record=True, markup=False, file=io.StringIO())
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return console.export_text()


def rows(text: str) -> dict[str, list[str]]:
    """The first line of each row, by its first cell."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {first: rest for first, *rest in cells if first}


def test_every_method_has_a_row_with_its_weights_and_taps() -> None:
    text = text_of(method_table())
    assert max(map(len, text.splitlines())) <= 130
    found = rows(text)
    assert found.keys() == METHODS.keys()
    assert found["kd"][2:] == ["0.9", "0.1", "logits", "yes"]
    assert found["at"][2:] == ["1000", "1", "stages", "yes"]


def test_the_page_on_pipeline_stages_agrees_with_the_table_on_each_method() -> None:
    page = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text()
    rows = re.findall(r"^\| (`.*`.*) \| (yes|with `micro_batches: 1`|no)(?!\w).*\|$", page, re.MULTILINE)
    written = {name: says for names, says in rows for name in re.findall(r"`(\w+)`", names)}
    words = {"yes": "yes", "one micro-batch": "with `micro_batches: 1`", "no": "no"}
    assert written == {name: words[in_stages(load_method(name))] for name in METHODS}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_package", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("Mine = 3", "cannot be loaded: mine is not a method"),
        (
            OWN_METHOD.replace("Options = MineOptions", "Options = dict"),
            "cannot be loaded: mine has Options that are not a MethodOptions",
        ),
    ],
)
def test_a_method_that_cannot_be_loaded_is_a_row_that_says_so(tmp_path: Path, code: str, says: str) -> None:
    with installed(tmp_path, "other", "mine", code):
        found = rows(text_of(method_table(), width=400))
    assert found.keys() == {*METHODS, "mine"}
    assert found["mine"][0].startswith(says)


def test_a_method_whose_weight_has_no_default_is_a_row_like_any_other(tmp_path: Path) -> None:
    with installed(tmp_path, "other", "mine", OWN_METHOD):
        assert rows(text_of(method_table()))["mine"] == ["", "A loss of [mine].", "required", "1", "pooled", "yes"]


def test_a_name_that_two_packages_offer_is_shown_with_both(tmp_path: Path) -> None:
    with installed(tmp_path, "other", "kd", OWN_METHOD):
        (output, *_) = rows(text_of(method_table(), width=600))["kd"]
    assert output.startswith("cannot be loaded: kd is declared by raydistill (trainables.methods.kd:KD) and other (_other:Mine)")


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_is_shown_with_its_default_and_described(name: str) -> None:
    text = text_of(*method_parts(name), width=200)
    assert text.startswith(f"{name}: ")
    found = rows(text)
    kind = load_method(name)
    assert found.keys() == kind.Options.model_fields.keys()
    assert all(default and description for default, description in found.values())
    assert f"task_weight {kind.task_weight:g}, unless" in text


def test_a_method_is_shown_with_its_paper_its_task_weight_and_its_taps() -> None:
    text = text_of(*method_parts("reviewkd"))
    assert "Chen, Liu, Zhao and Jia 2021" in text
    assert "The authors' weight and warm-up for" in text
    assert "taps: student stages pooled, teacher stages.preact pooled" in text
    assert rows(text)["warmup_epochs"][0] == "20"


def test_an_option_of_ones_own_may_lack_a_default_and_a_description(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_METHOD)
    found = rows(text_of(*method_parts(f"{file}:Mine")))
    assert found["weight"] == ["required", "weight of the method's loss"]
    assert found["rate"] == ["0.001", ""]
    assert found["layers"] == ['["a", "b"]', ""]
    with pytest.raises(ExperimentError, match="there is no method 'dkdd'; did you mean dkd"):
        list(method_parts("dkdd"))


def test_the_command_prints_one_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["methods", "ft"])
    assert left.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("ft: ‖unit(F_t)")
    assert "distill.options.ft" in output
