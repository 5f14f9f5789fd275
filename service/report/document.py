"""A self-contained HTML page of sections, tables and figures, styled for light, dark and narrow screens.

All values are untrusted text: they are escaped, and the page's policy runs only its own scripts and fetches nothing.
"""

import base64
import functools
import gzip
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template
from plotly.utils import PlotlyJSONEncoder

from service.report.charts import Figure
from service.report.table import Table
from trainables.errors import ExperimentError
from trainables.rundir import write_text

Sections = dict[str, Sequence[Table | Figure | None]]
"""Titles to tables and figures; empty ones are not shown."""


@dataclass(frozen=True)
class Page:
    kind: str
    title: str
    status: str = ""
    lead: Sequence[str] = ()
    notes: Sequence[str] = ()
    sections: Sections = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    foot: str = ""
    refresh_s: int | None = None  # how often the page reloads itself, while a run is running


def write(page: Page, path: Path) -> None:
    """Write the page atomically. Raises ExperimentError if `path` cannot be written."""
    try:
        write_text(path, render(page))
    except OSError as error:
        raise ExperimentError(f"{path} cannot be written: {error.strerror}; choose another file with --html FILE") from error


def render(page: Page) -> str:
    figures = [drawn(part) for parts in page.sections.values() for part in parts if isinstance(part, Figure)]
    content, library = (packed(json.dumps(figures).encode()), plotly()) if figures else ("", "")
    return str(_template().render(page=page, nonce=secrets.token_urlsafe(16), drawn=content, library=library))


def drawn(figure: Figure) -> Any:
    """Return the input of plotly.js: arrays as lists, null for non-finite numbers."""
    content = {"id": figure.id, "traces": [each.to_plotly_json() for each in figure.plot.data], "layout": figure.plot.layout}
    return json.loads(json.dumps(content, cls=PlotlyJSONEncoder))


def packed(content: bytes) -> str:
    """Encode as base64 of gzip, which the browser unpacks: it is small, and cannot contain a closing tag."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


@functools.cache
def plotly() -> str:
    """Return plotly.js, packed from 4.8 to 2 MB."""
    return packed(resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes())


@functools.cache
def _template() -> Template:
    return Environment(autoescape=True, loader=PackageLoader("service", "report")).get_template("page.html")
