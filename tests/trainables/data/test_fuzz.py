"""A few of the damaged inputs of `python -m tests.fuzz`, and that it finds what it looks for."""

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fuzz.__main__ import keep
from tests.fuzz.images import Images
from tests.fuzz.run import Figures, run
from tests.fuzz.shards import Shards
from tests.fuzz.subject import outcome, reason
from tests.waiting import wait_until
from trainables.data.decode import UnreadableImageError
from trainables.errors import DataError


@pytest.mark.parametrize(("subject", "count"), [("images", 200), ("shards", 100)])
def test_damaged_inputs_give_samples_or_named_errors_within_the_bounds(subject: str, count: int) -> None:
    figures = run(subject, 1, 0, count)
    assert figures.wrong == {}
    of_all = figures.kinds["all"]
    assert of_all.inputs == count
    assert min(of_all.samples, of_all.errors) > count / 5


def test_an_input_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    first, again = Images(3), Images(3)
    assert [first.make(index) for index in (7, 2)] == [again.make(index) for index in (7, 2)]
    assert Images(4).make(7) != first.make(7)
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    one, two = (Shards(3, folder) for folder in folders)
    assert [one.make(index).kind for index in range(20)] == [two.make(index).kind for index in range(20)]


def test_failing_inputs_are_stored(tmp_path: Path) -> None:
    keep("images", 3, [7, 9], tmp_path)
    assert (tmp_path / "images-3-7" / "image").read_bytes() == Images(3).make(7).files["image"]
    keep("shards", 3, [1], tmp_path)
    assert (tmp_path / "shards-3-1").is_dir()


def _raise(error: BaseException) -> Callable[[], list[str]]:
    def call() -> list[str]:
        raise error

    return call


def test_only_samples_and_one_line_of_named_errors_are_no_fault() -> None:
    assert outcome(lambda: ["", "UnreadableImageError: empty file"]) == (["", "UnreadableImageError: empty file"], None)
    assert outcome(_raise(UnreadableImageError("empty file"))) == (["UnreadableImageError: empty file"], None)
    assert outcome(_raise(DataError("data.path: x is not there"))) == (["DataError: data.path: x is not there"], None)
    assert outcome(_raise(KeyError("x"))) == ([], "KeyError: 'x'")
    assert outcome(_raise(MemoryError())) == ([], "MemoryError: ")
    assert "not one line" in str(outcome(_raise(DataError("two\nlines")))[1])
    assert "not one line" in str(outcome(lambda: ["x" * 9999])[1])
    assert outcome(_raise(DataError("x" * 9999)))[1] is None  # errors of ours bound their own length


def test_reasons_are_counted_without_what_is_particular_to_an_input() -> None:
    assert reason("UnreadableImageError: truncated or damaged: broken (x)") == "UnreadableImageError: truncated or damaged"
    assert reason("DataError: data.path: /a/b.arrow has 1,234 bytes, and its index says 5; copy it") == (
        "DataError: has N bytes, and its index says N"
    )


def test_a_process_that_dies_is_the_fault_of_the_input_that_it_was_at() -> None:
    found: list[Figures] = []
    thread = threading.Thread(target=lambda: found.append(run("images", 1, 0, 60)))
    thread.start()
    wait_until(_children)[0].kill()
    thread.join()
    (figures,) = found
    (problem,) = figures.wrong.values()
    assert problem.startswith("the process died of signal 9")
    assert figures.kinds["all"].inputs == 59


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tests.fuzz.child" in child.cmdline()]
