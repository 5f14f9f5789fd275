"""What figures are made of: plain mappings in the form that plotly.js draws, each with its words and its numbers.

Colors are Okabe and Ito's (2008), distinct for readers with any color vision and on light and dark ground; series differ in
their marks and dashes too. Text of the ground's own color (axes, grids, legends) is left to the page, which knows the ground.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.report.labels import short

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8F98"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MOST_SERIES = len(PALETTE)
Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure: what to draw, its description for a reader who does not see it, and its numbers as a table."""

    id: str
    title: str
    caption: str  # how to read it, and what it shows
    traces: list[Trace]
    layout: dict[str, Any]
    columns: Sequence[str]
    numbers: Sequence[Sequence[Any]] = ()
    height: int = 380

    @property
    def alternative(self) -> str:
        """In place of the picture."""
        return f"{self.title}. {self.caption} The numbers are in the table below the figure."


def unformatted(text: object) -> str:
    """Text from outside as plotly.js shows it unchanged: it reads tags such as <a href=…> in labels otherwise."""
    return html.escape(str(text), quote=False)


def hover(*parts: object) -> str:
    return "<br>".join(unformatted(part) for part in parts if part)


def band(color: str, xs: Sequence[Any], low: Sequence[float], high: Sequence[float], group: str = "") -> Trace:
    """An area between two lines, without a name of its own."""
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*xs, *reversed(xs)],
        "y": [*high, *reversed(low)],
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.15)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": group,
    }


def line(name: str, index: int, xs: Sequence[Any], ys: Sequence[Any], **more: Any) -> Trace:
    """A series of lines; `index` chooses its color and dash."""
    style = {"color": PALETTE[index % MOST_SERIES], "dash": DASHES[index % MOST_SERIES], "width": 2}
    return {"type": "scatter", "mode": "lines", "name": unformatted(name), "x": list(xs), "y": list(ys), "line": style, **more}


def dots(name: str, index: int, xs: Sequence[Any], ys: Sequence[Any], texts: Sequence[str], **more: Any) -> Trace:
    """A series of marks with a tooltip each; `index` chooses their color and shape."""
    mark = {"color": PALETTE[index % MOST_SERIES], "symbol": SYMBOLS[index % MOST_SERIES], "size": 9}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": unformatted(name),
        "x": list(xs),
        "y": list(ys),
        "marker": mark,
        "hovertext": list(texts),
        "hoverinfo": "text",
        **more,
    }


def joined_dots(name: str, index: int, xs: Sequence[Any], ys: Sequence[Any], texts: Sequence[str]) -> Trace:
    """Marks with a tooltip each, and lines between them."""
    return dots(name, index, xs, ys, texts) | {"mode": "lines+markers", "line": line("", index, [], [])["line"]}


def faint(name: str, xs: Sequence[Any], ys: Sequence[Any], texts: Sequence[str]) -> Trace:
    return dots(name, 0, xs, ys, texts) | {"marker": {"color": GREY, "symbol": "circle-open", "size": 6}, "opacity": 0.6}


def bars(name: str, color: str, labels: Sequence[Any], lengths: Sequence[float], texts: Sequence[str]) -> Trace:
    """A part of stacked bars, with a tooltip each."""
    trace = {"type": "bar", "name": name, "x": list(labels), "y": list(lengths), "hovertext": list(texts), "hoverinfo": "text"}
    return trace | {"marker": {"color": color}}


def flat_bars(wholes: Sequence[tuple[str, float, Mapping[str, float]]], colors: Mapping[str, str], unit: str) -> list[Trace]:
    """A horizontal bar for each label, whole and its parts, stacked; a part that is nothing in all of them is left out."""
    traces = []
    labels = [unformatted(label) for label, _, _ in wholes]
    for part, color in colors.items():
        lengths = [parts.get(part, 0.0) for _, _, parts in wholes]
        if any(length >= 0.001 for length in lengths):
            texts = [
                hover(label, f"{part}: {short(length)} {unit}, {length / whole:.0%}")
                for (label, whole, _), length in zip(wholes, lengths, strict=True)
            ]
            trace = bars(part, color, labels, lengths, texts)
            traces.append(trace | {"orientation": "h", "x": trace["y"], "y": trace["x"]})
    return traces


def flat_bars_layout(title: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": title}}, "yaxis": {"type": "category", "autorange": "reversed"}, "barmode": "stack"}


def whiskers(color: str, up: Sequence[float | None], down: Sequence[float | None] | None = None) -> dict[str, Any]:
    """Error bars of a series; None: no bar."""
    bars = {
        "type": "data",
        "array": [value or 0.0 for value in up],
        "color": color,
        "thickness": 1.5,
        "width": 4,
        "visible": True,
    }
    return bars if down is None else bars | {"symmetric": False, "arrayminus": [value or 0.0 for value in down]}


def numbers_axis(title: str, values: Sequence[float], log: bool = False) -> dict[str, Any]:
    """An axis with a tick at every value that was tried, where there are few."""
    axis: dict[str, Any] = {"title": {"text": unformatted(title)}}
    ticks = sorted(set(values))
    if len(ticks) <= 9:
        axis |= {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return axis | ({"type": "log"} if log else {})


def y_axis(title: str, zero: bool = True) -> dict[str, Any]:
    """A vertical axis, from zero by default."""
    return {"title": {"text": unformatted(title)}, "rangemode": "tozero" if zero else "normal"}
