"""The documents lead where they say: links, anchors, pages of the site, and paths of this repository."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
PATH = re.compile(r"`((?:service|trainables|tests|docs)/[\w./-]*)`")


def prose(page: Path) -> str:
    """A page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert not [path for path in PATH.findall(prose(page)) if not (ROOT / path).exists()]


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for entry in nav for pages in (entry.values() if isinstance(entry, dict) else [[entry]]) for page in pages]
    assert sorted(listed) == sorted(page.name for page in PAGES if page.parent == ROOT / "docs")
