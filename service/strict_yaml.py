"""YAML as a user means it: a key written twice is refused, `1e-4` is a number, and every mistake is one line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from trainables.errors import ExperimentError

MAX_DEPTH = 50

# YAML 1.1, which PyYAML reads, takes 1e-4 and 1.5e3 for text; YAML 1.2 and every user take them for numbers.
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"


class _TwiceError(yaml.MarkedYAMLError):
    """A key that stands twice in one mapping: PyYAML would silently take the last."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _TwiceError(problem=f"{key.value} is written twice: keep one", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    pass


for _side in (_Loader, _Dumper):  # both, so that a text such as "1e5" is written in quotes
    _side.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


def parse(text: str, where: str) -> Any:
    """The value of a YAML document.

    Raises:
        ExperimentError: not YAML, a key twice, a value that does not exist (a 30th of February), or a document without an end.
    """
    try:
        value = yaml.load(text, _Loader)
        _check_depth(value)
    except RecursionError as error:
        raise ExperimentError(f"{where}: nested more than {MAX_DEPTH} deep: an experiment needs three levels") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise ExperimentError(f"{place}: {'' if isinstance(error, _TwiceError) else 'not YAML: '}{problem}") from error
    except ValueError as error:  # PyYAML hands on what `int` and `date` say
        raise ExperimentError(f"{where}: a value cannot be read: {str(error).partition(';')[0]}") from error
    return value


def dump(value: Any) -> str:
    """YAML that `parse` reads back as the same value; keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def _check_depth(value: Any, depth: int = 0) -> None:
    """Raises RecursionError where a value is nested too deeply, as one that contains itself (`a: &a [*a]`) is."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, depth + 1)
