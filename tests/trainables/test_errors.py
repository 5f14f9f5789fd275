"""The length of a message."""

import pytest

from trainables.errors import MAX_PATH, MAX_WORD, DataError


@pytest.mark.parametrize("length", [MAX_WORD + 1, 3000, MAX_PATH])
def test_a_path_that_a_system_may_have_is_whole(length: int) -> None:
    path = "/" + "p" * (length - 1)
    assert str(DataError(f"{path} does not exist: restore it")) == f"{path} does not exist: restore it"


@pytest.mark.parametrize("word", ["k" * (MAX_WORD + 1), "/" + "k" * 100_000])
def test_other_long_words_are_shortened(word: str) -> None:
    message = str(DataError(f"{word} is not known"))
    assert "…" in message
    assert len(message) <= MAX_WORD + 20


def test_a_name_that_commands_the_terminal_is_escaped() -> None:
    assert str(DataError("a\x1b]0;own\x07.png, \u202egnp.exe: remove it")) == r"a\x1b]0;own\x07.png, \u202egnp.exe: remove it"
    assert str(DataError("tab\tline\nend ü")) == "tab\tline\nend ü"
