"""Passwords, tokens and keys are taken out of whatever is written to a file, a log, the terminal or MLflow."""

import logging
import os
import re
from typing import Any

from trainables.errors import printable

HIDDEN = "***"
_NAME = r"[\w.-]*(?:passw|pwd|secret|token|signature|credential|access_?key|api_?key)[\w.-]*"
_PATTERNS = (
    # The login of a URI, see RFC 3986, 3.2.1; hdfs://USER@HOST and abfs://CONTAINER@ACCOUNT have no password there.
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/?#:]*:[^\s/?#]*@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r"(https?://)[^\s/?#]*@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    # A signed or parametrised URI.
    (re.compile(rf"([?&](?:{_NAME}|sig|key|pass)=)(?!\*\*\*)[^&\s#]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(Bearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
)
_SECRET_VARIABLE = re.compile(r"PASSW|SECRET|TOKEN|ACCESS_KEY|API_KEY|PRIVATE_KEY", re.IGNORECASE)
_SHORTEST = 8
"""Shorter values of variables are flags and the like: hiding them would hide the word wherever it stands."""


def redact(text: str) -> str:
    """`text` with *** for logins in URIs, keys in their queries, and values of the environment's secret variables."""
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    if "://" in text or "=" in text or "Bearer" in text:
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
    return text


def _environment_secrets() -> list[str]:
    """Values of variables such as AWS_SECRET_ACCESS_KEY; the longest first, as one may be a part of another."""
    found = [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and value[0] not in "/~." and _SECRET_VARIABLE.search(name)
    ]
    return sorted(found, key=len, reverse=True)


def redact_values(value: Any) -> Any:
    """`value`, as JSON has it, with its strings redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_values(key): redact_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value


def redact_record(record: logging.LogRecord) -> bool:
    """A filter of a logger: redacts what it logs, and makes it printable."""
    record.msg, record.args = printable(redact(record.getMessage())), ()
    return True
