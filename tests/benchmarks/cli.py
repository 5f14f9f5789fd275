"""How long the command takes to answer where it starts nothing: its help, and experiments that it refuses."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

from tests.benchmarks.process import ROOT, environment
from tests.benchmarks.rounds import Bar, Comparison, in_turn

COMMANDS = {
    "--help": (["--help"], 0),
    "an unknown key": (["train", "digits", "--set", "optim.rl=0.1"], 2),
    "an unknown model": (["train", "digits", "--set", "student.model=resnet19"], 2),
    "more than the data": (["train", "digits", "--set", "data.global_batch_size=2000"], 2),
    "more than the machine": (["train", "digits", "--set", "scale.num_workers=512", "--set", "data.global_batch_size=1024"], 2),
}


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    """The peer is an interpreter that starts and ends: it tells a slow machine from a slow command."""
    nothing = partial(answer_s, ["-c", ""], 0)
    lines = {name: partial(answer_s, ["-m", "service", *words], code) for name, (words, code) in COMMANDS.items()}
    yield [
        Comparison(f"cli, {name}", "s", in_turn(line, nothing), Bar("≤", 1.5), figure=lambda ours, _: ours, figure_name="seconds")
        for name, line in lines.items()
    ]


def answer_s(words: list[str], code: int) -> float:
    """Seconds that a Python command line takes to end.

    Raises:
        RuntimeError: it ended otherwise than with `code`.
    """
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}, not {code}:\n{done.stderr[-2000:]}")
    return seconds
