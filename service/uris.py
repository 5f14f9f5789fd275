"""URIs as they are shown: whoever reads a page, a log or a terminal needs no password."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_password(text: str, uri: str | None = None) -> str:
    """`text` without the name and password that `uri` has (without `uri`: that it has itself, being one)."""
    try:
        login, at, _ = urlsplit(text if uri is None else uri).netloc.rpartition("@")
    except ValueError:  # "http://[": no URI
        return text
    return text.replace(login + at, "") if at else text
