"""A page as a parser sees it: every element closed where it belongs, what it says, what it would fetch."""

import base64
import gzip
import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "hr", "img", "input"}
RAW = ("script", "style")


class Parsed(HTMLParser):
    """Raises AssertionError where the page is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self._script = ""
        self.tables: dict[str, list[list[str]]] = {}
        """Rows of cells, headings first, by the name of the table's region."""
        self.folded: set[str] = set()
        """Names of the tables that a reader has to open."""
        self._table = ""
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in {tag}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or "code"
        elif tag == "div" and dict(attrs).get("role") == "region":
            self._table = dict(attrs)["aria-label"] or ""
            self.tables[self._table] = []
            if "details" in self.open:
                self.folded.add(self._table)
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("th", "td"):
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self._script] = data
        elif not self.open or self.open[-1] not in RAW:
            self.words.append(data)
            if self.open and self.open[-1] in ("th", "td"):
                self.tables[self._table][-1][-1] += data

    @property
    def text(self) -> str:
        """What a reader sees, without figures."""
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> list[dict[str, Any]]:
        """What plotly.js is given."""
        if "figures" not in self.scripts:
            return []
        found: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(self.scripts["figures"])))
        return found

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def fetched(self) -> list[str]:
        """Addresses that the page would load something from."""
        names = ("src", "href", "data", "action", "poster", "srcset")
        return [attributes[name] or "" for _, attributes in self.elements for name in names if name in attributes]
