"""Errors that a user can cause. Each ends a command with its one message: what is wrong, where, what to write instead."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Literal, Self

MAX_WORD, MAX_PATH = 300, 4096
MAX_LINE = 2000 + MAX_PATH
"""Most characters of a message's words, paths (the system's PATH_MAX) and lines: what a user wrote may be a megabyte."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for the tab and the end of a line, those that reverse the direction of what follows, and surrogates:
Python has one for each byte of a file's name that is no UTF-8, and no file, terminal or server takes it."""
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")

Interruption = Literal["preempted", "resized"]
INTERRUPTIONS: dict[Interruption, str] = {
    "preempted": "a node or a worker is about to end",
    "resized": "there is room for more workers",
}


class DistillError(Exception):
    """Base of every error that a user can cause and fix; its text is shown without a stack trace, long words shortened."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


def printable(text: str) -> str:
    """`text` with escapes for characters that command a terminal and for bytes that are no UTF-8, as in `caf\\xe9`.

    Names of files and classes may have any.
    """
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"  # of os.fsdecode
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else character.encode("unicode_escape").decode()


def bounded(message: str) -> str:
    """A printable message whose words and lines have a bounded length: a longer one is shortened to its beginning and its end."""
    message = printable(message)
    words = _LONG_WORD.sub(lambda word: _shortened(word[0], MAX_WORD) if _is_no_path(word[0]) else word[0], message)
    return "\n".join(_shortened(line, MAX_LINE) for line in words.split("\n"))


def _is_no_path(word: str) -> bool:
    return len(word) > MAX_PATH or not word.startswith("/")


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length * 2 // 3]}…{text[1 - length // 3 :]}"


def closest_matches(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names most like a wrong one, best first; for one too long to be a misspelling there are none."""
    return difflib.get_close_matches(name, dict.fromkeys(known), n=count, cutoff=cutoff) if len(name) <= MAX_WORD else []


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """What to write instead of a wrong name: the one most like it, or else `otherwise`."""
    similar = closest_matches(name, known)
    return f"did you mean {similar[0]}?" if similar else otherwise


def first_three(names: Sequence[str]) -> str:
    """The first names of a list that may be long, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


class ExperimentError(DistillError):
    """An experiment file or an override that cannot be carried out as written."""

    key = ""
    """The dotted key that is wrong, where it is one."""

    @classmethod
    def of_key(cls, key: str, problem: str) -> Self:
        """What is wrong with the value of a dotted key."""
        error = cls(f"{key}: {problem}")
        error.key = key
        return error


class DataError(DistillError):
    """Missing, empty, unreadable or inconsistent data."""


class NoLabelsError(DataError):
    """Images that are to have labels, and have none that are found."""


class DataUnavailableError(DataError):
    """Data on a server that did not answer for as long as it is waited for; it may later."""


class ModelError(DistillError):
    """A model name or weights that do not exist or do not fit."""


class CheckpointError(DistillError):
    """A checkpoint that is missing, damaged, of another model, or that cannot be written."""


class OtherClassesError(CheckpointError):
    """Weights whose classes are not the data's, or that have no classifier."""

    fact = ""
    """The message without what to write instead."""
    num_classes = 0
    """Theirs; 0: they have no classifier."""

    @classmethod
    def of(cls, fact: str, remedy: str, num_classes: int) -> Self:
        error = cls(f"{fact}: {remedy}")
        error.fact, error.num_classes = fact, num_classes
        return error


class AmbiguousClassesError(OtherClassesError):
    """Weights whose classes may be the data's, by names that do not tell."""


class ExportError(DistillError):
    """A format that cannot have a model, or a file that does not compute what the checkpoint does."""


class ClusterError(DistillError):
    """Ray, its resources or its storage are not enough for the request, or cannot be used."""


class StorageError(DistillError):
    """An object store that does not take or give what a run needs."""


class StorageUnavailableError(StorageError):
    """An object store that did not answer for as long as it is waited for; it may later."""


class TrainingError(DistillError):
    """Training stopped by one of its own checks: a loss that is not finite, replicas that disagree."""


class DeviceError(DistillError):
    """A GPU that was reserved for a worker and that torch cannot use."""


class TeacherServiceLostError(Exception):
    """The teacher actor that a request was sent to is gone or is being restarted; sending the request again is safe."""


class RecorderLostError(ClusterError):
    """The actor that writes the run's log hangs, or has died for good; the job may go on from its last checkpoint."""


class LoaderDiedError(Exception):
    """A worker's loader process is gone; the job may go on from its last checkpoint."""


class StageInterruptedError(Exception):
    """A stage ended on request after a checkpoint, to go on from there with other workers."""

    def __init__(self, reason: Interruption) -> None:
        super().__init__(INTERRUPTIONS[reason])
        self.reason: Interruption = reason

    def __reduce__(self) -> tuple[type[Self], tuple[Interruption]]:
        return type(self), (self.reason,)
