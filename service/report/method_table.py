"""Tabulate all methods, or describe one with its options. Imports torch."""

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from service.report.table import Table
from trainables.config import MethodOptions
from trainables.errors import ExperimentError
from trainables.methods.contract import Method
from trainables.methods.registry import available_methods, load_method
from trainables.methods.select import SelectedMethod
from trainables.user_code import option_key

LOSS = "loss, added to task_weight·CE"
STAGES = "pipeline stages"
COLUMNS = ("name", "paper", LOSS, "weight", "task_weight", "taps", STAGES)


def method_table() -> Table:
    """Tabulate the named methods: paper, loss, default weights and taps, or why a method cannot be loaded."""
    rows = []
    for name in sorted(available_methods()):
        try:
            kind = load_method(name)
        except ExperimentError as error:
            cause = error.__cause__
            reason = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).removeprefix("distill.method: ")
            cells = [name, f"cannot be loaded: {reason}", *[""] * (len(COLUMNS) - 2)]
        else:
            paper, loss = (text.split("\n\n")[0] for text in _docs(kind))
            weight = _default(kind.Options.model_fields["weight"])
            cells = [name, paper, loss, weight, f"{kind.task_weight:g}", _taps(kind), in_stages(kind)]
        rows.append([" ".join(cell.split()) for cell in cells])
    left, optional = ("name", "paper", LOSS, "taps", STAGES), ("paper", STAGES, "task_weight")
    return Table("distill.method", COLUMNS, rows, left=left, optional=optional, sections=range(len(rows)))


def method_parts(name: str) -> Iterator[str | Table]:
    """Describe one method, a name or FILE.py:CLASS: its docstrings, default task weight and taps, and its options.

    Raises ExperimentError if it cannot be loaded.
    """
    kind = load_method(name)
    module, loss = _docs(kind)
    defaults = (
        f"task_weight {kind.task_weight:g}, unless distill.task_weight is set; taps: {_taps(kind)}; {STAGES}: {in_stages(kind)}"
    )
    options = inspect.cleandoc(kind.Options.__doc__ or "") if kind.Options is not MethodOptions else ""
    yield "\n\n".join(text for text in (f"{option_key(name)}: {loss}", module, defaults, options) if text) + "\n"
    columns = ("option", "default", "description")
    fields = kind.Options.model_fields.items()
    rows = [[option, _default(field), _description(kind.Options, option)] for option, field in fields]
    yield Table(f"distill.options.{option_key(name)}", columns, rows, left=columns)


def in_stages(kind: type[Method]) -> str:
    """Say whether a method can train a student in pipeline stages."""
    if SelectedMethod("", kind, kind.Options.model_construct()).whole_student:
        return "no"
    return "one micro-batch" if kind.requires.whole_batch else "yes"


def _docs(kind: type[Method]) -> tuple[str, str]:
    """Return the docstrings of a method's module and class."""
    texts = (sys.modules[kind.__module__].__doc__, kind.__doc__)
    return inspect.cleandoc(texts[0] or ""), inspect.cleandoc(texts[1] or "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default if field.default_factory is None else "…"
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _description(options: type[MethodOptions], name: str) -> str:
    """Return an option's description, or that of the option it overrides."""
    fields = (getattr(kind, "model_fields", {}).get(name) for kind in options.__mro__)
    return next((field.description for field in fields if field is not None and field.description), "")


def _taps(kind: type[Method]) -> str:
    defaults = (kind.Options.model_fields[f"{side}_taps"].default for side in ("student", "teacher"))
    student, teacher = (kind.taps if own is None else own for own in defaults)
    if student == teacher:
        return " ".join(student) or "logits"
    return f"student {' '.join(student)}, teacher {' '.join(teacher)}"
