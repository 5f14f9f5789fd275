"""Batches of inputs in processes of their own, watched; what came of them, as a table."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BATCH = 2000  # inputs of one process
_HANG_S = 120.0  # for one input: a dozen calls and more, each of them tried twice at the most
_LAST_WORDS = 2000  # characters


@dataclass
class Kind:
    """Figures of the inputs of one kind."""

    inputs: int = 0
    calls: int = 0
    samples: int = 0
    errors: int = 0
    slowest_s: float = 0.0
    peak_mib: int = 0


@dataclass
class Figures:
    """What came of all inputs. `wrong`: an input's number, and in what way it was not a sample or a named error in time."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, str] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        for name in (line["kind"][0], "all"):
            kind = self.kinds.setdefault(name, Kind())
            kind.inputs += 1
            kind.calls += line["calls"]
            kind.samples += line["found"].get("", 0)
            kind.errors += sum(count for text, count in line["found"].items() if text)
            kind.slowest_s = max(kind.slowest_s, line["slowest_s"])
            kind.peak_mib = max(kind.peak_mib, line["peak_mib"])
        self.reasons.update({text: count for text, count in line["found"].items() if text})
        if line["wrong"]:
            self.wrong[line["index"]] = f"{', '.join(line['kind'])}: {line['wrong']}"

    def table(self) -> str:
        rows = [("", "inputs", "calls", "samples", "named errors", "slowest", "peak")]
        for name, kind in sorted(self.kinds.items(), key=lambda item: item[0] == "all"):
            numbers = (f"{number:,}" for number in (kind.inputs, kind.calls, kind.samples, kind.errors))
            rows.append((name, *numbers, f"{kind.slowest_s * 1e3:,.0f} ms", f"{kind.peak_mib:,} MiB"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, "", *(f"{count:>12,}  {text}" for text, count in self.reasons.most_common())])


def run(subject: str, seed: int, first: int, last: int, say: Callable[[str], None] = lambda line: None) -> Figures:
    """Try the inputs [first, last) of `seed`."""
    figures, begin = Figures(), first
    while begin < last:
        end = min(begin + BATCH, last)
        for line in _lines(subject, [seed, begin, end], figures, begin):
            figures.add(line)
            begin = line["index"] + 1
        if begin < end:  # the process ended at this one
            figures.wrong[begin] = figures.wrong.get(begin, "the process died")
            begin += 1
        say(f"{begin - first:,} of {last - first:,} inputs, {len(figures.wrong)} wrong")
    return figures


def _lines(subject: str, numbers: list[int], figures: Figures, begin: int) -> Iterator[dict[str, Any]]:
    """The lines of a child, until it has ended, or is ended because it says nothing."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.child", subject, *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["OMP_NUM_THREADS"] = "1"
    lines: queue.Queue[str | None] = queue.Queue()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as messages,  # libraries say much about damaged files
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment) as child,
    ):

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while (line := lines.get(timeout=_HANG_S)) is not None:
                found = json.loads(line)
                begin = found["index"] + 1
                yield found
        except queue.Empty:
            figures.wrong[begin] = f"nothing after {_HANG_S:.0f} s"
        finally:
            child.kill()
            child.wait()
            messages.seek(0)
            last_words = messages.read()[-_LAST_WORDS:]
    if child.returncode > 0:
        raise RuntimeError(f"{' '.join(command)} ended with code {child.returncode}: {last_words}")
    if child.returncode < 0 and begin < numbers[-1]:
        figures.wrong.setdefault(begin, f"the process died of signal {-child.returncode}: {last_words}")
