"""One HTML page that needs nothing else: sections, tables and figures as text, styled for light, dark and narrow screens.

Every value is text from outside: it is escaped, and the page's policy runs no script but its own and fetches nothing.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment

from service.report.charts import Figure
from service.report.table import Table
from trainables.errors import ExperimentError
from trainables.rundir import write_text


@dataclass(frozen=True)
class PageSection:
    """A part of the page; one without tables and figures is not shown."""

    title: str
    parts: Sequence[Table | Figure | None]

    @property
    def tables(self) -> list[Table]:
        return [part for part in self.parts if isinstance(part, Table)]

    @property
    def figures(self) -> list[Figure]:
        return [part for part in self.parts if isinstance(part, Figure)]


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
            figures=packed(as_json(drawn)) if drawn else "",
            library=plotly() if drawn else "",
        )
    )


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
    return Environment(autoescape=True).from_string(_asset("page.html"))
