"""One HTML page that needs nothing else: sections, tables and figures as text, styled for light, dark and narrow screens.

Every value is text from outside: it is escaped, and the page's policy runs no script but its own and fetches nothing.
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

from jinja2 import Environment
from plotly.utils import PlotlyJSONEncoder

from service.report.charts import Figure
from service.report.table import Table
from trainables.errors import ExperimentError
from trainables.rundir import write_text


@dataclass(frozen=True)
class Page:
    """`sections`: tables and figures by title; one without any is not shown."""

    kind: str
    title: str
    status: str = ""
    lead: Sequence[str] = ()
    notes: Sequence[str] = ()
    sections: Mapping[str, Sequence[Table | Figure | None]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
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
    sections = [
        (title, [part for part in parts if isinstance(part, Table)], [part for part in parts if isinstance(part, Figure)])
        for title, parts in page.sections.items()
    ]
    figures = [drawn(figure) for _, _, each in sections for figure in each]
    return str(
        _template().render(
            page=page,
            sections=sections,
            nonce=secrets.token_urlsafe(16),
            style=_asset("page.css"),
            script=_asset("page.js"),
            drawn=packed(json.dumps(figures).encode()) if figures else "",
            library=plotly() if figures else "",
        )
    )


def drawn(figure: Figure) -> dict[str, Any]:
    """What plotly.js takes: arrays as lists, null for what is not finite."""
    content = {"id": figure.id, "traces": [each.to_plotly_json() for each in figure.plot.data], "layout": figure.plot.layout}
    found: dict[str, Any] = json.loads(json.dumps(content, cls=PlotlyJSONEncoder))
    return found


def packed(content: bytes) -> str:
    """gzip in base64, which the browser unpacks: no text in it can end the element that it stands in, and it is small."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


@functools.cache
def plotly() -> str:
    """plotly.js, 2 of its 4.8 MB: of the package only this file is needed."""
    return packed(resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes())


def _asset(name: str) -> str:
    return resources.files("service.report").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    return Environment(autoescape=True).from_string(_asset("page.html"))
