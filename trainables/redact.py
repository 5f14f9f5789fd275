"""Passwords, tokens and keys are taken out of whatever is written to a file, a log, the terminal or MLflow."""

import logging
import os
import re
from typing import Any

from trainables.errors import printable

HIDDEN = "***"
_SCHEME = r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://"
_NAME = r"[\w.-]{0,40}(?:passw|pwd|secret|token|signature|credential|access_?key|api_?key)[\w.-]{0,40}"
_URI_PATTERNS = (
    # A login, see RFC 3986, 3.2.1, of a password that may be unquoted; HOST:PORT is none, and hdfs://USER@HOST and
    # abfs://CONTAINER@ACCOUNT have no password there.
    (re.compile(rf'({_SCHEME})[^\s/?#:"<>]*:(?!\d*(?:[/?#"\s,]|$))[^\s"<>]*@', re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r'(https?://)[^\s/?#"<>]*@', re.IGNORECASE), rf"\1{HIDDEN}@"),
    # A signed or parametrised one.
    (re.compile(rf"([?&](?:{_NAME}|sig|key|pass)=)(?!\*\*\*)[^&\s#\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
)
_HEADER = re.compile(r"(\bbearer\s+|\bauthorization:\s*\w+\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(?:PASS|SECRET|TOKEN|_KEY$|_KEY_ID$)(?!.*(?:_FILE|_PATH|_DIR)$)", re.IGNORECASE)
_MIN_LENGTH = 8
"""Shorter values of variables are flags and the like: hiding them would hide the word wherever it stands."""


def redact(text: str) -> str:
    """A message with *** for secrets: those of URIs and headers, and the values of the environment's secret variables."""
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    return _HEADER.sub(rf"\1{HIDDEN}", redact_uris(text))


def redact_uris(text: str) -> str:
    """`text` with *** for the logins in its URIs, and for keys, tokens and signatures in their queries."""
    if "://" in text:
        for pattern, replacement in _URI_PATTERNS:
            text = pattern.sub(replacement, text)
    return text


def _environment_secrets() -> list[str]:
    """Values of variables such as AWS_SECRET_ACCESS_KEY; the longest first, as one may be a part of another."""
    found = [value for name, value in os.environ.items() if len(value) >= _MIN_LENGTH and _SECRET_VARIABLE.search(name)]
    return sorted(found, key=len, reverse=True)


def redact_values(value: Any) -> Any:
    """`value`, as JSON has it, without the secrets of URIs. Whatever else is in it stays as it is: it will be read again."""
    if isinstance(value, str):
        return redact_uris(value)
    if isinstance(value, dict):
        return {key: redact_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value


def redact_record(record: logging.LogRecord) -> bool:
    """A filter of a logger: redacts what it logs, and makes it printable."""
    record.msg, record.args = printable(redact(record.getMessage())), ()
    return True
