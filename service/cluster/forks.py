"""What SIGTERM does to children that are forked and run Python, such as those of a process pool."""

import functools
import os
import signal
import threading

RESEND_S = 0.02
"""After which the fork has returned."""


@functools.cache
def let_sigterm_end_forks() -> None:
    """From now on SIGTERM ends every forked child, whatever it does to this process.

    The signal is blocked while this process forks: a child that is terminated at once would lose it, since CPython clears what
    comes before the child runs.
    """
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=_take_sigterm_later,
        after_in_child=_end_by_sigterm,
    )


def _take_sigterm_later() -> None:
    """Unblock SIGTERM. One that came while it was blocked is sent again: what a handler raises here, CPython prints and drops."""
    came = signal.SIGTERM in signal.sigpending()
    if came:
        signal.sigwait([signal.SIGTERM])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    if came:
        threading.Timer(RESEND_S, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
