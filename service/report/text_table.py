"""Tables for the terminal, in whole words whatever its width."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import measure_renderables
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from trainables.errors import printable

MAX_MEASURED = 100_000
TEXT_WIDTH, MAX_WORD_WIDTH = 14, 24
"""To which a column of text may be narrowed, but for longer words; one longer than the second is broken, as a path is."""


@dataclass(frozen=True)
class FitColumn:
    """What a column needs: `least` characters for its words to be whole, `full` for none of its cells to be wrapped."""

    header: str
    justify: JustifyMethod
    cells: Sequence[RenderableType]
    least: int
    full: int

    @classmethod
    def measured(cls, column: Column, console: Console, options: ConsoleOptions) -> FitColumn:
        header, cells = str(column.header), [*column.cells]
        word, line = measure_renderables(console, options.update_width(MAX_MEASURED), cells)
        is_text = column.justify == "left" or line > MAX_WORD_WIDTH
        least = max(word if word <= MAX_WORD_WIDTH else 0, min(line, TEXT_WIDTH)) if is_text else line
        head = max(map(len, _breakable(header).split()), default=0)
        return cls(header, column.justify, cells, max(head, least), max(len(header), line))


class TextTable(Table):
    """A table that is narrowed in steps where its terminal is too narrow for it.

    First columns of text are wrapped, then those of `optional` are left out in that order, of which a line says so (a file
    has them all), and at last each row becomes a paragraph.
    """

    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [FitColumn.measured(column, console, options) for column in self.columns]
        if _framed(column.full for column in columns) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        left_out = list[str]()
        for name in self.optional if console.is_interactive else ():
            if _framed(column.least for column in columns) > options.max_width:
                left_out.append(name)
                columns = [column for column in columns if column.header != name]
        if _framed(column.least for column in columns) > options.max_width:
            yield from self._paragraphs()
            return
        yield self._narrowed(columns, options.max_width)
        if left_out:
            names = ", ".join(left_out)
            yield Text(f"not shown at {options.max_width} columns: {names}; a wider terminal or a file has them", style="dim")

    def _narrowed(self, columns: Sequence[FitColumn], max_width: int) -> Table:
        room = max_width - _framed(column.least for column in columns)
        widths = dict[str, int]()
        for rank, column in enumerate(sorted(columns, key=lambda column: column.full - column.least)):
            more = min(column.full - column.least, room // (len(columns) - rank))
            widths[column.header], room = column.least + more, room - more
        table = Table(title=self.title, title_justify="left", caption=self.caption, show_lines=self.show_lines)
        for column in columns:
            width = widths[column.header]
            table.add_column(_wrapped(column.header, width), justify=column.justify, width=width, overflow="fold")
        for row, *cells in zip(self.rows, *(column.cells for column in columns), strict=True):
            table.add_row(*cells, style=row.style, end_section=row.end_section)
        return table

    def _paragraphs(self) -> Iterable[Text | Padding]:
        first, *others = self.columns
        yield Text(str(self.title), style="italic")
        for row, head, *cells in zip(self.rows, *(column.cells for column in self.columns), strict=True):
            yield Text(f"{first.header} {head}", style=row.style or "")
            texts = [f"{column.header} {cell}" for column, cell in zip(others, cells, strict=True) if str(cell)]
            yield Padding(Text(", ".join(texts), style=row.style or ""), (0, 0, 0, 2), expand=False)
        if self.caption:
            yield Text(str(self.caption), style="dim")


def _framed(widths: Iterable[int]) -> int:
    """The width of a table with columns of these widths."""
    return 1 + sum(width + 3 for width in widths)


def _breakable(header: str) -> str:
    """A dotted key may be broken behind a dot."""
    return header.replace(".", ". ")


def _wrapped(header: str, width: int) -> str:
    return textwrap.fill(_breakable(header), width, break_on_hyphens=False).replace(". ", ".")


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]] = (),
    *,
    left: Collection[str] = (),
    optional: Sequence[str] = (),
    **options: Any,
) -> TextTable:
    """A table whose columns are numbers, but for those in `left`. `options`: of rich's `Table`.

    `optional`: columns that a narrow terminal may do without, the one that goes first first.
    """
    table = TextTable(title=title, title_justify="left", **options)
    table.optional = optional
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    return table
