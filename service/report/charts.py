"""Figures: a data frame as plotly.express draws it, with words and the numbers as a table.

Colors are Okabe and Ito's (2008), distinct for readers with any color vision and on light and dark ground; series differ in
their marks and dashes too. The color of axes, grids and text is left to the page, which knows whether it is light or dark.
"""

import html
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report.labels import DIGITS, number
from service.report.table import Table
from trainables.metrics.phases import ALL_PHASES

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8F98"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MAX_SERIES = len(PALETTE)
PHASE_COLORS = dict(zip(ALL_PHASES, (VERMILION, "#F0E442", SKY, BLUE, GREEN, PURPLE, ORANGE, "#000000", GREY), strict=True))


@dataclass(frozen=True)
class Figure:
    """One figure: what to draw, its description for a reader who does not see it, and its numbers."""

    id: str
    title: str
    caption: str  # how to read it, and what it shows
    plot: Plot
    numbers: Table
    height: int


def figure(id: str, title: str, caption: str, plot: Plot, frame: pd.DataFrame, height: int = 380) -> Figure:
    """`frame`: the numbers, a row each."""
    return Figure(id, title, caption, plot, table_of(frame, f"Numbers of: {title}"), height)


def table_of(frame: pd.DataFrame, title: str) -> Table:
    """A row of text for each row of a frame; a dash for what is missing."""

    def cell(name: str, value: Any) -> str:
        return str(value) if isinstance(value, str | int) else number(value, DIGITS.get(name, 2))

    heads = list(map(str, frame.columns))
    columns = [[cell(name, value) for value in frame[name].tolist()] for name in heads]
    left = [name for name in heads if frame[name].map(type).isin([str]).any()]
    return Table(title, heads, list(zip(*columns, strict=True)), left=left)


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


def add_band(plot: Plot, color: str, frame: pd.DataFrame, columns: Sequence[str], group: str = "") -> None:
    """An area over the first of three columns, between the others, behind the lines and without a name of its own."""
    xs, low, high = (frame[name].tolist() for name in columns)
    plot.add_scatter(
        x=[*xs, *reversed(xs)],
        y=[*high, *reversed(low)],
        mode="lines",
        fill="toself",
        fillcolor=f"{color}26",
        line_width=0,
        hoverinfo="skip",
        showlegend=False,
        legendgroup=escaped(group),
    )
    plot.data = [plot.data[-1], *plot.data[:-1]]


def reference_line(plot: Plot, y: float, text: str) -> None:
    """A dotted line across, with its meaning."""
    line = {"color": GREY, "dash": "dot", "width": 2}
    plot.add_hline(y=y, line=line, annotation_text=text, annotation_position="top right")


def mark_ticks(plot: Plot, values: Collection[float]) -> None:
    """A tick at every value that was tried, where there are few; a logarithmic axis where they span a factor of four."""
    ticks = sorted(set(values))
    if len(ticks) <= 9:
        plot.update_xaxes(tickmode="array", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        plot.update_xaxes(type="log")
