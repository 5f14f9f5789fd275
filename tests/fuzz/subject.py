"""What is done to each damaged input, and what may come of it."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from trainables.data.decode import UnreadableImageError
from trainables.errors import DataError

_LONGEST_LINE = 500


class Input(NamedTuple):
    """A damaged file, or several; None stands for one that is missing. `kind`: format and damage, for the table."""

    kind: tuple[str, str]
    files: dict[str, bytes | None]


class Subject(Protocol):
    """Something that reads what others wrote."""

    def make(self, index: int) -> Input:
        """The input of this number: a function of it and the seed alone."""

    def calls(self, given: Input) -> Iterator[Callable[[], list[str]]]:
        """What is tried with it; each returns an entry a sample that it read: "" or why that sample is unreadable.

        May raise UnreadableImageError and DataError; everything else is a fault of ours.
        """


def outcome(call: Callable[[], list[str]]) -> tuple[list[str], str | None]:
    """What a call gave, and what is wrong with that: None where each part is a sample or a named error in one line."""
    try:
        found = call()
    except (UnreadableImageError, DataError) as error:
        found = [f"{type(error).__name__}: {error}"]
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    for line in found:
        if "\n" in line or "\r" in line or len(line) > _LONGEST_LINE:
            return found, f"an error that is not one line: {line[:_LONGEST_LINE]!r}"
    return found, None


def reason(line: str) -> str:
    """The kind of a named error: without its paths, its numbers and what lies in parentheses or behind a colon."""
    kind, _, text = line.partition(": ")
    text = re.sub(r"^data\.path: \S+ ", "", text)
    text = re.sub(r"\S*/\S+", "FILE", text)
    text = re.sub(r"\(.*\)|\d[\d,]*|[:;].*", lambda found: "N" if found[0][0].isdigit() else "", text)
    return f"{kind}: {text.strip()}"
