"""Errors that a user can cause. Each ends a command with one message: what is wrong, where, and what to write instead."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Literal, Self

MAX_WORD, MAX_PATH = 300, 4096
MAX_LINE = 2000 + MAX_PATH
"""Maximum characters of a message's words, paths (the system's PATH_MAX) and lines: user input may be a megabyte long."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the text's direction, and surrogates. Python uses surrogates
for bytes of file names that are not UTF-8; files, terminals and servers reject them."""
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")

Interruption = Literal["preempted", "resized"]
INTERRUPTIONS: dict[Interruption, str] = {
    "preempted": "a node or a worker is about to end",
    "resized": "there is room for more workers",
}


class DistillError(Exception):
    """Base of every error that a user can cause and fix; shown without a stack trace and with long words shortened."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


def printable(text: str) -> str:
    """Escape terminal control characters and bytes that are not UTF-8, as in `caf\\xe9`; file and class names may have them."""
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"  # from os.fsdecode
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else character.encode("unicode_escape").decode()


def bounded(message: str) -> str:
    """Make a message printable and shorten overlong words and lines to their beginning and end."""
    message = printable(message)
    words = _LONG_WORD.sub(lambda word: word[0] if _is_path(word[0]) else _shortened(word[0], MAX_WORD), message)
    return "\n".join(_shortened(line, MAX_LINE) for line in words.split("\n"))


def _is_path(word: str) -> bool:
    return len(word) <= MAX_PATH and word.startswith("/")


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length * 2 // 3]}…{text[1 - length // 3 :]}"


def closest_matches(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names most similar to a wrong one, best first; none if it is too long to be a misspelling."""
    return difflib.get_close_matches(name, dict.fromkeys(known), n=count, cutoff=cutoff) if len(name) <= MAX_WORD else []


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Suggest the known name most similar to a wrong one, or else `otherwise`."""
    similar = closest_matches(name, known)
    return f"did you mean {similar[0]}?" if similar else otherwise


def first_three(names: Sequence[str]) -> str:
    """List the first three names, and the number of others, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


class ExperimentError(DistillError):
    """An experiment file or an override that cannot be run as written."""

    key = ""
    """The dotted key that is wrong, if it is one key."""

    @classmethod
    def of_key(cls, key: str, problem: str) -> Self:
        """Report a problem with the value of a dotted key."""
        error = cls(f"{key}: {problem}")
        error.key = key
        return error


class DataError(DistillError):
    """Missing, empty, unreadable or inconsistent data."""


class NoLabelsError(DataError):
    """Images that need labels, for which none were found."""


class DataUnavailableError(DataError):
    """Data on a server that did not answer within the retry limit; it may later."""


class ModelError(DistillError):
    """A model name or weights that do not exist or do not fit."""


class CheckpointError(DistillError):
    """A checkpoint that is missing or damaged, belongs to another model, or cannot be written."""


class OtherClassesError(CheckpointError):
    """Weights whose classes are not the data's, or that have no classifier."""

    fact = ""
    """The message without the remedy."""
    num_classes = 0
    """Classes of the weights; 0 if they have no classifier."""

    @classmethod
    def of(cls, fact: str, remedy: str, num_classes: int) -> Self:
        error = cls(f"{fact}: {remedy}")
        error.fact, error.num_classes = fact, num_classes
        return error


class AmbiguousClassesError(OtherClassesError):
    """Weights whose classes may be the data's; their names do not show it."""


class ExportError(DistillError):
    """A format that cannot represent a model, or an exported file that disagrees with its checkpoint."""


class ClusterError(DistillError):
    """Ray, its resources or its storage are insufficient for the request, or cannot be used."""


class StorageError(DistillError):
    """An object store that cannot read or write what a run needs."""


class StorageUnavailableError(StorageError):
    """An object store that did not answer within the retry limit; it may later."""


class TrainingError(DistillError):
    """Training stopped by one of its own checks, such as a non-finite loss or replicas that disagree."""


class DeviceError(DistillError):
    """A GPU that was reserved for a worker but that torch cannot use."""


class TeacherServiceLostError(Exception):
    """A request's teacher actor is gone or is being restarted; the request can safely be sent again."""


class RecorderLostError(ClusterError):
    """The actor that writes the run's log hangs or has died for good; the job can resume from its last checkpoint."""


class LoaderDiedError(Exception):
    """A worker's loader process died; the job can resume from its last checkpoint."""


class EvaluatorDiedError(Exception):
    """The evaluator of `eval.asynchronous` has died for good; the job can resume from its last checkpoint, and evaluates that."""


class StageInterruptedError(Exception):
    """A stage ended on request after a checkpoint, to continue from it with other workers."""

    def __init__(self, reason: Interruption) -> None:
        super().__init__(INTERRUPTIONS[reason])
        self.reason: Interruption = reason

    def __reduce__(self) -> tuple[type[Self], tuple[Interruption]]:
        return type(self), (self.reason,)
