"""Redact passwords, tokens and keys from everything written to files, logs, the terminal or MLflow."""

import logging
import os
import re
from typing import Any

from trainables.errors import printable

HIDDEN = "***"
_SCHEME = r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://"
_NAME = r"[\w.-]{0,40}(?:passw|pwd|secret|token|signature|credential|access_?key|api_?key)[\w.-]{0,40}"
_URI_PATTERNS = (
    # A login (RFC 3986, 3.2.1) whose password may be unquoted. HOST:PORT is not one, and hdfs://USER@HOST and
    # abfs://CONTAINER@ACCOUNT have no password there.
    (re.compile(rf'({_SCHEME})[^\s/?#:"<>]*:(?!\d*(?:[/?#"\s,]|$))[^\s"<>]*@', re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r'(https?://)[^\s/?#"<>]*@', re.IGNORECASE), rf"\1{HIDDEN}@"),
    # A secret in the query, such as a signature.
    (re.compile(rf"([?&](?:{_NAME}|sig|key|pass)=)(?!\*\*\*)[^&\s#\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
)
_HEADER = re.compile(r"(\bbearer\s+|\bauthorization:\s*\w+\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(?:PASS|SECRET|TOKEN|_KEY$|_KEY_ID$)(?!.*(?:_FILE|_PATH|_DIR)$)", re.IGNORECASE)
_MIN_LENGTH = 8
"""Shorter values of variables are flags and the like; redacting them would hide ordinary words."""


def redact(text: str) -> str:
    """Replace secrets with ***: those in URIs and headers, and the values of secret environment variables."""
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    return _HEADER.sub(rf"\1{HIDDEN}", redact_uris(text))


def redact_uris(text: str) -> str:
    """Replace logins in URIs, and keys, tokens and signatures in their queries, with ***."""
    if "://" in text:
        for pattern, replacement in _URI_PATTERNS:
            text = pattern.sub(replacement, text)
    return text


def _environment_secrets() -> list[str]:
    """Return values of variables such as AWS_SECRET_ACCESS_KEY, longest first, as one may be part of another."""
    found = [value for name, value in os.environ.items() if len(value) >= _MIN_LENGTH and _SECRET_VARIABLE.search(name)]
    return sorted(found, key=len, reverse=True)


def redact_values(value: Any) -> Any:
    """Redact secrets in URIs in a JSON-like `value`. The rest stays unchanged, as the value is read back."""
    if isinstance(value, str):
        return redact_uris(value)
    if isinstance(value, dict):
        return {key: redact_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value


def redact_record(record: logging.LogRecord) -> bool:
    """A logging filter that redacts messages and makes them printable."""
    record.msg, record.args = printable(redact(record.getMessage())), ()
    return True
