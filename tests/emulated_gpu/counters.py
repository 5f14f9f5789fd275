"""What a process has done on the emulated GPU."""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass
class Counts:
    """Of calls of the runtime, by all threads of this process; what they mean: `runtime.c`."""

    launches: int = 0
    synchronisations: int = 0
    copies: int = 0


_NAMES = tuple(each.name for each in fields(Counts))


def _read() -> dict[str, int]:
    library = ctypes.CDLL(None)
    return {name: ctypes.c_long.in_dll(library, f"emulated_gpu_{name}").value for name in _NAMES}


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """The counts of what runs inside, complete at the end."""
    before, counts = _read(), Counts()
    try:
        yield counts
    finally:
        for name, value in _read().items():
            setattr(counts, name, value - before[name])
