"""Figures: a data frame as plotly.express draws it, with words and the numbers as a table.

Colors are Okabe and Ito's (2008), distinct for readers with any color vision and on light and dark ground; series differ in
their marks and dashes too. The color of axes, grids and text is left to the page, which knows whether it is light or dark.
"""

import html
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report.labels import number
from service.report.table import Table

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8F98"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MAX_SERIES = len(PALETTE)


@dataclass(frozen=True)
class Figure:
    """One figure: what to draw, its description for a reader who does not see it, and its numbers."""

    id: str
    title: str
    caption: str  # how to read it, and what it shows
    plot: Plot
    numbers: Table
    height: int = 380

    @property
    def alternative(self) -> str:
        """In place of the picture."""
        return f"{self.title}. {self.caption} The numbers are in the table below the figure."

    @property
    def traces(self) -> list[dict[str, Any]]:
        """As plotly.js takes them, arrays as lists."""
        return [_listed(trace.to_plotly_json()) for trace in self.plot.data]

    @property
    def layout(self) -> dict[str, Any]:
        found: dict[str, Any] = _listed(self.plot.layout.to_plotly_json())
        return found


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def figure(
    id: str, title: str, caption: str, plot: Plot, frame: pd.DataFrame, digits: Mapping[str, int] | None = None, height: int = 380
) -> Figure:
    """`frame`: the numbers, a row each; `digits` of a column other than 2."""
    return Figure(id, title, caption, plot, table_of(frame, f"Numbers of: {title}", digits or {}), height)


def table_of(frame: pd.DataFrame, title: str, digits: Mapping[str, int], caption: str = "") -> Table:
    """A row of text for each row of a frame; a dash for what is missing."""
    left = [str(name) for name in frame.columns if frame[name].map(type).isin([str]).any()]

    def cell(name: str, value: Any) -> str:
        return value if isinstance(value, str) else str(value) if isinstance(value, int) else number(value, digits.get(name, 2))

    columns = [[cell(str(name), value) for value in frame[name].tolist()] for name in frame.columns]
    return Table(title, list(map(str, frame.columns)), list(zip(*columns, strict=True)), caption, left=left)


def escaped(value: Any) -> Any:
    """Text from outside as plotly.js shows it unchanged: it reads tags such as <a href=…> in labels otherwise."""
    return html.escape(value, quote=False) if isinstance(value, str) else value


def draw(
    kind: Callable[..., Plot],
    frame: pd.DataFrame,
    x: str,
    y: str,
    series: str,
    order: Sequence[str] = (),
    colors: Mapping[str, str] | None = None,
    tips: Collection[str] = (),
    markers: bool = True,
    zero: bool = True,
    **options: Any,
) -> Plot:
    """A frame as `plotly.express.bar`, `line` or `scatter` draws it, the columns named as they are to be read.

    `series`: the column that tells series apart; the n-th of `order` has the n-th color, mark and dash in every figure, unless
    `colors` has one for it. `tips`: further columns of a tooltip. `zero`: the vertical axis begins there.
    """
    text = frame.rename(columns=escaped).map(escaped)
    labels = list(dict.fromkeys([*map(escaped, order), *text[escaped(series)]]))
    styles = [("color", "color_discrete_map", PALETTE)]
    styles += [("symbol", "symbol_map", SYMBOLS)] if kind is not express.bar and markers else []
    styles += [("line_dash", "line_dash_map", DASHES)] if kind is express.line else []
    for name, mapping, sequence in styles:
        options |= {name: escaped(series), mapping: dict(zip(labels, cycle(sequence), strict=False))}
    options["color_discrete_map"] |= colors or {}
    orders, tips = {escaped(series): labels}, list(map(escaped, tips))
    plot = kind(text, x=escaped(x), y=escaped(y), hover_data=tips, category_orders=orders, template="none", **options)
    plot.update_layout(legend_title_text=None, barmode="stack" if kind is express.bar else None)
    plot.update_yaxes(rangemode="tozero" if zero else "normal")
    if kind is not express.bar:
        plot.update_traces(marker_size=9)
    for axis, name in (("xaxis", x), ("yaxis", y)):
        if pd.api.types.is_string_dtype(frame[name]):
            plot.update_layout({axis: {"type": "category", "showgrid": False}})
    return plot


def add_band(plot: Plot, color: str, xs: Sequence[Any], low: Sequence[float], high: Sequence[float], group: str = "") -> None:
    """An area between two lines, behind them and without a name of its own."""
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    plot.add_scatter(
        x=[*xs, *reversed(xs)],
        y=[*high, *reversed(low)],
        mode="lines",
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},0.15)",
        line_width=0,
        hoverinfo="skip",
        showlegend=False,
        legendgroup=escaped(group),
    )
    plot.data = [plot.data[-1], *plot.data[:-1]]


def mark_ticks(plot: Plot, values: Collection[float]) -> None:
    """A tick at every value that was tried, where there are few; a logarithmic axis where they span a factor of four."""
    ticks = sorted(set(values))
    if len(ticks) <= 9:
        plot.update_xaxes(tickmode="array", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        plot.update_xaxes(type="log")
