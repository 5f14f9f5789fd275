"""One HTML page that needs nothing else: sections, tables and figures as text, styled for light, dark and narrow screens.

Every value is text from outside: it is escaped, and the page's policy runs no script but its own and fetches nothing.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from service.report.plotly_marks import Figure
from trainables.errors import ExperimentError
from trainables.rundir import write_text

_NUMBER = re.compile(r"[-−+]?[\d,]+(\.\d+)?([*%]|e[-+]\d+)?|–")


@dataclass(frozen=True)
class Shade:
    """A cell with a ground of its own: the larger the share, the stronger. `kind`: "best", "bad" (what went wrong) or neither."""

    text: str
    share: float
    kind: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class PageTable:
    """Cells as text. `marked` rows stand out; a `folded` table is opened by its reader; with `heads` rows have headings."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Shade]]
    caption: str = ""
    marked: frozenset[int] = frozenset()
    folded: bool = False
    heads: bool = False


@dataclass(frozen=True)
class PageSection:
    """A part of the page; one without tables and figures is not shown."""

    title: str
    tables: Sequence[PageTable] = ()
    figures: Sequence[Figure] = ()

    @classmethod
    def of(cls, title: str, *parts: PageTable | Figure | None) -> PageSection:
        """A section of the tables and figures that there are."""
        return cls(title, [one for one in parts if isinstance(one, PageTable)], [one for one in parts if isinstance(one, Figure)])


@dataclass(frozen=True)
class Page:
    kind: str
    title: str
    status: str
    lead: Sequence[str]
    sections: Sequence[PageSection]
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    command_title: str = ""
    command: str = ""
    foot: str = ""
    refresh_s: int | None = None  # the page loads itself again: while a run is running


def write(page: Page, path: Path) -> None:
    """Write the page, atomically. Raises ExperimentError: it cannot be written there."""
    try:
        write_text(path, render(page))
    except OSError as error:
        raise ExperimentError(f"{path} cannot be written: {error.strerror}; choose another file with --html FILE") from error


def render(page: Page) -> str:
    figures = [figure for section in page.sections for figure in section.figures]
    drawn = [{"id": figure.id, "traces": figure.traces, "layout": figure.layout} for figure in figures]
    return str(
        _template().render(
            page=page,
            nonce=secrets.token_urlsafe(16),
            style=_asset("page.css"),
            script=_asset("page.js"),
            numbers=numbers,
            figures=packed(as_json(drawn)) if drawn else "",
            library=plotly() if drawn else "",
        )
    )


def numbers(figure: Figure) -> PageTable:
    return PageTable(f"Numbers of: {figure.title}", figure.columns, figure.numbers)


def as_json(value: Any) -> bytes:
    """JSON without what is not finite: that is null."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def packed(content: bytes) -> str:
    """gzip in base64, which the browser unpacks: no text in it can end the element that it stands in, and it is small."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        # Nobody sees the seventh digit, and a page of many trials is half as large without them.
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


@functools.cache
def plotly() -> str:
    """plotly.js, 2 of its 4.8 MB: of the package only this file is needed."""
    return packed(resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes())


def _asset(name: str) -> str:
    return resources.files("service.report").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    environment = Environment(autoescape=True, trim_blocks=False)
    environment.tests["number_like"] = lambda cell: isinstance(cell, str) and _NUMBER.fullmatch(cell) is not None
    return environment.from_string(_asset("page.html"))
