"""A warning of a Ray without a token, which runs what anyone sends to it."""

import http.client
import urllib.request

from trainables.notices import notice


def warn_if_unauthenticated(dashboard: str) -> None:
    """Tell the user that a Ray asks for no token, as a request without one to its `dashboard`, http://HOST:PORT, shows.

    Nothing is known of a dashboard that cannot be reached from here.
    """
    try:
        with urllib.request.urlopen(f"{dashboard}/api/version", timeout=5) as answer:
            text = answer.read(10_000)
    except (OSError, http.client.HTTPException):  # 401 among them
        return
    if b'"ray_version"' not in text:  # a page to log in, say
        return
    notice(
        f"the Ray at {dashboard} asks for no token: whoever reaches this address runs code as its owner; "
        "start it with a token: `ray get-auth-token --generate` before `ray start`"
    )
