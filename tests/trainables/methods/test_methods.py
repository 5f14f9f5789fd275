"""What holds for every method by name, and how names are found, loaded and refused."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainables.methods.offering import installed
from trainables.config import MethodOptions
from trainables.errors import ExperimentError
from trainables.methods.contract import Method
from trainables.methods.registry import METHODS, check_name, load_method
from trainables.user_code import option_key, read_source


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_has_in_its_docstrings(name: str) -> None:
    kind = load_method(name)
    assert issubclass(kind, Method)
    assert kind.terms or kind.init_terms
    assert kind.__doc__
    module = sys.modules[kind.__module__]
    assert module.__doc__ is not None
    assert re.search(r"\b(19|20)\d\d\b", module.__doc__), "the year of the paper"
    # Where in AB's paper its loss stands, could not be confirmed.
    assert name == "ab" or re.search(r"\b(equation|algorithm|section)s? \d", module.__doc__), "where in the paper it stands"
    assert kind.Options().weight > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dkdd", "there is no method 'dkdd'; did you mean dkd?"),
        ("KD", "did you mean kd?"),
        ("zzz", "write one of "),
        ("nowhere.py:Mine", "there is no file nowhere.py"),
    ],
)
def test_a_name_that_means_no_method_is_refused_with_what_to_write(name: str, says: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        check_name(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checking_a_name_imports_no_torch() -> None:
    program = """
import sys
from trainables.methods.registry import check_name
check_name("dkd")
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


OWN_METHOD = """
from trainables.methods.contract import Method, MethodBatch, ModelOutputs


class Mine(Method):
    terms = ("apart",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch):
        return {"apart": (student.logits_BK - teacher.logits_BK).square().mean(1)}


class Other:
    pass
"""


def test_a_method_of_ones_own_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_METHOD)
    name = f"{file}:Mine"
    check_name(name)
    assert option_key(name) == "Mine"
    assert load_method(name).terms == ("apart",)
    assert load_method(name) is load_method(name)
    assert load_method(name).Options is MethodOptions


def test_the_source_of_a_file_is_read_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_bytes(b"# \xc3\xa4\r\nraise SystemExit('it ran')\n")
    source = read_source(f"{file}:Mine")
    assert source is not None
    assert (source.path, source.text) == (file, "# ä\r\nraise SystemExit('it ran')\n")
    assert source.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert read_source("kd") is None


def test_a_source_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"^distill\.method: \S+/gone\.py cannot be read \(No such file or directory\)"):
        read_source(f"{tmp_path}/gone.py:Mine")
    (tmp_path / "latin.py").write_bytes(b"# \xe4")
    with pytest.raises(ExperimentError, match=r"^distill\.method: \S+/latin\.py is not UTF-8: save it as UTF-8$"):
        read_source(f"{tmp_path}/latin.py:Mine")


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (OWN_METHOD, "Other", "is not a method: inherit from"),
        (OWN_METHOD, "Missing", "cannot be loaded (AttributeError"),
        (OWN_METHOD + "\n\nMine.Options = dict", "Mine", "has Options that are not a MethodOptions"),
        (
            OWN_METHOD + "\n\ndel Mine.terms",
            "Mine",
            "has no tuple `terms`: add one with the names of the terms",
        ),
        (
            OWN_METHOD + '\n\nMine.init_terms = ("first",)',
            "Mine",
            "has init_terms, but Options without init_epochs: inherit them",
        ),
        ("import no_such_package", "Mine", "cannot be loaded (ModuleNotFoundError"),
        ("import sys; sys.exit(0)", "Mine", "cannot be loaded (SystemExit: 0)"),
        ("def (", "Mine", "cannot be loaded (SyntaxError"),
    ],
)
def test_a_file_that_holds_no_method_is_refused_in_one_line(tmp_path: Path, text: str, kind: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ExperimentError) as caught:
        load_method(f"{file}:{kind}")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_methods_of_a_file_are_of_one_module_and_files_of_one_name_of_two(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(OWN_METHOD.replace("class Other:\n    pass", "class Other(Mine):\n    pass"))
    first, second = (load_method(f"{files[0]}:{name}") for name in ("Mine", "Other"))
    assert issubclass(second, first)
    elsewhere = load_method(f"{files[1]}:Mine")
    assert elsewhere is not first
    for kind in (first, second, elsewhere):
        assert getattr(sys.modules[kind.__module__], kind.__name__) is kind


def test_a_file_that_failed_is_run_again_and_leaves_no_module(tmp_path: Path) -> None:
    file = tmp_path / "repaired.py"
    file.write_text(OWN_METHOD + "\nraise RuntimeError('not yet')")
    with pytest.raises(ExperimentError, match="not yet"):
        load_method(f"{file}:Mine")
    assert not [name for name in sys.modules if "repaired" in name]
    file.write_text(OWN_METHOD)
    assert load_method(f"{file}:Mine").terms == ("apart",)


def test_a_package_offers_a_method_by_its_entry_point(tmp_path: Path) -> None:
    with installed(tmp_path, "first", "apart", OWN_METHOD):
        check_name("apart")
        assert load_method("apart").terms == ("apart",)


@pytest.mark.parametrize(("name", "ours"), [("kd", "raydistill (trainables.methods.kd:KD)"), ("apart", "first (_first:Mine)")])
def test_a_name_that_two_packages_offer_is_refused_with_both(tmp_path: Path, name: str, ours: str) -> None:
    with installed(tmp_path, "first", "apart", OWN_METHOD), installed(tmp_path, "second", name, OWN_METHOD):
        check_name(name)
        with pytest.raises(ExperimentError) as caught:
            load_method(name)
        assert load_method("dkd") is load_method("dkd")
    message = str(caught.value)
    assert message.startswith(f"distill.method: {name} is declared by ")
    assert ours in message
    assert "second (_second:Mine)" in message
    assert "\n" not in message
