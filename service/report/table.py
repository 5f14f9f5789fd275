"""A text table for both the terminal and the page; a terminal of any width shows whole words."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.text import Text

from trainables.errors import printable

TEXT_WIDTH, MAX_WORD_WIDTH = 14, 24
"""Text columns may be narrowed to TEXT_WIDTH or their longest word; words longer than MAX_WORD_WIDTH are broken."""


@dataclass(frozen=True)
class Shade:
    """A cell with a background that is stronger for a larger share. `kind` is "best", "bad" (failed) or ""."""

    text: str
    share: float
    kind: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Columns are numbers except those in `left`; a narrow terminal drops `optional` columns, in order.

    `marked` rows are highlighted, and rows in `sections` are followed by a line. On the page, a `folded` table is collapsed, and
    with `heads` the first cell of a row is a heading.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Shade]]
    caption: str = ""
    left: Collection[str] = ()
    optional: Sequence[str] = ()
    marked: Collection[int] = ()
    sections: Collection[int] = ()
    styles: Mapping[int, str] = field(default_factory=dict)  # rich styles of rows
    folded: bool = False
    heads: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(printable(self.title), style="italic")
        rows = [[printable(str(cell)) for cell in row] for row in self.rows]
        min_widths = [self._min_width(head, [row[index] for row in rows]) for index, head in enumerate(self.columns)]
        shown, left_out, width = list(range(len(self.columns))), list[str](), options.max_width
        for name in self.optional if console.is_interactive else ():
            if name in self.columns and _table_width(min_widths, shown) > width:
                left_out.append(name)
                shown.remove(self.columns.index(name))
        fits = _table_width(min_widths, shown) <= width
        yield self._grid(rows, shown, min_widths, width) if fits else Group(*self._paragraphs(rows))
        if self.caption:
            yield Text(self.caption, style="dim")
        if left_out and fits:
            yield Text(f"not shown at {width} columns: {', '.join(left_out)}; a wider terminal or a file has them", style="dim")

    def _min_width(self, head: str, cells: Sequence[str]) -> int:
        """Return the minimum width of a column, with whole words and unbroken numbers."""
        whole = max(map(cell_len, cells), default=0)
        if head in self.left or whole > MAX_WORD_WIDTH:
            words = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
            whole = max(words if words <= MAX_WORD_WIDTH else 0, min(whole, TEXT_WIDTH))
        return max([whole, *map(cell_len, _breakable(head).split())])

    def _grid(
        self, rows: Sequence[Sequence[str]], shown: Sequence[int], min_widths: Sequence[int], width: int
    ) -> rich.table.Table:
        """Lay out the `shown` columns; the width beyond their minimum goes first to those that need least of it."""
        needed = {i: max(map(cell_len, [self.columns[i], *(row[i] for row in rows)])) - min_widths[i] for i in shown}
        room, widths = width - _table_width(min_widths, shown), dict[int, int]()
        for rank, index in enumerate(sorted(shown, key=lambda index: needed[index])):
            more = min(needed[index], room // (len(shown) - rank))
            widths[index], room = min_widths[index] + more, room - more
        grid = rich.table.Table()
        for index in shown:
            head = self.columns[index]
            if cell_len(head) > widths[index]:
                head = textwrap.fill(_breakable(head), widths[index], break_on_hyphens=False).replace(". ", ".")
            justify: Literal["left", "right"] = "left" if self.columns[index] in self.left else "right"
            grid.add_column(head, justify=justify, width=widths[index], overflow="fold")
        for number, row in enumerate(rows):
            grid.add_row(*(row[index] for index in shown), style=self._style(number), end_section=number in self.sections)
        return grid

    def _paragraphs(self, rows: Sequence[Sequence[str]]) -> Iterator[Text | Padding]:
        """Yield each row as a heading with its cells below it."""
        first, *others = self.columns
        for number, (head, *cells) in enumerate(rows):
            yield Text(f"{first} {head}", style=self._style(number))
            texts = [f"{name} {cell}" for name, cell in zip(others, cells, strict=True) if cell]
            yield Padding(Text(", ".join(texts), style=self._style(number)), (0, 0, 0, 2), expand=False)

    def _style(self, number: int) -> str:
        return "bold green" if number in self.marked else self.styles.get(number, "")


def _table_width(widths: Sequence[int], shown: Sequence[int]) -> int:
    """Return the width of a table with the `shown` columns, including its frame."""
    return 1 + sum(widths[index] + 3 for index in shown)


def _breakable(head: str) -> str:
    """Allow a line break after each dot of a dotted key."""
    return head.replace(".", ". ")
