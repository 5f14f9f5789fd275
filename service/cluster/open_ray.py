"""Warns of a Ray without a token, which runs code from anyone who can connect."""

import http.client
import urllib.request

from trainables.notices import notice


def warn_if_unauthenticated(dashboard: str) -> None:
    """Raise a notice if the Ray with this `dashboard`, http://HOST:PORT, accepts requests without a token.

    A dashboard that cannot be reached from here causes no notice.
    """
    try:
        with urllib.request.urlopen(f"{dashboard}/api/version", timeout=5) as answer:
            text = answer.read(10_000)
    except (OSError, http.client.HTTPException):  # including status 401
        return
    if b'"ray_version"' not in text:  # such as a login page
        return
    notice(
        f"the Ray at {dashboard} requires no token: anyone who can reach this address can run code as its owner; "
        "start it with a token: `ray get-auth-token --generate` before `ray start`"
    )
