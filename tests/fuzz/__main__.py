"""`python -m tests.fuzz images|largest|shards [--count N] [--seed N] [--first N]`: exit code 1 where one broke a promise.

Each input gives a sample or a named error in one line, within the time and memory that `child` allows, and the process
lives. Inputs are a function of seed and number: `--first 4711 --count 1` tries one of them again.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.fuzz.child import MAX_MIB, MAX_S, SUBJECTS
from tests.fuzz.originals import largest
from tests.fuzz.run import run

_COUNTS = {"images": 100_000, "largest": len(largest()), "shards": 10_000}
_MOST_KEPT = 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Damaged images and packed sets.")
    parser.add_argument("subject", choices=list(SUBJECTS), help="largest: the images that cost most, undamaged")
    parser.add_argument("--count", type=int, help=f"inputs (default: {_COUNTS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), metavar="FOLDER", help="for inputs that failed")
    args = parser.parse_args(arguments)
    last = args.first + (_COUNTS[args.subject] if args.count is None else args.count)
    figures = run(args.subject, args.seed, args.first, last, partial(print, file=sys.stderr, flush=True))
    print(figures.table())
    for number, problem in figures.wrong.items():
        print(f"input {number}: {problem}")
    if not figures.wrong:
        print(f"each a sample or a named error within {MAX_S[args.subject]:g} s and {MAX_MIB[args.subject]:,} MiB")
        return 0
    keep(args.subject, args.seed, list(figures.wrong)[:_MOST_KEPT], args.keep)
    print(f"the first {_MOST_KEPT} of them lie in {args.keep}" if len(figures.wrong) > _MOST_KEPT else f"they lie in {args.keep}")
    return 1


def keep(subject: str, seed: int, numbers: list[int], to: Path) -> None:
    """Write these inputs, each into a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        makes = SUBJECTS[subject](seed, Path(scratch)).make
        for number in numbers:
            folder = to / f"{subject}-{seed}-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in makes(number).files.items():
                if content is not None:
                    (folder / name).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
