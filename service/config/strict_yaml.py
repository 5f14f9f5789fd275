"""YAML as a user means it: keys are text, `1e-4` is a number, `on` is text, `None` is null, a duplicate key is refused, an error
is one line."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import yaml

from trainables.errors import ExperimentError

MAX_DEPTH = 50
MAX_VALUES = 100_000
"""Values of a document, those that its aliases repeat counted each time: nine lines can mean billions."""

_TAG = "tag:yaml.org,2002:"
_FORMS = {
    "null": r"~|null|Null|NULL|None|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+)",
    "float": r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
"""The forms of what is not text, as in YAML 1.2, and Python's None.

YAML 1.1, which PyYAML reads, takes 1e-4 for text, on, off, yes and no for booleans, 010 for eight, 1:30.5 for 90.5.
"""


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise ExperimentError(f"{_place(event.start_mark)}: `!` begins a YAML tag: leave it out, or quote the text")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:  # PyYAML would silently take the last
                    raise ExperimentError(f"{_place(key.start_mark)}: {key.value} is written twice: keep one")
                names.add(key.value)
                if key.tag != f"{_TAG}merge":
                    key.tag = f"{_TAG}str"
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 16 if "x" in text else 10)


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    pass


for _side in (_Loader, _Dumper):  # both, so that a text such as "1e5" or "true" is written in quotes
    _side.yaml_implicit_resolvers = {}
    for _name, _form in _FORMS.items():
        _side.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^(?:{_form})$"), None)


def parse(text: str, where: str) -> Any:
    """The value of a YAML document. Raises ExperimentError, see `parse_marked`."""
    return parse_marked(text, where)[0]


def parse_marked(text: str, where: str) -> tuple[Any, dict[str, str]]:
    """The value of a YAML document, and where its keys and elements are: `optim.lr`, `teachers[0].model` → `where:LINE:COLUMN`.

    Raises ExperimentError: not YAML, a key twice, a tag, a document without an end, or one whose aliases make it too large.
    """
    try:
        loader = _Loader(text)
        loader.name = where
        node = loader.get_single_node()
        if node is None:
            return None, {}
        if sum(1 for _ in islice(_marks(node), MAX_VALUES)) == MAX_VALUES:
            raise ExperimentError(f"{where}: its aliases (`*name`) repeat {MAX_VALUES:,} values: write out what is meant")
        value = loader.construct_document(node)  # also replaces `<<` in each node by the keys that it merges
        return value, dict(_marks(node))
    except RecursionError as error:
        raise ExperimentError(f"{where}: nested more than {MAX_DEPTH} deep: an experiment needs three levels") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise ExperimentError(f"{_place(mark) if mark else where}: not YAML: {problem}") from error
    except ValueError as error:  # of `int`: thousands of digits
        raise ExperimentError(f"{where}: a value cannot be read: {str(error).partition(';')[0]}") from error


def _place(mark: Any) -> str:
    return f"{mark.name}:{mark.line + 1}:{mark.column + 1}"


def _marks(node: yaml.Node, name: str = "", depth: int = 1) -> Iterator[tuple[str, str]]:
    """Where each key and element is. Raises RecursionError: nested too deeply, as one that contains itself (`a: &a [*a]`) is."""
    if depth > MAX_DEPTH:
        raise RecursionError
    parts: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        parts = [(f"{name}.{key.value}".lstrip("."), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(f"{name}[{number}]", value, value) for number, value in enumerate(node.value)]
    for below, at, value in parts:
        yield below, _place(at.start_mark)
        yield from _marks(value, below, depth + 1)


def dump(value: Any) -> str:
    """YAML that `parse` reads back as the same value; keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)
