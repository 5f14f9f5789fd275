"""Error messages for wrong keys and values: one line each, with where the value came from and what to write instead."""

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from service.config.other_names import OTHER_NAMES
from trainables.config import Section
from trainables.errors import ExperimentError, closest_matches

MAX_LINES = 6

_VALID_VALUES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "model": "a section of keys",
    "dict": "a section of keys",
    "tuple": "a list",
    "list": "a list",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_long": "a list of {max_length}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
"""pydantic's type of error, or the word that it begins with → which values are valid."""


class ConfigProblems(ExperimentError):
    """Wrong keys and values: pairs of a dotted key and a line about it."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(line for _, line in problems))
        self.problems = problems


def with_sources(error: ExperimentError, where: str, sources: Mapping[str, str] | None = None) -> ExperimentError:
    """The error, each line of which begins with the source of its key, or else with `where`; `MAX_LINES` lines at most.

    A line about several keys begins with the source of the first one that is written in the file `where`.
    """
    sources, lines = sources or {}, []
    for key, line in error.problems if isinstance(error, ConfigProblems) else [(error.key, str(error))]:
        if not key:
            named = re.findall(r"\b\w+(?:\.\w+)+", line)
            key = next((each for each in named if sources.get(each, "").startswith(f"{where}:")), "")
        lines.append(f"{_source(key, sources, where)}: {line}")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"… and {len(lines) - MAX_LINES + 1} more"]
    return ExperimentError("\n".join(lines))


def _source(key: str, sources: Mapping[str, str], where: str) -> str:
    """The source of a dotted key or of the nearest section around it, else of a key below it, else `where`."""
    around = key
    while around and around not in sources:
        around = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", around)
    return sources[around] if around else next((source for name, source in sources.items() if name.startswith(f"{key}.")), where)


def known_keys(section: type[BaseModel]) -> list[str]:
    return [key for key, _ in _fields(section)]


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, Section):
                yield from _fields(part, f"{prefix}{name}.")


def nearest(key: str, keys: Sequence[str]) -> str:
    """`; did you mean KEY?` for a key that does not exist, or what to do instead, or nothing."""
    section, _, last = key.rpartition(".")
    other = OTHER_NAMES.get(key.replace("-", "_")) or OTHER_NAMES.get(last.replace("-", "_"), "")
    target = other.partition(",")[0]
    if target in keys:
        return f"; did you mean {other}?"
    if " " in target:
        return f"; {other}"
    for among in ([name for name in keys if name.rpartition(".")[0] == section], keys):
        names = dict.fromkeys(name.rpartition(".")[2] for name in among)
        # `batch_size` is near to `global_batch_size` by its words, not by its letters.
        contain = (name for name in names if (last in name and len(last) > 2) or (name in last and len(name) > 3))
        if found := next(iter(closest_matches(last, names)), None) or next(contain, None):
            such = [name for name in among if name.rpartition(".")[2] == found]
            return f"; did you mean {(closest_matches(key, such, cutoff=0) or such)[0]}?"
    return ""


def problems_of(error: ValidationError, section: type[BaseModel], *, prefix: str = "") -> ConfigProblems:
    """One problem for each wrong key or value of a `section`, whose own key is `prefix`, which ends with a dot."""
    keys = known_keys(section)
    free = {key for key, field in _fields(section) if get_origin(field.annotation) is dict}  # below them are users' own names
    grouped: dict[tuple[str, str], list[Any]] = {}
    for detail in error.errors(include_url=False):
        grouped.setdefault(_key(detail, keys, free), []).append(detail)  # a union gives an error for each of its branches
    return ConfigProblems([(prefix + key, _line(prefix + key, plain, found, keys)) for (key, plain), found in grouped.items()])


def _key(detail: Any, keys: Sequence[str], free: Container[str]) -> tuple[str, str]:
    """The dotted key as the user wrote it, without the names that pydantic gives to a union's branches; and as `keys` has it,
    without a list's indices and the user's own names."""
    loc: tuple[Any, ...] = detail["loc"]
    unknown = detail["type"] in ("extra_forbidden", "invalid_key")
    key = plain = named = ""
    for depth, part in enumerate(loc, start=1):
        below = f"{plain}.{part}".lstrip(".")
        if plain in free and plain != named and isinstance(part, str) and not part.startswith("["):
            key, named = f"{key}.{part}", plain
        elif below in keys or (unknown and depth == len(loc)):
            key, plain = f"{key}.{part}".lstrip("."), below
        elif isinstance(part, int) and (detail["type"] != "missing" or depth < len(loc)):
            key = f"{key}[{part}]"
    return key, plain


def _line(key: str, plain: str, details: list[Any], keys: Sequence[str]) -> str:
    first = details[0]
    kind, last = first["type"], first["loc"][-1:]
    if kind in ("extra_forbidden", "invalid_key"):
        if plain in keys:  # it exists, but the file has a name with dots
            return f"{key}: no such key: write it in its section, {key.replace('.', ': {')}: …{'}' * key.count('.')}"
        around, own = plain.rpartition(".")[0], key.rpartition(".")[0]
        return f"{key}: no such key{nearest(plain, keys).replace(f' {around}.', f' {own}.')}"
    if kind == "missing" and not isinstance(last[0], int):
        return f"{key}: missing: write it"
    prefix = f"{key}: " if key else ""
    if kind == "value_error":
        return f"{prefix}{first['msg'].removeprefix('Value error, ')}"
    valid = " or ".join(dict.fromkeys(expected(detail) for detail in details if detail["type"] != "missing"))
    if kind == "missing":  # values of a list: the last that is missing says how many there should be
        valid = f"a list of {details[-1]['loc'][-1] + 1}"
    value = first["input"]
    below = next((k for k in keys if k.startswith(f"{plain}.")), "") if isinstance(value, str) else ""
    hint = f"; did you mean {below}?" if below else ""
    if kind == "string_type" and type(value) in (int, float):
        hint = f""": write "{value}", after --set '"{value}"'"""
    return f"{prefix}must be {valid}, not {shown(value)}{hint}"


def expected(detail: Any) -> str:
    """The values that would have been valid in place of the one that a pydantic error is about."""
    kind = detail["type"]
    form = _VALID_VALUES.get(kind) or _VALID_VALUES.get(kind.partition("_")[0])
    if form is None:
        return str(detail["msg"].removeprefix("Input should be ")).replace("'", "")
    return form.format(**{name: f"{x:g}" if isinstance(x, float) else x for name, x in detail.get("ctx", {}).items()})


def shown(value: Any) -> str:
    """A value as it would stand in YAML, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
