"""Figures: a data frame drawn by plotly.express, with a caption and a table of the numbers.

Colors are Okabe and Ito's (2008), distinct for readers with any color vision and on light and dark backgrounds; series also
differ in their markers and dashes. The page sets the color of axes, grids and text, since it knows whether it is light or dark.
"""

import html
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report.table import Table
from service.report.tables import table_of
from trainables.metrics.phases import ALL_PHASES

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8F98"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MAX_SERIES = len(PALETTE)
PHASE_COLORS = dict(zip(ALL_PHASES, (VERMILION, "#F0E442", SKY, BLUE, GREEN, PURPLE, ORANGE, "#000000", GREY), strict=True))


@dataclass(frozen=True)
class Figure:
    """A plot with a caption that says how to read it, and its numbers, for readers who cannot see it."""

    id: str
    title: str
    caption: str
    plot: Plot
    frame: pd.DataFrame
    height: int = 380

    @property
    def numbers(self) -> Table:
        return table_of(self.frame, f"Numbers of: {self.title}")


def escaped(value: Any) -> Any:
    """Escape external text, since plotly.js interprets tags such as <a href=…> in labels."""
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
    """Draw a frame with `plotly.express.bar`, `line` or `scatter`; its column names are the labels.

    `series` is the column that separates series; the n-th value in `order` has the n-th color, marker and dash in every figure,
    unless `colors` overrides its color. `tips` are additional tooltip columns. `zero`: the vertical axis starts at 0.
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


def add_band(plot: Plot, color: str, frame: pd.DataFrame, columns: Sequence[str], group: str) -> None:
    """Fill the area between the second and third of three columns, over the first; behind the lines and not in the legend."""
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
    """Add a dotted horizontal line with a label."""
    line = {"color": GREY, "dash": "dot", "width": 2}
    plot.add_hline(y=y, line=line, annotation_text=text, annotation_position="top right")


def mark_ticks(plot: Plot, values: Collection[float]) -> None:
    """Put a tick at every value if there are few; use a logarithmic axis if they span a factor of four."""
    ticks = sorted(set(values))
    if len(ticks) <= 9:
        plot.update_xaxes(tickmode="array", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        plot.update_xaxes(type="log")
