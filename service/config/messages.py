"""Error messages for wrong keys and values: one line each, with where the value came from and what to write instead."""

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from service.config.other_names import OTHER_NAMES
from trainables.config import Section
from trainables.errors import closest_matches

MAX_LINES = 6
SETTABLE = "write it in the file or --set {key}=…"
"""What to do about a key that an experiment lacks."""

_VALID_VALUES = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_unicode": "text",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "literal_error": "{expected}",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "dict_type": "a section of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_long": "a list of {max_length}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
"""pydantic's type of error → which values are valid."""


class ConfigProblems(Exception):
    """What is wrong with a configuration: pairs of a dotted key, "" where it is a rule about several, and a line about it."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(line for _, line in problems))
        self.problems = tuple(problems)

    def text(self, where: str, sources: Mapping[str, str] | None = None) -> str:
        """One line a problem, `MAX_LINES` at most; each begins with the source of its key, or else with `where`.

        That of a rule is the first key in its line that is written in the file `where`.
        """
        sources = sources or {}
        lines = []
        for key, line in self.problems:
            if not key:
                named = re.findall(r"\b\w+(?:\.\w+)+", line)
                key = next((each for each in named if sources.get(each, "").startswith(f"{where}:")), "")
            lines.append(f"{source_of_key(key, sources, where)}: {line}")
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 :] = [f"… and {len(lines) - MAX_LINES + 1} more"]
        return "\n".join(lines)


def known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    return (key for key, _ in _fields(section, prefix))


def _free_keys(section: type[BaseModel]) -> set[str]:
    """The dotted keys below which users write names of their own, such as those of methods."""
    return {key for key, field in _fields(section) if get_origin(field.annotation) is dict}


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
    same_section = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    others = [k for k in keys if k not in same_section.values() and not key.startswith(f"{k}.")]
    if found := [same_section[name] for name in closest_matches(last, same_section)] or closest_matches(key, others, cutoff=0.75):
        return f"; did you mean {found[0]}?"
    # `batch_size` is near to `global_batch_size` by its words, not by its letters.
    by_name = {k.rpartition(".")[2]: k for k in keys}
    contained = [k for name, k in by_name.items() if (last in name and len(last) > 2) or (name in last and len(name) > 3)]
    found = closest_matches(last, by_name)
    if contained or found:
        return f"; did you mean {contained[0] if contained else by_name[found[0]]}?"
    return ""


def problems_of(
    error: ValidationError, section: type[BaseModel], *, prefix: str = "", missing: str = "write it in the file"
) -> ConfigProblems:
    """One problem for each wrong key or value of a `section`, whose own key is `prefix`, which ends with a dot.

    `missing`: what to do about a `{key}`, or an option `{name}`, that is not there.
    """
    keys, free = list(known_keys(section)), _free_keys(section)
    grouped: dict[tuple[str, str], list[Any]] = {}
    for detail in error.errors(include_url=False):
        grouped.setdefault(_key(detail, keys, free), []).append(detail)  # a union gives an error for each of its branches
    return ConfigProblems(
        [(prefix + key, _line(prefix + key, plain, details, keys, missing)) for (key, plain), details in grouped.items()]
    )


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


def source_of_key(key: str, sources: Mapping[str, str], where: str) -> str:
    """The source of a dotted key or of the nearest section around it, else of a key below it, else `where`."""
    around = key
    while around and around not in sources:
        around = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", around)
    return sources[around] if around else next((source for name, source in sources.items() if name.startswith(f"{key}.")), where)


def _line(key: str, plain: str, details: list[Any], keys: Sequence[str], missing: str) -> str:
    first = details[0]
    kind, last = first["type"], first["loc"][-1:]
    if kind in ("extra_forbidden", "invalid_key"):
        around, own = plain.rpartition(".")[0], key.rpartition(".")[0]
        return f"{key}: no such key{nearest(plain, keys).replace(f' {around}.', f' {own}.')}"
    if kind == "missing" and not isinstance(last[0], int):
        return f"{key}: missing: " + ("write it in the list" if "[" in key else missing.format(key=key, name=last[0]))
    if kind == "value_error":
        return f"{key + ': ' if key else ''}{first['msg'].removeprefix('Value error, ')}"
    valid = " or ".join(dict.fromkeys(expected(detail) for detail in details if detail["type"] != "missing"))
    if kind == "missing":  # values of a list: the last that is missing says how many there should be
        valid = f"a list of {details[-1]['loc'][-1] + 1}"
    below = next((k for k in keys if k.startswith(f"{plain}.")), "") if isinstance(first["input"], str) else ""
    return f"{key}: must be {valid}, not {shown(first['input'])}" + (f"; did you mean {below}?" if below else "")


def expected(detail: Any) -> str:
    """The values that would have been valid in place of the one that a pydantic error is about."""
    form = _VALID_VALUES.get(detail["type"])
    if form is None:
        return str(detail["msg"].removeprefix("Input should be "))
    limits = {name: int(x) if isinstance(x, float) and x.is_integer() else x for name, x in detail.get("ctx", {}).items()}
    return form.format(**limits).replace("'", "")


def shown(value: Any) -> str:
    """A value as it would stand in YAML, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a date, or something that contains itself
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}…"
