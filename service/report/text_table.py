"""Tables for the terminal."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table

from trainables.errors import printable


def text_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]] = (), *, left: Collection[str] = (), **options: Any
) -> Table:
    """A table whose columns are numbers, but for those in `left`. `options`: of rich's `Table`."""
    table = Table(title=title, title_justify="left", **options)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    return table
